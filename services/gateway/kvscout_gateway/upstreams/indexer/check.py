"""What indexers say of themselves, asked every now and then: what is wrong with them is silent otherwise.

* An indexer with another shard of the workers than `--indexer` says: the overlaps of those it lacks are 0.
* Workers from which no event ever came to it though they have served requests: so are theirs (blindness.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvscout.v1 import indexer_pb2, types_pb2
from kvscout_common.errors import KvscoutError
from kvscout_common.rpc.channel import call
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.shards import WHOLE, Shard
from kvscout_common.worker import ALL_TENANTS
from kvscout_gateway.engines.observation import Observations
from kvscout_gateway.upstreams.indexer.blindness import BlindRanks
from kvscout_gateway.upstreams.indexer.indexers import IndexerMember, Indexers

log = logging.getLogger("kvscout.gateway")

CHECK_SECONDS = 30.0
"""How often an indexer is asked: it may have restarted with other flags. Events have as long to arrive."""
RETRY_SECONDS = 1.0
CALL_SECONDS = 2.0


@dataclass(slots=True)
class CheckedIndexer:
    """One indexer, and what it said last."""

    member: IndexerMember
    shard: Shard
    """The workers that `--indexer` expects there."""
    ranks: BlindRanks
    wrong_shard: str = ""
    """How its shard differs; "" = it does not."""


class IndexerCheck:
    """What the indexers say, against what the gateway was told and what it has seen."""

    def __init__(
        self,
        indexers: Indexers,
        observations: Observations,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Has asked nobody yet.

        Args:
            indexers: By shard.
            observations: What was seen of the workers.
            clock: Seconds, as in the observations.
        """
        self._indexers = indexers
        self._observations = observations
        self._clock = clock
        self.checked: list[CheckedIndexer] = []

    def join(self, member: IndexerMember) -> CheckedIndexer:
        """Checks one more; to be kept by a task of its own."""
        shards = self._indexers.shards
        index = next(index for index, replicas in enumerate(shards) if member in replicas.members)
        one = CheckedIndexer(member, Shard(index, len(shards)), BlindRanks(self._observations))
        self.checked.append(one)
        return one

    def leave(self, member: IndexerMember) -> None:
        """Checks one no more."""
        self.checked = [one for one in self.checked if one.member is not member]

    def warnings(self) -> list[Warned]:
        """What is wrong, in sentences."""
        wrong: list[Warned] = [f"{one.member.name} {one.wrong_shard}" for one in self.checked if one.wrong_shard]
        return wrong + [
            TenantWarning(tenant, f"worker {rank.worker_id}/{rank.dp_rank} is blind at {one.member.name}: {reason}")
            for one in self.checked
            for (tenant, rank), reason in one.ranks.blind.items()
        ]

    async def keep(self, one: CheckedIndexer) -> None:
        """Asks one for ever."""
        while True:
            answered = await self._ask(one)
            await asyncio.sleep(CHECK_SECONDS if answered else RETRY_SECONDS)

    async def _ask(self, one: CheckedIndexer) -> bool:
        """One question; False if it was not answered."""
        try:
            status = await call(
                one.member.stub.GetStatus, types_pb2.GetStatusRequest(tenant=ALL_TENANTS), timeout=CALL_SECONDS
            )
        except KvscoutError:
            return False  # that it does not answer is known from its other calls
        # An indexer that says nothing of shards is one of before there were any.
        actual = Shard(status.shard_index, status.shard_count) if status.shard_count else WHOLE
        one.wrong_shard = (
            "" if actual == one.shard else f"has shard {actual} of the workers, --indexer expects {one.shard} there"
        )
        for served in one.ranks.judge(status.sources, self._clock()):
            await self._tell(one.member, served)
        return True

    async def _tell(self, member: IndexerMember, served: indexer_pb2.RecordRoutingRequest) -> None:
        try:
            await call(member.stub.RecordRouting, served, timeout=CALL_SECONDS)
        except KvscoutError as error:  # what still waits at the next question is told then
            log.debug("%s was not told which workers served: %s", member.name, error)
