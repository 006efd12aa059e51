"""The Gateway service: protobuf → the flows → protobuf."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from kvscout.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc, indexer_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.doctor.worker_health import load_healths
from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_common.identity.identity import AccessRole, current_identity, tenant_to_show
from kvscout_common.known_names import or_known
from kvscout_common.registry.worker_proto import rank_from_proto, spec_from_proto
from kvscout_common.registry.worker_rpcs import WorkerRpcs, required_id
from kvscout_common.rpc.request_names import NamesRequest
from kvscout_common.worker import DEFAULT_TENANT, WorkerSpec
from kvscout_gateway.engines.judge import health_to_proto
from kvscout_gateway.fronts.grpc import translate
from kvscout_gateway.fronts.grpc.failures import list_failures
from kvscout_gateway.fronts.grpc.generate import generate
from kvscout_gateway.fronts.grpc.ladder import get_ladder, ladders_of
from kvscout_gateway.fronts.grpc.status import gateway_status
from kvscout_gateway.request.failures import RequestSummary
from kvscout_gateway.request.recording import Recorder
from kvscout_gateway.values.decision import Decision

if TYPE_CHECKING:
    from kvscout_gateway.gateway import Gateway

SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name
RECORD_SECONDS = 0.1
"""Time in which requests are collected for one message to whoever records them."""
Named = TypeVar("Named", bound=NamesRequest)


class GatewayServicer(WorkerRpcs, gateway_pb2_grpc.GatewayServicer):
    """Translates; every decision is made below."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.registry, gateway.backends.registrar)
        self._gateway = gateway

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        gateway_pb2_grpc.add_GatewayServicer_to_server(self, server)
        handler: Any = grpc.unary_stream_rpc_method_handler(
            self.Generate, request_deserializer=gateway_pb2.GenerateRequest.FromString
        )
        # A method that is registered again is taken from its last registration.
        server.add_registered_method_handlers(SERVICE, {"Generate": handler})

    async def RegisterWorker(
        self, request: workers_pb2.RegisterWorkerRequest, context: Any
    ) -> workers_pb2.RegisterWorkerResponse:
        answer = await super().RegisterWorker(request, context)
        self._gateway.registration.announce(spec_from_proto(answer.worker))
        await self._gateway.registration.flush()
        return answer

    async def UpdateWorker(
        self, request: workers_pb2.UpdateWorkerRequest, context: Any
    ) -> workers_pb2.UpdateWorkerResponse:
        self._take_over(request.tenant or request.worker.tenant, request.worker.worker_id)
        answer = await super().UpdateWorker(request, context)
        await self._gateway.registration.flush()
        return answer

    async def DrainWorker(
        self, request: workers_pb2.DrainWorkerRequest, context: Any
    ) -> workers_pb2.DrainWorkerResponse:
        self._take_over(request.tenant, request.worker_id)
        await super().DrainWorker(request, context)
        await self._gateway.registration.flush()
        return await self._gateway.scheduler.call(lambda stub: stub.DrainWorker, request)

    async def KeepAlive(self, request: workers_pb2.KeepAliveRequest, context: Any) -> workers_pb2.KeepAliveResponse:
        answer = await super().KeepAlive(request, context)
        known = set(request.worker_ids).difference(answer.unknown_worker_ids)
        self._gateway.registration.keep_alive(request.tenant or DEFAULT_TENANT, known)
        return answer

    async def RemoveWorker(
        self, request: workers_pb2.RemoveWorkerRequest, context: Any
    ) -> workers_pb2.RemoveWorkerResponse:
        self._take_over(request.tenant, required_id(request.worker_id))
        answer = await super().RemoveWorker(request, context)
        await self._gateway.registration.flush()
        return answer

    def health(self, spec: WorkerSpec) -> types_pb2.WorkerHealth:
        """See `WorkerRpcs.health`."""
        return health_to_proto(self._gateway.judge.worker(spec))

    def _take_over(self, tenant: str, worker_id: str) -> None:
        self._gateway.registration.take_over(tenant or DEFAULT_TENANT, worker_id)

    async def Route(self, request: gateway_pb2.RouteRequest, context: Any) -> gateway_pb2.RouteResponse:
        log = self._gateway.failure_log
        asked = RequestSummary("Route", request.tenant or DEFAULT_TENANT, request.model, request.request_id)
        with log.watch(asked):
            decision = await self._routed(request, context)
        log.ended.add(None)
        if decision.degraded:
            log.degraded(asked, decision)
        return translate.route_response(decision, in_full=current_identity().role is AccessRole.ADMIN)

    async def _routed(self, request: gateway_pb2.RouteRequest, context: Any) -> Decision:
        if request.request_id:
            self._gateway.require_deciding()
        limit = self._gateway.config.max_prompt_tokens
        routed = translate.route_request(request, limit, max_priority=current_identity().max_priority)
        routed.session = self._gateway.front_context.sessions.named(routed.tenant, request.session)
        # The deadline of the call is that of its answer, not of the request's output.
        metadata = context.invocation_metadata() or ()
        routed = self._gateway.front_context.terms.apply(
            routed, metadata, current_identity(), objective=request.objective
        )
        return await self._gateway.routing.place_for_caller(routed)

    def Generate(  # type: ignore[override]  # writes bytes to the context instead of yielding messages
        self, request: gateway_pb2.GenerateRequest, context: Any
    ) -> Awaitable[None]:
        self._gateway.require_deciding()
        return generate(self._gateway.front_context, request, context, current_identity())

    async def MarkPrefillComplete(
        self, request: scheduler_pb2.MarkPrefillCompleteRequest, context: Any
    ) -> scheduler_pb2.MarkPrefillCompleteResponse:
        return await self._gateway.scheduler.call_booked(
            lambda stub: stub.MarkPrefillComplete, self._of_base_model(request, request.tenant)
        )

    async def Free(self, request: scheduler_pb2.FreeRequest, context: Any) -> scheduler_pb2.FreeResponse:
        return await self._gateway.scheduler.call_booked(
            lambda stub: stub.Free,
            self._of_base_model(request, request.tenant),
            lambda answer: answer.outcome != scheduler_pb2.FREE_OUTCOME_UNKNOWN,
        )

    async def Renew(self, request: scheduler_pb2.RenewRequest, context: Any) -> scheduler_pb2.RenewResponse:
        if not request.requests:
            raise InvalidArgument("names no request", field="requests")
        for ref in request.requests:
            self._of_base_model(ref, ref.tenant or request.tenant)
        return await self._gateway.scheduler.renew(request)

    async def AddOutput(self, request: scheduler_pb2.AddOutputRequest, context: Any) -> scheduler_pb2.AddOutputResponse:
        return await self._gateway.scheduler.call_booked(
            lambda stub: stub.AddOutput, self._of_base_model(request, request.tenant)
        )

    async def ListActiveRequests(
        self, request: scheduler_pb2.ListActiveRequestsRequest, context: Any
    ) -> scheduler_pb2.ListActiveRequestsResponse:
        answer = await self._gateway.scheduler.call(lambda stub: stub.ListActiveRequests, request)
        if current_identity().role is not AccessRole.ADMIN:  # the scheduler's caller was this gateway, which is one
            for one in answer.requests:
                one.ClearField("owner_id")
        return answer

    async def ListFailures(
        self, request: gateway_pb2.ListFailuresRequest, context: Any
    ) -> gateway_pb2.ListFailuresResponse:
        in_full = current_identity().role is AccessRole.ADMIN
        return list_failures(self._gateway.failure_log, request, tenant=tenant_to_show(request.tenant), in_full=in_full)

    async def GetLadder(self, request: gateway_pb2.GetLadderRequest, context: Any) -> gateway_pb2.GetLadderResponse:
        tenant = tenant_to_show(request.tenant)
        self._require_model(tenant, request.model)
        return get_ladder(self._gateway.exchanges.context.ladders, self._gateway.catalog, request, tenant=tenant)

    def _require_model(self, tenant: str, model: str) -> None:
        if model and not self.registry.entries(tenant, model):
            known = or_known(model, (entry.spec.model for entry in self.registry.entries(tenant)))
            raise NotFound(f"no worker of model {model!r}{known}", field="model")

    def _of_base_model(self, request: Named, tenant: str) -> Named:
        """Have a message name its request as the scheduler does: by the base model, where it names an adapter.

        Args:
            request: As a caller sent it.
            tenant: The tenant that it names, be it by the message that it is in.
        """
        if not request.request_id:
            raise InvalidArgument("must not be empty", field="request_id")
        request.model = self._gateway.catalog.tenant(tenant or DEFAULT_TENANT).resolve(request.model, "").model
        return request

    async def GetPotentialLoads(
        self, request: gateway_pb2.GatewayGetPotentialLoadsRequest, context: Any
    ) -> scheduler_pb2.GetPotentialLoadsResponse:
        query = translate.loads_request(request, self._gateway.config.max_prompt_tokens)
        answer = await self._gateway.routing.potential_loads(query)
        for load in answer.loads:
            spec = self._gateway.catalog.spec_of(query.tenant, load.worker.worker_id)
            if spec is not None:
                judged = health_to_proto(self._gateway.judge.rank(spec, rank_from_proto(load.worker)))
                load.health.CopyFrom(max((judged, *load_healths(load)), key=lambda one: one.state))
        return answer

    async def DumpEvents(
        self, request: gateway_pb2.DumpEventsRequest, context: Any
    ) -> AsyncGenerator[events_pb2.KvEventBatch, None]:
        onward = indexer_pb2.DumpRequest(tenant=request.tenant, model=request.model)
        async with aclosing(self._gateway.indexer.dump(onward)) as batches:
            async for batch in batches:
                yield batch

    async def RecordRequests(
        self, request: gateway_pb2.RecordRequestsRequest, context: Any
    ) -> AsyncGenerator[gateway_pb2.RecordRequestsResponse, None]:
        tenant = tenant_to_show(request.tenant)
        news = asyncio.Event()
        recorder = Recorder(tenant, request.model, request.key, request.tokens_per_hash, news.set)
        recording = self._gateway.exchanges.context.recording
        recording.add(recorder)
        try:
            # Headers go out immediately: the caller knows from when on it misses nothing.
            await context.send_initial_metadata(())
            while True:
                await news.wait()
                # One message for all requests of a moment costs a fraction of one for each.
                await asyncio.sleep(RECORD_SECONDS)
                news.clear()
                while (message := recorder.take()) is not None:
                    yield message
        finally:
            recording.remove(recorder)

    async def GetBusyThresholds(
        self, request: types_pb2.GetBusyThresholdsRequest, context: Any
    ) -> types_pb2.GetBusyThresholdsResponse:
        return await self._gateway.scheduler.call(lambda stub: stub.GetBusyThresholds, request)

    async def SetBusyThresholds(
        self, request: types_pb2.SetBusyThresholdsRequest, context: Any
    ) -> types_pb2.SetBusyThresholdsResponse:
        return await self._gateway.scheduler.set_busy_thresholds(request)

    async def ListBusyThresholds(
        self, request: types_pb2.ListBusyThresholdsRequest, context: Any
    ) -> types_pb2.ListBusyThresholdsResponse:
        return await self._gateway.scheduler.call(lambda stub: stub.ListBusyThresholds, request)

    async def GetStatus(
        self, request: types_pb2.GetStatusRequest, context: Any
    ) -> gateway_pb2.GatewayGetStatusResponse:
        gateway = self._gateway
        tenant = tenant_to_show(request.tenant)
        self._require_model(tenant, request.model)
        if request.check_workers:
            await gateway.health_checks.check_all(tenant)
        status = gateway_status(gateway, tenant, request.model)
        status.ladders.extend(ladders_of(gateway.exchanges.context.ladders, gateway.catalog, tenant, request.model))
        return status
