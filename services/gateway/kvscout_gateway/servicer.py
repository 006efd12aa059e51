"""The Gateway service: protobuf → the flows → protobuf."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from kvscout.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc, indexer_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.channel import stream
from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_common.hashing import block_hashes
from kvscout_common.registry import ALL_TENANTS
from kvscout_common.worker import DEFAULT_TENANT
from kvscout_common.worker_proto import rank_to_proto, role_from_proto
from kvscout_common.worker_rpcs import WorkerRpcs, required_id
from kvscout_gateway import translate
from kvscout_gateway.failover import HelperDown
from kvscout_gateway.gateway import Gateway
from kvscout_gateway.prompt import geometries, resolve_target

if TYPE_CHECKING:
    from kvscout.v1 import scheduler_pb2_grpc

Answer = TypeVar("Answer")


class GatewayServicer(WorkerRpcs, gateway_pb2_grpc.GatewayServicer):
    """Translates; every decision is made below."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.registry)
        self._gateway = gateway

    async def RegisterWorker(
        self, request: workers_pb2.RegisterWorkerRequest, context: Any
    ) -> workers_pb2.RegisterWorkerResponse:
        answer = await super().RegisterWorker(request, context)
        await self._gateway.registration.flush()
        return answer

    async def UpdateWorker(
        self, request: workers_pb2.UpdateWorkerRequest, context: Any
    ) -> workers_pb2.RegisterWorkerResponse:
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
        answer, _ = await self._scheduler(lambda stub: stub.DrainWorker, request)
        return answer

    async def KeepAlive(self, request: workers_pb2.KeepAliveRequest, context: Any) -> workers_pb2.KeepAliveResponse:
        for worker_id in request.worker_ids:
            self._take_over(request.tenant, worker_id)
        return await super().KeepAlive(request, context)

    async def RemoveWorker(
        self, request: workers_pb2.RemoveWorkerRequest, context: Any
    ) -> workers_pb2.RemoveWorkerResponse:
        self._take_over(request.tenant, required_id(request.worker_id))
        answer = await super().RemoveWorker(request, context)
        await self._gateway.registration.flush()
        return answer

    def _take_over(self, tenant: str, worker_id: str) -> None:
        self._gateway.registration.take_over(tenant or DEFAULT_TENANT, worker_id)

    async def Route(self, request: gateway_pb2.RouteRequest, context: Any) -> gateway_pb2.RouteResponse:
        placement = await self._gateway.routing.place(translate.route_wish(request))
        return translate.route_response(placement)

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        wish = translate.generate_wish(request, self._gateway.config.lease_seconds)
        parameters = translate.engine_parameters(request)
        async for piece in self._gateway.generate.run(wish, parameters):
            yield translate.generate_response(piece, wish.request_id)

    async def MarkPrefillComplete(
        self, request: scheduler_pb2.RequestRef, context: Any
    ) -> scheduler_pb2.MarkPrefillCompleteResponse:
        answer, _ = await self._scheduler(lambda stub: stub.MarkPrefillComplete, self._ref(request))
        return answer

    async def Free(self, request: scheduler_pb2.RequestRef, context: Any) -> scheduler_pb2.FreeResponse:
        answer, _ = await self._scheduler(lambda stub: stub.Free, self._ref(request))
        return answer

    def _ref(self, request: scheduler_pb2.RequestRef) -> scheduler_pb2.RequestRef:
        """The reference as the scheduler has it: an adapter's name stands for its base model."""
        if not request.request_id:
            raise InvalidArgument("must not be empty", field="request_id")
        target = resolve_target(request.model, "", self._gateway.workers(request.tenant or DEFAULT_TENANT))
        ref = scheduler_pb2.RequestRef()
        ref.CopyFrom(request)
        ref.model = target.model
        return ref

    async def GetPotentialLoads(
        self, request: gateway_pb2.GatewayPotentialLoadsRequest, context: Any
    ) -> scheduler_pb2.PotentialLoadsResponse:
        tenant = request.tenant or DEFAULT_TENANT
        workers = self._gateway.workers(tenant)
        target = resolve_target(request.model, request.lora_name, workers)
        pools = geometries(spec for spec in workers if spec.model == target.model)
        onward = scheduler_pb2.PotentialLoadsRequest(
            model=target.model, tenant=tenant, role=request.role, isl_tokens=len(request.token_ids)
        )
        if pools and request.token_ids:
            hashes = block_hashes(
                translate.pack_tokens(request.token_ids),
                pools[0].block_size,
                lora_name=target.lora_name,
                cache_salt=request.cache_salt,
                eagle=pools[0].eagle,
            )
            onward.block_hashes.extend(hashes)
            query = indexer_pb2.FindMatchesRequest(
                model=target.model,
                tenant=tenant,
                block_size=pools[0].block_size,
                eagle=pools[0].eagle,
                block_hashes=hashes,
            )
            try:
                matches, _ = await self._gateway.indexers.call(
                    lambda stub: stub.FindMatches,
                    query,
                    timeout_seconds=self._gateway.config.indexer_timeout_seconds,
                )
                onward.overlaps.CopyFrom(matches.overlaps)
            except (HelperDown, NotFound):
                self._gateway.metrics.degraded("indexer")
        role_from_proto(request.role)
        answer, _ = await self._scheduler(lambda stub: stub.GetPotentialLoads, onward)
        return answer

    async def DumpEvents(
        self, request: gateway_pb2.DumpEventsRequest, context: Any
    ) -> AsyncGenerator[events_pb2.KvEventBatch, None]:
        onward = indexer_pb2.DumpRequest(tenant=request.tenant, model=request.model)
        member = next(iter(self._gateway.indexers.preferred()), None)
        if member is None:
            raise HelperDown("no indexer is configured")
        async for batch in stream(member.stub.Dump, onward):
            yield batch

    async def GetBusyThresholds(
        self, request: types_pb2.GetBusyThresholdsRequest, context: Any
    ) -> types_pb2.BusyThresholds:
        answer, _ = await self._scheduler(lambda stub: stub.GetBusyThresholds, request)
        return answer

    async def SetBusyThresholds(
        self, request: types_pb2.SetBusyThresholdsRequest, context: Any
    ) -> types_pb2.BusyThresholds:
        timeout = self._gateway.config.scheduler_timeout_seconds
        answers = [
            await member.call(lambda stub: stub.SetBusyThresholds, request, timeout)
            for member in self._gateway.schedulers.members
        ]
        if not answers:
            raise HelperDown("no scheduler is configured")
        return answers[0]

    async def ListBusyThresholds(
        self, request: types_pb2.ListBusyThresholdsRequest, context: Any
    ) -> types_pb2.ListBusyThresholdsResponse:
        answer, _ = await self._scheduler(lambda stub: stub.ListBusyThresholds, request)
        return answer

    async def GetStatus(self, request: types_pb2.GetStatusRequest, context: Any) -> gateway_pb2.GatewayStatus:
        gateway = self._gateway
        tenant = request.tenant or DEFAULT_TENANT
        if request.model and not self.registry.entries(tenant, request.model):
            raise NotFound(f"no worker of model {request.model!r}", field="model")
        ids = {(e.spec.tenant, e.spec.worker_id) for e in self.registry.entries(tenant, request.model)}
        return gateway_pb2.GatewayStatus(
            service=gateway.info(),
            helpers=gateway.helper_statuses(),
            workers=[
                gateway_pb2.WorkerObservation(
                    worker=rank_to_proto(rank),
                    requests=seen.requests,
                    failures=seen.failures,
                    prompt_tokens=seen.prompt_tokens,
                    cached_tokens=seen.cached_tokens,
                    checked=seen.checked,
                    mispredicted=seen.mispredicted,
                    prediction_error_tokens=seen.prediction_error_tokens,
                )
                for (owner, rank), seen in sorted(gateway.observations.by_rank.items())
                if tenant in (ALL_TENANTS, owner) and (owner, rank.worker_id) in ids
            ],
            in_flight=gateway.generate.in_flight,
            requests=gateway.generate.requests,
            failures=gateway.generate.failures,
            degraded=gateway.metrics.degraded_counts,
        )

    async def _scheduler(
        self,
        method: Callable[[scheduler_pb2_grpc.SchedulerAsyncStub], Callable[..., Awaitable[Answer]]],
        request: object,
    ) -> tuple[Answer, object]:
        return await self._gateway.schedulers.call(
            method, request, timeout_seconds=self._gateway.config.scheduler_timeout_seconds
        )
