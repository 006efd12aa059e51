"""The Scheduler service: protobuf → one call of the core → protobuf."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.errors import InvalidArgument, KvscoutError
from kvscout_common.hashing import native_available
from kvscout_common.identity.identity import AccessRole, current_identity, tenant_to_show
from kvscout_common.observability import tracing
from kvscout_common.registry.backends import Backends
from kvscout_common.registry.registry import Registry
from kvscout_common.registry.worker_proto import rank_from_proto, rank_to_proto, role_to_proto
from kvscout_common.registry.worker_rpcs import WorkerRpcs
from kvscout_common.rpc.pages import page_token, read_page_token
from kvscout_common.rpc.raw_messages import parse_message
from kvscout_common.rpc.service_info import service_info
from kvscout_common.worker import ALL_TENANTS, DEFAULT_TENANT, Role
from kvscout_scheduler.estimates.engine_metrics import EngineMetrics
from kvscout_scheduler.load import native as native_load
from kvscout_scheduler.messages import translate
from kvscout_scheduler.messages.codec import columns_of, select_of
from kvscout_scheduler.messages.operation_messages import answer_to_proto, operation_from_proto
from kvscout_scheduler.messages.translate import given_fields, thresholds_to_proto
from kvscout_scheduler.rpc.lifecycle import LifecycleRpc
from kvscout_scheduler.rpc.listing import (
    ListPlace,
    list_active_requests,
    load_to_proto,
    policy_failures,
    potential_loads,
    queue_shares,
)
from kvscout_scheduler.rpc.operations import Operations, RemoteOperations
from kvscout_scheduler.rpc.traces import record
from kvscout_scheduler.rpc.watch import WatchRpcs
from kvscout_scheduler.values.operations import Operation, Outcome, Reserve, Select
from kvscout_scheduler.values.reservation import RequestKey

if TYPE_CHECKING:
    from kvscout_scheduler.scheduler import Scheduler

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
DEFAULT_PAGE_SIZE = 1_000
MAX_PAGE_SIZE = 10_000


class Replicas(Protocol):
    """The other replicas of the scheduler."""

    @property
    def forwarding(self) -> RemoteOperations:
        """Return operations on bookings of others."""

    @property
    def problem(self) -> str:
        """Return why this replica works alone; "" = it does not."""

    def to_proto(self) -> scheduler_pb2.GetReplicasResponse:
        """Return the answer to `GetReplicas`."""


# Lifecycle writes to its context itself, which grpc allows and its stubs do not know.
class SchedulerServicer(LifecycleRpc, WatchRpcs, WorkerRpcs, scheduler_pb2_grpc.SchedulerServicer):  # type: ignore[misc]
    """The Scheduler service; every decision is made in `Scheduler`."""

    def __init__(
        self, scheduler: Scheduler, registry: Registry, backends: Backends, replicas: Replicas | None = None
    ) -> None:
        WorkerRpcs.__init__(self, registry, backends.registrar)
        LifecycleRpc.__init__(self, scheduler, replicas.forwarding if replicas is not None else None)
        self._replicas = replicas
        self._warnings = backends.warnings
        self._nats = backends.nats
        self._started = time.monotonic()
        self._lists = secrets.token_hex(4)
        """In page tokens: the places in them are on this process's clock."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add itself to a server, with raw bytes where messages are large or many."""
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, server)
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Lifecycle": grpc.stream_stream_rpc_method_handler(self.Lifecycle),
            "SelectAndReserve": grpc.unary_unary_rpc_method_handler(self.select_and_reserve_of_bytes),
        }
        # A method that is registered again is taken from its last registration.
        server.add_registered_method_handlers(SERVICE, handlers)

    def active_requests(self, tenant: str, worker_id: str) -> int:
        """Return requests active on a worker."""
        return list_active_requests(self._scheduler, tenant, worker_id=worker_id, limit=0)[1]

    async def Select(self, request: scheduler_pb2.SelectRequest, context: Any) -> Any:
        return await self._one("select", request, context)

    async def SelectAndReserve(self, request: scheduler_pb2.SelectRequest, context: Any) -> Any:
        return await self._one("select_and_reserve", request, context)

    async def select_and_reserve_of_bytes(self, request: bytes, context: Any) -> bytes:
        """Serve `SelectAndReserve` over serialised messages."""
        read = native_load.select_request(request) if native_available() else None
        if read is None:
            message = parse_message(scheduler_pb2.SelectRequest, request)
            response: scheduler_pb2.SelectResponse = await self.SelectAndReserve(message, context)
            return response.SerializeToString()
        operation = select_of(read)
        current_identity().require_tenant(operation.request.tenant)
        decision = await self._outcome(operation, context)
        if decision.policy_problem:
            written: bytes = answer_to_proto(operation, decision).SerializeToString()
            return written
        return native_load.select_response(columns_of(decision))

    async def Reserve(self, request: scheduler_pb2.ReserveRequest, context: Any) -> Any:
        return await self._one("reserve", request, context)

    async def MarkPrefillComplete(self, request: scheduler_pb2.MarkPrefillCompleteRequest, context: Any) -> Any:
        return await self._one("prefill_complete", request, context)

    async def AddOutput(self, request: scheduler_pb2.AddOutputRequest, context: Any) -> Any:
        return await self._one("add_output", request, context)

    async def Free(self, request: scheduler_pb2.FreeRequest, context: Any) -> Any:
        return await self._one("free", request, context, output_tokens=request.output_tokens)

    async def Renew(self, request: scheduler_pb2.RenewRequest, context: Any) -> Any:
        return await self._one("renew", request, context)

    async def _one(self, kind: str, request: Any, context: Any, *, output_tokens: int = 0) -> Any:
        operation = operation_from_proto(kind, request, output_tokens=output_tokens)
        return answer_to_proto(operation, await self._outcome(operation, context))

    async def _outcome(self, operation: Operation, context: Any) -> Any:
        """Return the outcome of a unary call, be it later; a caller that goes away meanwhile, or does not
        get the answer (deadline, connection), leaves nothing booked.

        Raises:
            KvscoutError: What came of it.
        """
        decided: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        operations = Operations(self._scheduler, None, lambda *later: decided.set_result(later[-1]), self._remote)
        booked = _booked_by(operation)
        if isinstance(operation, Select):
            # The span of the call is there.
            operation = operation._replace(traceparent="")
        try:
            outcome: Any = operations.carry_out(0, operation)
            if outcome is None:
                outcome = await asyncio.shield(decided)
        except asyncio.CancelledError:
            if booked is not None and decided.done():
                self._scheduler.undelivered(*booked)
            operations.close()
            raise
        if isinstance(operation, Select):
            record(tracing.current(), operation.request, outcome)
        if isinstance(outcome, KvscoutError):
            raise outcome
        if booked is not None:

            def done(ended: Any) -> None:
                # grpc says `cancelled` only of what the server itself cancelled; `done` is that a status was sent.
                if not ended.done():
                    self._scheduler.undelivered(*booked)

            context.add_done_callback(done)
        return outcome

    async def GetReplicas(
        self, request: scheduler_pb2.GetReplicasRequest, context: Any
    ) -> scheduler_pb2.GetReplicasResponse:
        if self._replicas is None:
            return scheduler_pb2.GetReplicasResponse(problem="replicas are off (--router-replica-sync)")
        return self._replicas.to_proto()

    async def GetPotentialLoads(
        self, request: scheduler_pb2.SchedulerGetPotentialLoadsRequest, context: Any
    ) -> scheduler_pb2.GetPotentialLoadsResponse:
        loads = potential_loads(
            self._scheduler,
            translate.pool_from_request(request),
            isl_tokens=request.isl_tokens,
            prompt=translate.prompt_from_proto(request),
            other_prompts=translate.other_prompts_from_proto(request),
        )
        return scheduler_pb2.GetPotentialLoadsResponse(loads=map(load_to_proto, loads))

    async def ListActiveRequests(
        self, request: scheduler_pb2.ListActiveRequestsRequest, context: Any
    ) -> scheduler_pb2.ListActiveRequestsResponse:
        tenant = request.tenant or DEFAULT_TENANT
        listed, total, following = list_active_requests(
            self._scheduler,
            tenant,
            model=request.model,
            worker_id=request.worker_id,
            limit=min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE),
            after=self._place(request.page_token, tenant),
            # Who knows an owner's id can be taken for it.
            shows_owner=current_identity().role is AccessRole.ADMIN,
        )
        return scheduler_pb2.ListActiveRequestsResponse(
            requests=listed,
            total=total,
            next_page_token=self._page_token(following) if following is not None else "",
        )

    def _page_token(self, place: ListPlace) -> str:
        key = place.key
        return page_token(self._lists, int(place.queued), place.since, key.model, key.role, key.request_id)

    def _place(self, token: str, tenant: str) -> ListPlace | None:
        place = read_page_token(token, str, int, float, str, str, str)
        if place is None:
            return None
        lists, queued, since, model, role, request_id = place
        if lists != self._lists or role not in list(Role):
            raise InvalidArgument("comes from another scheduler: list again from the beginning", field="page_token")
        return ListPlace(bool(queued), since, RequestKey(tenant, model, Role(role), request_id))

    async def ReportWorkerMetrics(
        self, request: scheduler_pb2.ReportWorkerMetricsRequest, context: Any
    ) -> scheduler_pb2.ReportWorkerMetricsResponse:
        self._scheduler.report_metrics(
            request.tenant or DEFAULT_TENANT,
            rank_from_proto(request.worker),
            EngineMetrics(**given_fields(request, "kv_cache_usage", "running_requests", "waiting_requests")),
        )
        return scheduler_pb2.ReportWorkerMetricsResponse()

    async def ReportFailure(
        self, request: scheduler_pb2.ReportFailureRequest, context: Any
    ) -> scheduler_pb2.ReportFailureResponse:
        remaining = self._scheduler.cool_downs.report(
            request.tenant or DEFAULT_TENANT, rank_from_proto(request.worker), request.cooldown_seconds
        )
        return scheduler_pb2.ReportFailureResponse(cooldown_remaining_seconds=remaining)

    async def ClearCooldowns(
        self, request: scheduler_pb2.ClearCooldownsRequest, context: Any
    ) -> scheduler_pb2.ClearCooldownsResponse:
        cleared = self._scheduler.cool_downs.clear(
            request.tenant or DEFAULT_TENANT, worker_id=request.worker_id, model=request.model
        )
        return scheduler_pb2.ClearCooldownsResponse(workers=map(rank_to_proto, cleared))

    async def GetBusyThresholds(
        self, request: types_pb2.GetBusyThresholdsRequest, context: Any
    ) -> types_pb2.GetBusyThresholdsResponse:
        if not request.model:
            raise InvalidArgument("must not be empty", field="model")
        tenant = request.tenant or DEFAULT_TENANT
        found = self._scheduler.thresholds.get(tenant, request.model)
        return types_pb2.GetBusyThresholdsResponse(thresholds=thresholds_to_proto(tenant, request.model, found))

    async def SetBusyThresholds(
        self, request: types_pb2.SetBusyThresholdsRequest, context: Any
    ) -> types_pb2.SetBusyThresholdsResponse:
        changes: dict[str, float | int | None] = dict.fromkeys(request.clear)
        for field, value in request.ListFields():
            if field.name.endswith("_threshold"):
                if field.name in changes:
                    raise InvalidArgument("is both set and cleared", field=field.name)
                changes[field.name] = value
        tenant = request.tenant or DEFAULT_TENANT
        changed = self._scheduler.thresholds.change(tenant, request.model, **changes)
        return types_pb2.SetBusyThresholdsResponse(thresholds=thresholds_to_proto(tenant, request.model, changed))

    async def ListBusyThresholds(
        self, request: types_pb2.ListBusyThresholdsRequest, context: Any
    ) -> types_pb2.ListBusyThresholdsResponse:
        tenant = request.tenant or DEFAULT_TENANT
        known = self._scheduler.workers.models(tenant)
        return types_pb2.ListBusyThresholdsResponse(
            thresholds=[
                thresholds_to_proto(tenant, model, thresholds)
                for model, thresholds in self._scheduler.thresholds.of_tenant(tenant, known).items()
            ]
        )

    async def GetStatus(
        self, request: types_pb2.GetStatusRequest, context: Any
    ) -> scheduler_pb2.SchedulerGetStatusResponse:
        tenant = tenant_to_show(request.tenant)
        settings, stats = self._scheduler.settings, self._scheduler.stats
        pools = [
            pool
            for pool in self._scheduler.workers
            if tenant in (ALL_TENANTS, pool.id.tenant) and request.model in ("", pool.id.model)
        ]
        if request.model and not pools:
            self._scheduler.workers.require_model(tenant, request.model)
        shows_callers = current_identity().role is AccessRole.ADMIN
        problem = self._replicas.problem if self._replicas is not None else ""
        return scheduler_pb2.SchedulerGetStatusResponse(
            service=service_info(
                self._started,
                draining=self._scheduler.draining,
                warnings=[*self._warnings(), *filter(None, [problem]), *self._scheduler.warnings()],
                nats=self._nats(),
            ),
            policy=settings.policy,
            overlap_score_weight=settings.overlap_score_weight,
            router_temperature=settings.router_temperature,
            pools=[
                scheduler_pb2.PoolLoad(
                    model=pool.id.model,
                    tenant=pool.id.tenant,
                    role=role_to_proto(pool.id.role),
                    worker_ranks=len(pool.order),
                    # Slots that are not in use carry no load.
                    active_requests=sum(pool.load.requests),
                    active_prefill_tokens=sum(pool.load.prefill_tokens),
                    active_decode_blocks=sum(pool.load.decode_blocks),
                    decisions=pool.decisions,
                    queued=self._scheduler.waiting.length(pool.id),
                    queue=queue_shares(self._scheduler, pool.id) if shows_callers else (),
                    prefill_token_seconds=None if pool.times.prefill.is_belief else pool.times.prefill.slope,
                )
                for pool in sorted(pools, key=lambda pool: pool.id)
            ],
            expired=dict(stats.ended),
            policies=self._scheduler.policies.names,
            policy_failures=policy_failures(self._scheduler),
        )


def _booked_by(operation: Operation) -> tuple[RequestKey, int] | None:
    """Return request and attempt that an operation books."""
    match operation:
        case Select(request=booked, books=True) | Reserve(reservation=booked):
            return booked.key, booked.attempt_id
    return None
