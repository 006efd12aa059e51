"""Whether each indexer has the workers that `--indexer` says it has: if not, their overlaps are silently 0."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvscout.v1 import types_pb2
from kvscout_common.channel import call
from kvscout_common.errors import KvscoutError
from kvscout_common.registry import ALL_TENANTS
from kvscout_common.shards import WHOLE, Shard
from kvscout_gateway.indexers import IndexerMember, Indexers

CHECK_SECONDS = 30.0
"""How often an indexer is asked: it may have restarted with other flags."""
RETRY_SECONDS = 1.0
CALL_SECONDS = 2.0


class ShardCheck:
    """What the indexers themselves say of their shards, against what the gateway was told."""

    def __init__(self, indexers: Indexers) -> None:
        count = len(indexers.shards)
        self._expected: Sequence[tuple[IndexerMember, Shard]] = [
            (member, Shard(index, count))
            for index, replicas in enumerate(indexers.shards)
            for member in replicas.members
        ]
        self._wrong: dict[str, str] = {}

    def warnings(self) -> list[str]:
        """What does not fit, in sentences."""
        return [f"{name} {why}" for name, why in self._wrong.items()]

    async def run(self) -> None:
        """Asks for ever."""
        async with asyncio.TaskGroup() as group:
            for member, shard in self._expected:
                group.create_task(self._keep(member, shard))

    async def _keep(self, member: IndexerMember, expected: Shard) -> None:
        while True:
            answered = await self._ask(member, expected)
            await asyncio.sleep(CHECK_SECONDS if answered else RETRY_SECONDS)

    async def _ask(self, member: IndexerMember, expected: Shard) -> bool:
        """One question; False if it was not answered."""
        try:
            status = await call(
                member.stub.GetStatus, types_pb2.GetStatusRequest(tenant=ALL_TENANTS), timeout=CALL_SECONDS
            )
        except KvscoutError:
            return False  # that it does not answer is known from its other calls
        # An indexer that says nothing of shards is one of before there were any.
        actual = Shard(status.shard_index, status.shard_count) if status.shard_count else WHOLE
        if actual == expected:
            self._wrong.pop(member.name, None)
        else:
            self._wrong[member.name] = f"has shard {actual} of the workers, --indexer expects {expected} there"
        return True
