"""The Scheduler service: protobuf → one call of the core → protobuf."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any

import grpc

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common import tracing
from kvscout_common.errors import InvalidArgument, KvscoutError
from kvscout_common.hashing import native_available
from kvscout_common.identity import AccessRole, current_identity
from kvscout_common.pages import page_token, read_page_token
from kvscout_common.raw_messages import parse_message
from kvscout_common.registry import ALL_TENANTS, Registry
from kvscout_common.registry_tasks import Backends
from kvscout_common.request_names import reference_of
from kvscout_common.service_info import service_info
from kvscout_common.statuses import from_status
from kvscout_common.worker import DEFAULT_TENANT, Role
from kvscout_common.worker_proto import rank_from_proto, rank_to_proto, role_to_proto
from kvscout_common.worker_rpcs import WorkerRpcs
from kvscout_scheduler import native_load, translate
from kvscout_scheduler.booking import ListPlace
from kvscout_scheduler.decision import Decision
from kvscout_scheduler.engine_metrics import EngineMetrics
from kvscout_scheduler.lifecycle_rpc import LifecycleRpc
from kvscout_scheduler.packed_operations import columns_of, selection_of
from kvscout_scheduler.request import RequestKey, SelectionRequest
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.thresholds import BusyThresholds
from kvscout_scheduler.traces import tell
from kvscout_scheduler.watch_rpcs import WatchRpcs

if TYPE_CHECKING:
    from kvscout_scheduler.replicas import Replicas

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
DEFAULT_PAGE_SIZE = 1_000
MAX_PAGE_SIZE = 10_000

_STATUS = {code.value[0]: code for code in grpc.StatusCode}


# Lifecycle writes to its context itself, which grpc allows and its stubs do not know.
class SchedulerServicer(LifecycleRpc, WatchRpcs, WorkerRpcs, scheduler_pb2_grpc.SchedulerServicer):  # type: ignore[misc]
    """Translates; every decision is made in the core."""

    def __init__(
        self, scheduler: Scheduler, registry: Registry, backends: Backends, replicas: Replicas | None = None
    ) -> None:
        forwarding = replicas.forwarding if replicas is not None else None
        WorkerRpcs.__init__(self, registry, backends.registrar)
        WatchRpcs.__init__(self, scheduler)
        LifecycleRpc.__init__(self, scheduler, forwarding)
        self._replicas = replicas
        self._forwarding = forwarding
        self._scheduler = scheduler
        self._warnings = backends.warnings
        self._nats = backends.nats
        self._started = time.monotonic()
        self._lists = secrets.token_hex(4)
        """In page tokens: the places in them are on this process's clock."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds itself to a server, with raw bytes where messages are large or many."""
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, server)
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Lifecycle": grpc.stream_stream_rpc_method_handler(self.lifecycle_of_bytes),
            "SelectAndReserve": grpc.unary_unary_rpc_method_handler(self.select_and_reserve_of_bytes),
        }
        # A method that is registered again is taken from its last registration.
        server.add_registered_method_handlers(SERVICE, handlers)

    def active_requests(self, tenant: str, worker_id: str) -> int:
        """Requests active on a worker."""
        return self._scheduler.list_active_requests(tenant, worker_id=worker_id, limit=0)[1]

    async def Select(self, request: scheduler_pb2.SelectRequest, context: Any) -> scheduler_pb2.SelectResponse:
        wanted = translate.selection_from_proto(request)
        decision = self._scheduler.select(wanted)
        tell(tracing.current(), wanted, decision)
        return translate.decision_to_proto(decision)

    async def SelectAndReserve(
        self, request: scheduler_pb2.SelectRequest, context: Any
    ) -> scheduler_pb2.SelectResponse:
        wanted = translate.selection_from_proto(request)
        decision = await self._reserved(wanted, request.lease_seconds)
        self._undo_if_undelivered(context, wanted.key, wanted.attempt_id)
        return translate.decision_to_proto(decision)

    async def select_and_reserve_of_bytes(self, request: bytes, context: Any) -> bytes:
        """`SelectAndReserve` over serialised messages."""
        read = native_load.select_request(request) if native_available() else None
        if read is None:
            message = parse_message(scheduler_pb2.SelectRequest, request)
            return (await self.SelectAndReserve(message, context)).SerializeToString()
        wanted, lease_seconds = selection_of(read), read[9]
        current_identity().require_tenant(wanted.tenant)
        decision = await self._reserved(wanted, lease_seconds)
        self._undo_if_undelivered(context, wanted.key, wanted.attempt_id)
        return native_load.select_response(columns_of(decision))

    async def _reserved(self, wanted: SelectionRequest, lease_seconds: float) -> Decision:
        """The decision, once there is room; a caller that goes away meanwhile leaves nothing."""
        decided: asyncio.Future[Decision | KvscoutError] = asyncio.get_running_loop().create_future()
        answer = decided.set_result
        self._scheduler.reserve_or_wait(wanted, answer, lease_seconds=lease_seconds)
        try:
            outcome = decided.result() if decided.done() else await asyncio.shield(decided)
        except asyncio.CancelledError:
            if decided.done():
                self._scheduler.undelivered(wanted.key, wanted.attempt_id)
            self._scheduler.abandon(wanted.key, wanted.attempt_id, answer)
            raise
        tell(tracing.current(), wanted, outcome)
        if isinstance(outcome, KvscoutError):
            raise outcome
        return outcome

    async def Reserve(self, request: scheduler_pb2.ReserveRequest, context: Any) -> scheduler_pb2.ReserveResponse:
        wanted = translate.reserve_from_proto(request)
        uncached = self._scheduler.reserve(wanted, lease_seconds=request.lease_seconds)
        self._undo_if_undelivered(context, wanted.key, wanted.attempt_id)
        return scheduler_pb2.ReserveResponse(uncached_tokens=uncached)

    def _undo_if_undelivered(self, context: Any, key: RequestKey, attempt_id: int) -> None:
        """Takes a booking back if its call ends (deadline, caller gone) before the answer is out."""

        def done(ended: Any) -> None:
            # grpc says `cancelled` only of what the server itself cancelled; `done` is that a status was sent.
            if not ended.done():
                self._scheduler.undelivered(key, attempt_id)

        context.add_done_callback(done)

    async def MarkPrefillComplete(
        self, request: scheduler_pb2.MarkPrefillCompleteRequest, context: Any
    ) -> scheduler_pb2.MarkPrefillCompleteResponse:
        result = await self._from_owner(prefill_complete=reference_of(request))
        if result is not None:
            return result.prefill_complete
        changed = self._scheduler.mark_prefill_complete(translate.key_from_proto(request), request.attempt_id)
        return scheduler_pb2.MarkPrefillCompleteResponse(changed=changed)

    async def AddOutput(self, request: scheduler_pb2.AddOutputRequest, context: Any) -> scheduler_pb2.AddOutputResponse:
        result = await self._from_owner(add_output=request)
        if result is not None:
            return result.add_output
        key = translate.key_from_proto(request)
        output = self._scheduler.add_output(key, request.blocks, request.attempt_id)
        return scheduler_pb2.AddOutputResponse(output_blocks=output)

    async def Free(self, request: scheduler_pb2.FreeRequest, context: Any) -> scheduler_pb2.FreeResponse:
        result = await self._from_owner(free=reference_of(request))
        if result is not None:
            return result.free
        return translate.outcome_to_proto(self._scheduler.free(translate.key_from_proto(request), request.attempt_id))

    async def Renew(self, request: scheduler_pb2.RenewRequest, context: Any) -> scheduler_pb2.RenewResponse:
        result = await self._from_owner(renew=request)
        if result is not None:
            return result.renew
        return translate.renew(self._scheduler, request)

    def _replica_warnings(self) -> list[str]:
        return self._replicas.link.warnings() if self._replicas is not None else []

    async def _from_owner(self, **operation: Any) -> scheduler_pb2.LifecycleResult | None:
        """The result of an operation on a request of another replica; None = it is not, carry it out here.

        Raises:
            KvscoutError: What came of it.
        """
        asked = scheduler_pb2.LifecycleOperation(**operation)
        if self._forwarding is None or not self._forwarding.concerns(asked, DEFAULT_TENANT):
            return None
        result = await self._forwarding.carry_out(asked, DEFAULT_TENANT)
        if result.code:
            soon = result.retry_after_seconds if result.HasField("retry_after_seconds") else None
            raise from_status(_STATUS[result.code], result.message, retry_after_seconds=soon)
        return result

    async def GetReplicas(
        self, request: scheduler_pb2.GetReplicasRequest, context: Any
    ) -> scheduler_pb2.GetReplicasResponse:
        if self._replicas is None:
            return scheduler_pb2.GetReplicasResponse(problem="replicas are off (--router-replica-sync)")
        return self._replicas.to_proto()

    async def GetPotentialLoads(
        self, request: scheduler_pb2.SchedulerGetPotentialLoadsRequest, context: Any
    ) -> scheduler_pb2.GetPotentialLoadsResponse:
        loads = self._scheduler.potential_loads(
            translate.pool_from_request(request),
            isl_tokens=request.isl_tokens,
            prompt=translate.prompt_from_proto(request),
            other_prompts=translate.other_prompts_from_proto(request),
        )
        return scheduler_pb2.GetPotentialLoadsResponse(loads=map(translate.load_to_proto, loads))

    async def ListActiveRequests(
        self, request: scheduler_pb2.ListActiveRequestsRequest, context: Any
    ) -> scheduler_pb2.ListActiveRequestsResponse:
        tenant = request.tenant or DEFAULT_TENANT
        listed, total, following = self._scheduler.list_active_requests(
            tenant,
            model=request.model,
            worker_id=request.worker_id,
            limit=min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE),
            after=self._place(request.page_token, tenant),
        )
        # Who knows an owner's id can be taken for it.
        shows_owner = current_identity().role is AccessRole.ADMIN
        return scheduler_pb2.ListActiveRequestsResponse(
            requests=[translate.active_to_proto(each, shows_owner=shows_owner) for each in listed],
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
            raise InvalidArgument("is of another scheduler: list from the beginning", field="page_token")
        return ListPlace(bool(queued), since, RequestKey(tenant, model, Role(role), request_id))

    async def ReportWorkerMetrics(
        self, request: scheduler_pb2.ReportWorkerMetricsRequest, context: Any
    ) -> scheduler_pb2.ReportWorkerMetricsResponse:
        self._scheduler.report_metrics(
            request.tenant or DEFAULT_TENANT,
            rank_from_proto(request.worker),
            EngineMetrics(
                kv_cache_usage=request.kv_cache_usage if request.HasField("kv_cache_usage") else None,
                running_requests=request.running_requests if request.HasField("running_requests") else None,
                waiting_requests=request.waiting_requests if request.HasField("waiting_requests") else None,
            ),
        )
        return scheduler_pb2.ReportWorkerMetricsResponse()

    async def ReportFailure(
        self, request: scheduler_pb2.ReportFailureRequest, context: Any
    ) -> scheduler_pb2.ReportFailureResponse:
        remaining = self._scheduler.report_failure(
            request.tenant or DEFAULT_TENANT, rank_from_proto(request.worker), request.cooldown_seconds
        )
        return scheduler_pb2.ReportFailureResponse(cooldown_remaining_seconds=remaining)

    async def ClearCooldowns(
        self, request: scheduler_pb2.ClearCooldownsRequest, context: Any
    ) -> scheduler_pb2.ClearCooldownsResponse:
        cleared = self._scheduler.clear_cool_downs(
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
        return types_pb2.GetBusyThresholdsResponse(thresholds=_thresholds(tenant, request.model, found))

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
        return types_pb2.SetBusyThresholdsResponse(thresholds=_thresholds(tenant, request.model, changed))

    async def ListBusyThresholds(
        self, request: types_pb2.ListBusyThresholdsRequest, context: Any
    ) -> types_pb2.ListBusyThresholdsResponse:
        tenant = request.tenant or DEFAULT_TENANT
        return types_pb2.ListBusyThresholdsResponse(
            thresholds=[
                _thresholds(tenant, model, thresholds)
                for model, thresholds in self._scheduler.busy_thresholds(tenant).items()
            ]
        )

    async def GetStatus(
        self, request: types_pb2.GetStatusRequest, context: Any
    ) -> scheduler_pb2.SchedulerGetStatusResponse:
        tenant = request.tenant or DEFAULT_TENANT
        if tenant == ALL_TENANTS:
            tenant = current_identity().tenant
        settings, stats = self._scheduler.settings, self._scheduler.stats
        pools = [
            pool
            for pool in self._scheduler.workers
            if tenant in (ALL_TENANTS, pool.id.tenant) and request.model in ("", pool.id.model)
        ]
        if request.model and not pools:
            self._scheduler.workers.require_model(tenant, request.model)
        return scheduler_pb2.SchedulerGetStatusResponse(
            service=service_info(
                self._started,
                draining=self._scheduler.draining,
                warnings=[*self._warnings(), *self._replica_warnings(), *self._scheduler.warnings()],
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
                )
                for pool in sorted(pools, key=lambda pool: pool.id)
            ],
            expired=dict(stats.ended),
            policies=self._scheduler.policies.names,
        )


def _thresholds(tenant: str, model: str, thresholds: BusyThresholds) -> types_pb2.BusyThresholds:
    return types_pb2.BusyThresholds(
        model=model,
        tenant=tenant,
        active_decode_blocks_threshold=thresholds.active_decode_blocks_threshold,
        active_prefill_tokens_threshold=thresholds.active_prefill_tokens_threshold,
    )
