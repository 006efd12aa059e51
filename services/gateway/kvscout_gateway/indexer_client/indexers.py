"""The indexers: a list of replicas for each shard of the workers, in most fleets one shard that has them all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc

from kvscout.v1 import indexer_pb2_grpc
from kvscout_common.channel import ClientSecurity
from kvscout_common.shards import Shard, shard_of
from kvscout_gateway.failover import Failover, Member
from kvscout_gateway.indexer_client.match_stream import MatchStream

Replicas: TypeAlias = "Failover[indexer_pb2_grpc.IndexerAsyncStub]"
IndexerMember: TypeAlias = "Member[indexer_pb2_grpc.IndexerAsyncStub]"


class Indexers:
    """Every indexer of a gateway, by shard."""

    def __init__(self, shards: Sequence[Sequence[str]], security: ClientSecurity) -> None:
        """Connects lazily.

        Args:
            shards: Addresses of each shard's replicas in order of preference; empty = there is no indexer.
            security: How they are called.
        """
        self._streams: list[MatchStream] = []
        count = len(shards)
        names = [str(Shard(index, count)) if count > 1 else "" for index in range(count)]
        self.shards: tuple[Replicas, ...] = tuple(
            Failover("indexer", addresses, self._stub, security, shard=name)
            for name, addresses in zip(names, shards, strict=True)
        )

    @property
    def members(self) -> list[IndexerMember]:
        """Every replica of every shard."""
        return [member for shard in self.shards for member in shard.members]

    def position(self, tenant: str, worker_id: str) -> int:
        """Which of `shards` has a worker; there must be an indexer."""
        return shard_of(tenant, worker_id, len(self.shards))

    async def close(self) -> None:
        """Ends every stream and closes every channel."""
        await asyncio.gather(*(stream.close() for stream in self._streams))
        await asyncio.gather(*(shard.close() for shard in self.shards))

    def _stub(self, channel: grpc.aio.Channel) -> indexer_pb2_grpc.IndexerAsyncStub:
        """A stub whose FindMatches goes over a stream."""
        stub: Any = indexer_pb2_grpc.IndexerStub(channel)
        stub.FindMatches = MatchStream(stub)
        self._streams.append(stub.FindMatches)
        return stub  # type: ignore[no-any-return]
