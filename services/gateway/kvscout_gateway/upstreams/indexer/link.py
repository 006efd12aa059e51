"""One indexer as the gateway calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc
from kvscout_gateway.upstreams.failover import Failover, Member
from kvscout_gateway.upstreams.indexer.match_stream import SERVICE, MatchStream

if TYPE_CHECKING:
    _Stub = indexer_pb2_grpc.IndexerAsyncStub
else:
    _Stub = indexer_pb2_grpc.IndexerStub


class IndexerLink(_Stub):
    """An indexer's stub, with FindMatches over a stream, and RecordRouting of bytes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)
        self.find_matches = MatchStream(channel)
        self.record_routing: Any = channel.unary_unary(
            f"/{SERVICE}/RecordRouting", response_deserializer=indexer_pb2.RecordRoutingResponse.FromString
        )


Replicas: TypeAlias = "Failover[IndexerLink]"
IndexerMember: TypeAlias = "Member[IndexerLink]"
