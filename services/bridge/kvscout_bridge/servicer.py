"""The Bridge service: protobuf → one call of the core → protobuf."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from kvscout.v1 import bridge_pb2, bridge_pb2_grpc, types_pb2
from kvscout_bridge.bridge import Bridge, problems
from kvscout_bridge.rank import BridgedRank
from kvscout_common.identity.identity import tenant_to_show
from kvscout_common.registry.worker_proto import rank_to_proto
from kvscout_common.rpc.service_info import service_info


class BridgeServicer(bridge_pb2_grpc.BridgeServicer):
    """Translates; every decision is made below."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    async def Recover(
        self, request: bridge_pb2.RecoverRequest, context: Any
    ) -> AsyncGenerator[bridge_pb2.RecoverResponse, None]:
        for part in await self._bridge.recover(request):
            yield part

    async def GetStatus(self, request: types_pb2.GetStatusRequest, context: Any) -> bridge_pb2.BridgeGetStatusResponse:
        tenant = tenant_to_show(request.tenant)
        return bridge_pb2.BridgeGetStatusResponse(
            service=service_info(
                self._bridge.started, warnings=self._bridge.warnings(), nats=self._bridge.link.status()
            ),
            sources=[
                source_status(rank) for rank in self._bridge.ranks(tenant) if request.model in ("", rank.spec.model)
            ],
            connected=self._bridge.link.connected,
        )


def source_status(rank: BridgedRank) -> bridge_pb2.BridgeSource:
    """Return the state of one rank."""
    publication, stats = rank.publication, rank.index.worker_stats(rank.rank)
    confirmed = publication.confirmed
    return bridge_pb2.BridgeSource(
        worker=rank_to_proto(rank.rank),
        epoch=publication.local.epoch,
        last_event_id=confirmed.event_id if confirmed is not None else None,
        buffered_batches=publication.waiting,
        dropped_batches=publication.dropped,
        blocks=stats.blocks if stats is not None else 0,
        problem="; ".join(problems(rank)),
        tenant=rank.spec.tenant,
    )
