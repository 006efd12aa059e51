"""Status of the indexers, read every `CHECK_SECONDS`: faults that no call of theirs shows.

* An indexer with another shard of the workers than `--indexer` says: the overlaps of those it lacks are 0.
* Workers from which no event ever came to it though they have served requests, or comes no longer: so are theirs
  (blindness.py).
* Workers whose engine emptied its cache without an event: their overlaps are wrong (emptied_caches.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvscout.v1 import indexer_pb2, types_pb2
from kvscout_common.errors import KvscoutError
from kvscout_common.rpc.channel import call
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.shards import WHOLE, Shard
from kvscout_common.worker import ALL_TENANTS, WorkerRank
from kvscout_gateway.upstreams.indexer.blindness import BlindRanks, Reports, Served
from kvscout_gateway.upstreams.indexer.emptied_caches import EmptiedCaches
from kvscout_gateway.upstreams.indexer.link import IndexerMember
from kvscout_gateway.values.cache_reports import CacheReports

log = logging.getLogger("kvscout.gateway")

CHECK_SECONDS = 2.0
"""Between two readings, at least: an indexer may have restarted with other flags. Events have as long to arrive."""
REST = 100.0
"""Pause after a reading, at least, as a multiple of its duration: a status of thousands of workers costs an indexer
milliseconds."""
RETRY_SECONDS = 1.0
CALL_SECONDS = 2.0


@dataclass(slots=True)
class CheckedIndexer:
    """One indexer, and its last status."""

    member: IndexerMember
    shard: Shard
    """The workers that `--indexer` expects there."""
    ranks: BlindRanks
    caches: EmptiedCaches
    wrong_shard: str = ""
    """Difference of its shard; "" = it does not."""


class IndexerCheck:
    """The indexers' statuses, compared with the flags and with what the gateway has seen.

    Args:
        served: Gives when a worker rank was sent requests that should have brought events.
        reports: Tells whether a worker reports the prompt tokens that it had cached.
        caches: What engines report as cached.
        clock: Seconds, as of those times.
    """

    def __init__(
        self,
        served: Served,
        reports: Reports,
        caches: CacheReports,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._served = served
        self._reports = reports
        self._caches = caches
        self._clock = clock
        self.checked: list[CheckedIndexer] = []

    def join(self, member: IndexerMember, shard: Shard) -> CheckedIndexer:
        """Add an indexer; `keep` is its task until it leaves."""
        one = CheckedIndexer(member, shard, BlindRanks(self._served, self._reports), EmptiedCaches(self._caches))
        self.checked.append(one)
        return one

    def leave(self, member: IndexerMember) -> None:
        """Remove an indexer that is gone."""
        self.checked = [one for one in self.checked if one.member is not member]

    def warnings(self) -> list[Warned]:
        """Return what is wrong, in sentences."""
        wrong: list[Warned] = [f"{one.member.name} {one.wrong_shard}" for one in self.checked if one.wrong_shard]
        return wrong + [
            TenantWarning(tenant, f"worker {rank.worker_id}/{rank.dp_rank} is blind at {one.member.name}: {reason}")
            for one in self.checked
            for (tenant, rank), reason in one.ranks.blind.items()
        ]

    def no_events(self) -> Mapping[tuple[str, WorkerRank], str]:
        """Return the worker ranks whose events are missing at an indexer, and what says so."""
        return {rank: reason for one in self.checked for rank, reason in one.ranks.no_events.items()}

    async def keep(self, one: CheckedIndexer) -> None:
        """Read the status of an indexer, for ever."""
        while True:
            began = time.monotonic()
            answered = await self._read(one)
            rest = max(CHECK_SECONDS, REST * (time.monotonic() - began))
            await asyncio.sleep(rest if answered else RETRY_SECONDS)

    async def _read(self, one: CheckedIndexer) -> bool:
        """Read the status of an indexer; return False if it did not answer."""
        try:
            status = await call(
                one.member.stub.GetStatus, types_pb2.GetStatusRequest(tenant=ALL_TENANTS), timeout=CALL_SECONDS
            )
        except KvscoutError:
            return False  # that it does not answer is known from its other calls
        actual = Shard(status.shard_index, status.shard_count) if status.shard_count else WHOLE
        one.wrong_shard = (
            "" if actual == one.shard else f"has shard {actual} of the workers, --indexer expects {one.shard} there"
        )
        now = self._clock()
        for found in (*one.ranks.judge(status.sources, now), *one.caches.judge(status.sources, now)):
            await self._report(one.member, found)
        return True

    async def _report(self, member: IndexerMember, found: indexer_pb2.RecordRoutingRequest) -> None:
        try:
            await call(member.stub.RecordRouting, found, timeout=CALL_SECONDS)
        except KvscoutError as error:  # what still holds then is reported with the next status
            log.debug("what workers' requests show was not reported to %s: %s", member.name, error)
