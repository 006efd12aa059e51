"""The indexers: a list of replicas for each shard of the workers, in most fleets one shard that has them all."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from xxhash import xxh3_64_intdigest

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.shards import Shard, shard_of
from kvscout_gateway.upstreams.failover import Failover, Member
from kvscout_gateway.upstreams.indexer.match_stream import SERVICE, MatchStream

if TYPE_CHECKING:
    _Stub = indexer_pb2_grpc.IndexerAsyncStub
else:
    _Stub = indexer_pb2_grpc.IndexerStub


class IndexerLink(_Stub):
    """An indexer's stub, FindMatches over its stream, and what else is told in bytes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)
        self.find_matches = MatchStream(channel)
        self.record_routing: Any = channel.unary_unary(
            f"/{SERVICE}/RecordRouting", response_deserializer=indexer_pb2.RecordRoutingResponse.FromString
        )


Replicas: TypeAlias = "Failover[IndexerLink]"
IndexerMember: TypeAlias = "Member[IndexerLink]"


class Indexers:
    """Every indexer of a gateway, by shard."""

    def __init__(self, shards: Sequence[Sequence[str]], security: ClientSecurity) -> None:
        """Connects lazily.

        Args:
            shards: Addresses and names of each shard's replicas in order of preference; empty = there is no indexer.
            security: How they are called.
        """
        count, salt = len(shards), secrets.token_bytes(8)

        def order(address: str) -> int:
            """Another one for each gateway: the indexers behind a name share the questions."""
            return xxh3_64_intdigest(salt + address.encode())

        shares = [Shard(index, count) if count > 1 else None for index in range(count)]
        self.shards: tuple[Replicas, ...] = tuple(
            Failover("indexer", addresses, IndexerLink, security, shard=share, order=order)
            for share, addresses in zip(shares, shards, strict=True)
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
        await asyncio.gather(*(member.stub.find_matches.close() for member in self.members))
        await asyncio.gather(*(shard.close() for shard in self.shards))
