"""The asynchronous client of a gateway."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from enum import Enum
from types import TracebackType
from typing import Any, Final, TypeVar, Unpack, overload

from kvscout.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc, scheduler_pb2, types_pb2, workers_pb2
from kvscout_client import decode, encode
from kvscout_client.booking import Booking
from kvscout_client.calls import RETRIES, Calls, started_within
from kvscout_client.options import (
    OutputOptions,
    RouteOptions,
    RouterOverride,
    SamplingOptions,
    StopConditions,
    WorkerId,
)
from kvscout_client.results import (
    ActiveRequest,
    BusyThresholds,
    Failure,
    FaultOwner,
    FreeOutcome,
    GenerateChunk,
    RegisteredWorker,
    RouteDecision,
    RouterStatus,
    WorkerLoad,
    WorkerRecord,
)
from kvscout_client.tokens import Tokens
from kvscout_common.enum_words import value_of
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import MmItem
from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity
from kvscout_common.registry.worker_proto import role_to_proto, spec_from_proto, spec_to_proto
from kvscout_common.rpc.channel import open_channel
from kvscout_common.worker import DEFAULT_TENANT, Role, WorkerSpec

M = TypeVar("M")

PAGE_SIZE = 1_000
"""Entries of a page of a list: an answer stays far below what a message may have."""


class Unchanged(Enum):
    """The type of `UNCHANGED`."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED
"""A threshold that `set_busy_thresholds` leaves as it is."""


class Router:
    """A gateway's rpcs with Python types; one connection, safe for any number of concurrent calls of one event loop.

    Every method raises the exceptions of `kvscout_common.errors` that the gateway answers, `Unavailable` when it cannot
    be reached and `DeadlineExceeded` after `timeout_seconds`.
    """

    def __init__(
        self,
        address: str = "localhost:7050",
        *,
        model: str = "",
        tenant: str = DEFAULT_TENANT,
        security: ClientSecurity = PLAINTEXT,
        timeout_seconds: float | None = 30.0,
        retries: int = RETRIES,
    ) -> None:
        """Connect lazily; nothing is sent before the first call.

        Args:
            address: host:port of the gateway.
            model: Used by calls that name none.
            tenant: Named in every request.
            security: TLS files and bearer token.
            timeout_seconds: Deadline of every unary call, all its tries together; None = none. Streams have their own.
            retries: Further tries of a call that got no answer, if making it twice is the same as making it once.
        """
        self._channel = open_channel(address, security)
        self._stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(self._channel)
        self._model = model
        self._tenant = tenant
        self._calls = Calls(address, security, timeout_seconds=timeout_seconds, retries=retries)

    async def __aenter__(self) -> Router:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        await self._channel.close()

    # Requests

    @overload
    async def route(
        self, token_ids: Tokens = (), *, request_id: None = None, **options: Unpack[RouteOptions]
    ) -> RouteDecision: ...

    @overload
    async def route(self, token_ids: Tokens = (), *, request_id: str, **options: Unpack[RouteOptions]) -> Booking: ...

    async def route(
        self,
        token_ids: Tokens = (),
        *,
        request_id: str | None = None,
        block_hashes: Iterable[int] = (),
        block_size: int | None = None,
        isl_tokens: int = 0,
        attempt_id: int = 0,
        model: str = "",
        lora_name: str = "",
        cache_salt: str = "",
        mm_items: Iterable[MmItem] = (),
        role: Role = Role.AGGREGATED,
        pinned_worker_id: WorkerId = "",
        pinned_dp_rank: int | None = None,
        allowed_worker_ids: Iterable[WorkerId] = (),
        required_labels: Mapping[str, str] | None = None,
        override: RouterOverride | None = None,
        priority: int = 0,
        fairness_id: str = "",
        objective: str = "",
        expected_output_tokens: int = 0,
        max_output_tokens: int = 0,
        output_class: str = "",
        estimate_prefill_complete: bool = False,
        session: str = "",
        explain: bool = False,
        lease_seconds: int = 0,
    ) -> RouteDecision | Booking:
        """Choose the worker of a prompt and, with a request id, book it there.

        Args:
            token_ids: The prompt; or its block_hashes.
            block_hashes: Local hashes of its complete blocks (docs/hashing.md), for prompts that are hashed already.
            block_size: Tokens a block of block_hashes; required with them.
            isl_tokens: Its length with block_hashes; 0 = that of the blocks.
            request_id: Set = book; the caller then owes `prefill_complete` and `free`, the latter best through
                `async with`. None = query only, nothing changes.
            attempt_id: Number of the attempt of one request.
            model: Model or adapter; "" = the router's.
            lora_name: Adapter; "" = base model.
            cache_salt: Separates the prompt's cache blocks from others'.
            mm_items: Multimodal items of the prompt, by which its blocks differ from others with the same tokens.
            role: Role of the worker wanted.
            pinned_worker_id: The worker that must be chosen; "" = free choice.
            pinned_dp_rank: The rank of it that must be chosen.
            allowed_worker_ids: Only these may be chosen; empty = all.
            required_labels: Labels the worker must have.
            override: Changes of the scheduler's settings for this request.
            priority: In the queue, higher first.
            fairness_id: Requests of one id share what the caller has of the queue.
            objective: Name of an objective of the gateway: a priority and targets.
            expected_output_tokens: 0 = unknown; schedulers learn it, best by output_class.
            max_output_tokens: At which the output ends (`max_tokens`); 0 = no such bound is known.
            output_class: Requests of one class are expected to have outputs of similar lengths; at most 64 characters.
            estimate_prefill_complete: `prefill_complete` will not be called, since the engine answers as a whole.
            session: Name of the conversation; "" = it is found by the prompt.
            explain: Explain the decision.
            lease_seconds: Until the booking ends unless renewed; 0 = 300.

        Raises:
            InvalidArgument, NotFound, FailedPrecondition, ResourceExhausted, Unavailable, AlreadyExists: As
                documented at the rpc.
        """
        if request_id is not None and not request_id:
            raise InvalidArgument("must not be empty; None = query only", field="request_id")
        request = encode.filled(
            gateway_pb2.RouteRequest(
                model=model or self._model,
                tenant=self._tenant,
                block_hashes=encode.hashes(block_hashes),
                block_size=block_size,
                isl_tokens=isl_tokens,
                request_id=request_id or "",
                attempt_id=attempt_id,
                lora_name=lora_name,
                cache_salt=cache_salt,
                mm_items=encode.mm_items(mm_items),
                role=role_to_proto(role),
                allowed_worker_ids=map(str, allowed_worker_ids),
                pinned_worker_id=str(pinned_worker_id),
                pinned_dp_rank=pinned_dp_rank,
                required_labels=required_labels or {},
                router_config_override=override.to_proto() if override else None,
                priority=priority,
                fairness_id=fairness_id,
                objective=objective,
                expected_output_tokens=expected_output_tokens,
                max_output_tokens=max_output_tokens,
                output_class=output_class,
                estimate_prefill_complete=estimate_prefill_complete,
                session=session,
                explain=explain,
                lease_seconds=lease_seconds,
            ),
            token_ids,
        )
        answer = await self._calls.unary(self._stub.Route, request, repeatable=True)
        decision = decode.decision(answer, requested=request_id is not None)
        if request_id is None:
            return decision
        return Booking(self, decision, request_id=request_id, model=request.model, attempt_id=attempt_id, role=role)

    async def generate(
        self,
        token_ids: Tokens,
        *,
        model: str = "",
        request_id: str = "",
        stop: StopConditions | None = None,
        sampling: SamplingOptions | None = None,
        output: OutputOptions | None = None,
        lora_name: str = "",
        cache_salt: str = "",
        mm_items: Iterable[MmItem] = (),
        engine_fields: Mapping[str, Any] | None = None,
        pinned_worker_id: WorkerId = "",
        pinned_dp_rank: int | None = None,
        allowed_worker_ids: Iterable[WorkerId] = (),
        required_labels: Mapping[str, str] | None = None,
        override: RouterOverride | None = None,
        priority: int = 0,
        fairness_id: str = "",
        objective: str = "",
        session: str = "",
        explain: bool = False,
        timeout_seconds: float | None = None,
        start_timeout_seconds: float | None = None,
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Run a prompt on the best worker and stream its output. Closing it early (`aclosing`) cancels the request.

        Args:
            token_ids: The prompt.
            model: Model or adapter; "" = the router's.
            request_id: "" = the gateway makes one.
            stop: Conditions that end it.
            sampling: Settings of the sampler.
            output: Contents of the output.
            engine_fields: Further fields of the engine's own request, passed on as JSON, such as the content of
                `mm_items`, which need it. Those that the gateway sets are refused.
            lora_name, cache_salt, mm_items, pinned_worker_id, pinned_dp_rank, allowed_worker_ids, required_labels,
                override, priority, fairness_id, objective, session, explain: As for `route`.
            timeout_seconds: Deadline of the whole request; None = none.
            start_timeout_seconds: Longest wait for its first token; None = no limit.

        Yields:
            Chunks of output, in order: the first names the worker, the last carries the usage.

        Raises:
            InternalError: The engine failed after its first token.
            others: As `route`.
        """
        request = encode.filled(
            gateway_pb2.GenerateRequest(
                model=model or self._model,
                tenant=self._tenant,
                request_id=request_id,
                stop_conditions=stop.to_proto() if stop else None,
                sampling_options=sampling.to_proto() if sampling else None,
                output_options=output.to_proto() if output else None,
                lora_name=lora_name,
                cache_salt=cache_salt,
                mm_items=encode.mm_items(mm_items),
                engine_fields=encode.engine_json(engine_fields) if engine_fields else "",
                pinned_worker_id=str(pinned_worker_id),
                pinned_dp_rank=pinned_dp_rank,
                allowed_worker_ids=map(str, allowed_worker_ids),
                required_labels=required_labels or {},
                router_config_override=override.to_proto() if override else None,
                priority=priority,
                fairness_id=fairness_id,
                objective=objective,
                session=session,
                explain=explain,
            ),
            token_ids,
        )
        # Closed here and now when the caller stops early: the engine works until the call is cancelled.
        async with aclosing(self._calls.stream(self._stub.Generate, request, timeout=timeout_seconds)) as messages:
            async for message in started_within(start_timeout_seconds, messages):
                yield decode.chunk(message)

    async def mark_prefill_complete(
        self, request_id: str, *, model: str = "", attempt_id: int = 0, role: Role = Role.AGGREGATED
    ) -> bool:
        """Report the first token of a booked request, named as it was booked.

        Returns:
            False if it was reported before.

        Raises:
            NotFound: Unknown request.
        """
        request = self._booked(scheduler_pb2.MarkPrefillCompleteRequest, request_id, model, attempt_id, role)
        answer = await self._calls.unary(self._stub.MarkPrefillComplete, request, repeatable=True)
        return answer.changed

    async def free(
        self,
        request_id: str,
        *,
        model: str = "",
        attempt_id: int = 0,
        role: Role = Role.AGGREGATED,
        output_tokens: int = 0,
    ) -> FreeOutcome:
        """End a booked request, named as it was booked; one that is unknown or freed is no error.

        Args:
            request_id: The request.
            model: "" = that of the router.
            attempt_id: As it was booked.
            role: As it was booked.
            output_tokens: That it generated, for policies that learn how fast workers are; 0 = unknown.
        """
        request = self._booked(scheduler_pb2.FreeRequest, request_id, model, attempt_id, role)
        request.output_tokens = output_tokens
        return decode.free_outcome(await self._calls.unary(self._stub.Free, request, repeatable=True))

    async def renew(
        self,
        request_ids: Iterable[str],
        *,
        model: str = "",
        attempt_id: int = 0,
        role: Role = Role.AGGREGATED,
        lease_seconds: int = 0,
    ) -> list[str]:
        """Renew the leases of booked requests.

        Args:
            request_ids: At least one.
            model: Theirs; "" = the router's.
            attempt_id: Theirs.
            role: That of the worker that they were booked for.
            lease_seconds: From now; 0 = 300.

        Returns:
            Requests that are no longer booked.
        """
        names = list(request_ids)
        request = scheduler_pb2.RenewRequest(
            tenant=self._tenant,
            requests=[
                scheduler_pb2.RequestRef(
                    model=model or self._model, role=role_to_proto(role), request_id=name, attempt_id=attempt_id
                )
                for name in names
            ],
            lease_seconds=lease_seconds,
        )
        answer = await self._calls.unary(self._stub.Renew, request, repeatable=True)
        return [names[index] for index in answer.unknown]

    async def add_output(
        self, request_id: str, blocks: int, *, model: str = "", attempt_id: int = 0, role: Role = Role.AGGREGATED
    ) -> int:
        """Add generated blocks to the load of a booked request.

        Returns:
            Its output blocks in all.

        Raises:
            NotFound: Unknown request.
            FailedPrecondition: The scheduler does not track output.
        """
        request = self._booked(scheduler_pb2.AddOutputRequest, request_id, model, attempt_id, role)
        request.blocks = blocks
        answer = await self._calls.unary(self._stub.AddOutput, request)
        return answer.output_blocks

    def _booked(self, kind: Callable[..., M], request_id: str, model: str, attempt_id: int, role: Role) -> M:
        """Make a message that names a booked request."""
        return kind(
            model=model or self._model,
            tenant=self._tenant,
            role=role_to_proto(role),
            request_id=request_id,
            attempt_id=attempt_id,
        )

    async def active_requests(
        self, *, model: str = "", worker_id: WorkerId = "", limit: int = 1_000
    ) -> list[ActiveRequest]:
        """Return the requests that are booked now, by any client.

        Args:
            model: Only of this one; "" = of all.
            worker_id: Only on this one; "" = on all.
            limit: Largest number; the oldest are returned.
        """
        request = scheduler_pb2.ListActiveRequestsRequest(tenant=self._tenant, model=model, worker_id=str(worker_id))
        found: list[ActiveRequest] = []
        while len(found) < limit:
            request.page_size = min(limit - len(found), PAGE_SIZE)
            answer = await self._calls.unary(self._stub.ListActiveRequests, request, repeatable=True)
            found += [decode.active_request(one) for one in answer.requests]
            request.page_token = answer.next_page_token
            if not request.page_token:
                break
        return found

    async def failures(
        self,
        *,
        model: str = "",
        worker_id: WorkerId = "",
        cause: str = "",
        owner: FaultOwner | None = None,
        answered: bool = False,
        after: int = 0,
        limit: int = 1_000,
    ) -> list[Failure]:
        """Return the last requests that failed, the newest first, as the gateway remembers them.

        Args:
            model: Only of this one; "" = of all.
            worker_id: Only what was sent to this one; "" = all.
            cause: Only of this cause; "" = of all.
            owner: Only of this owner; None = of all.
            answered: Also requests that were answered, but not as they should have been.
            after: Only failures of a higher number; 0 = all.
            limit: Largest number.
        """
        request = gateway_pb2.ListFailuresRequest(
            tenant=self._tenant,
            model=model,
            worker_id=str(worker_id),
            cause=cause,
            owner=value_of(gateway_pb2.FaultOwner, owner or ""),
            answered=answered,
            after_number=after,
        )
        found: list[Failure] = []
        while len(found) < limit:
            request.page_size = min(limit - len(found), PAGE_SIZE)
            answer = await self._calls.unary(self._stub.ListFailures, request, repeatable=True)
            found += [decode.failure(one) for one in answer.failures]
            request.page_token = answer.next_page_token
            if not request.page_token:
                break
        return found

    async def ladders(self, *, model: str = "", window_seconds: int = 0) -> gateway_pb2.GetLadderResponse:
        """Return why the hit rate is what it is, by model and session class (docs/why.md).

        Args:
            model: Only of this one; "" = of all.
            window_seconds: Requests of the last so many seconds; 0 = 300.
        """
        request = gateway_pb2.GetLadderRequest(tenant=self._tenant, model=model, window_seconds=window_seconds)
        return await self._calls.unary(self._stub.GetLadder, request, repeatable=True)

    # Workers

    async def register_worker(self, spec: WorkerSpec, *, lease_seconds: int = 0) -> RegisteredWorker:
        """Register a worker, or replace its registration, everywhere.

        Args:
            spec: The worker.
            lease_seconds: Time without `keep_alive` after which the registration ends; 0 = it stays.
        """
        request = workers_pb2.RegisterWorkerRequest(
            tenant=spec.tenant, worker=spec_to_proto(spec), lease_seconds=lease_seconds
        )
        answer = await self._calls.unary(self._stub.RegisterWorker, request, repeatable=True)
        return RegisteredWorker(spec_from_proto(answer.worker), answer.created)

    async def update_worker(self, spec: WorkerSpec) -> WorkerSpec:
        """Replace the registration of a worker that must exist; its lease goes on.

        Returns:
            The registration as stored, defaults filled in.

        Raises:
            NotFound: Unknown worker.
        """
        request = workers_pb2.UpdateWorkerRequest(tenant=spec.tenant, worker=spec_to_proto(spec))
        answer = await self._calls.unary(self._stub.UpdateWorker, request, repeatable=True)
        return spec_from_proto(answer.worker)

    async def remove_worker(self, worker_id: WorkerId) -> None:
        """Remove a worker with its blocks and bookings.

        Raises:
            NotFound: Unknown worker.
            FailedPrecondition: It comes from a file, which is where to remove it.
        """
        request = workers_pb2.RemoveWorkerRequest(tenant=self._tenant, worker_id=str(worker_id))
        await self._calls.unary(self._stub.RemoveWorker, request)

    async def drain_worker(self, worker_id: WorkerId, *, undo: bool = False) -> int:
        """Stop new requests for a worker, or admit them again.

        Returns:
            Requests still active on it.

        Raises:
            NotFound: Unknown worker.
        """
        request = workers_pb2.DrainWorkerRequest(tenant=self._tenant, worker_id=str(worker_id), undo=undo)
        answer = await self._calls.unary(self._stub.DrainWorker, request, repeatable=True)
        return answer.active_requests

    async def keep_alive(self, worker_ids: Iterable[WorkerId]) -> tuple[str, ...]:
        """Renew the leases of workers.

        Returns:
            Workers that are not registered (any more) and must register again.
        """
        request = workers_pb2.KeepAliveRequest(tenant=self._tenant, worker_ids=map(str, worker_ids))
        answer = await self._calls.unary(self._stub.KeepAlive, request, repeatable=True)
        return tuple(answer.unknown_worker_ids)

    async def list_workers(self, *, model: str = "") -> list[WorkerRecord]:
        """Return the registered workers, ordered by id.

        Args:
            model: Only of this model; "" = all, the router's default model notwithstanding.
        """
        request = workers_pb2.ListWorkersRequest(tenant=self._tenant, model=model, page_size=PAGE_SIZE)
        found: list[WorkerRecord] = []
        while True:
            answer = await self._calls.unary(self._stub.ListWorkers, request, repeatable=True)
            found += [decode.worker_record(entry) for entry in answer.workers]
            request.page_token = answer.next_page_token
            if not request.page_token:
                return found

    # Load and state

    async def potential_loads(
        self,
        token_ids: Tokens = (),
        *,
        model: str = "",
        role: Role = Role.AGGREGATED,
        lora_name: str = "",
        cache_salt: str = "",
    ) -> list[WorkerLoad]:
        """Return the load of each worker rank, now and with a prompt added; no prompt = as it is."""
        request = encode.filled(
            gateway_pb2.GatewayGetPotentialLoadsRequest(
                model=model or self._model,
                tenant=self._tenant,
                role=role_to_proto(role),
                lora_name=lora_name,
                cache_salt=cache_salt,
            ),
            token_ids,
        )
        answer = await self._calls.unary(self._stub.GetPotentialLoads, request, repeatable=True)
        return [decode.load(entry) for entry in answer.loads]

    async def busy_thresholds(self, *, model: str = "") -> BusyThresholds:
        """Return a model's busy thresholds."""
        request = types_pb2.GetBusyThresholdsRequest(model=model or self._model, tenant=self._tenant)
        answer = await self._calls.unary(self._stub.GetBusyThresholds, request, repeatable=True)
        return decode.thresholds(answer.thresholds)

    async def list_busy_thresholds(self) -> list[BusyThresholds]:
        """Return the thresholds of every model that has any."""
        request = types_pb2.ListBusyThresholdsRequest(tenant=self._tenant)
        answer = await self._calls.unary(self._stub.ListBusyThresholds, request, repeatable=True)
        return [decode.thresholds(entry) for entry in answer.thresholds]

    async def set_busy_thresholds(
        self,
        *,
        model: str = "",
        active_decode_blocks_threshold: float | Unchanged | None = UNCHANGED,
        active_prefill_tokens_threshold: int | Unchanged | None = UNCHANGED,
    ) -> BusyThresholds:
        """Change a model's busy thresholds from the next selection on.

        Args:
            model: "" = the router's.
            active_decode_blocks_threshold: Fraction of total_kv_blocks, 0 < f ≤ 1; None turns it off.
            active_prefill_tokens_threshold: Tokens; None turns it off.

        Returns:
            The thresholds now in effect.
        """
        request = types_pb2.SetBusyThresholdsRequest(model=model or self._model, tenant=self._tenant)
        for name, value in (
            ("active_decode_blocks_threshold", active_decode_blocks_threshold),
            ("active_prefill_tokens_threshold", active_prefill_tokens_threshold),
        ):
            if value is None:
                request.clear.append(name)
            elif not isinstance(value, Unchanged):
                setattr(request, name, value)
        answer = await self._calls.unary(self._stub.SetBusyThresholds, request, repeatable=True)
        return decode.thresholds(answer.thresholds)

    async def dump(self, *, model: str = "") -> AsyncGenerator[events_pb2.KvEventBatch, None]:
        """Yield the state of the index as state chunks, worker rank by worker rank.

        Args:
            model: "" = every model of the tenant.

        Raises:
            NotFound: The model was never seen.
            Unavailable: No indexer answers.
        """
        request = gateway_pb2.DumpEventsRequest(tenant=self._tenant, model=model)
        async with aclosing(self._calls.stream(self._stub.DumpEvents, request)) as batches:
            async for batch in batches:
                yield batch

    async def record(
        self, key: bytes, *, model: str = "", tokens_per_hash: int = 0
    ) -> AsyncGenerator[gateway_pb2.RecordRequestsResponse, None]:
        """Yield the requests of the gateway as they end, without their content; for admins.

        Args:
            key: Sixteen secret bytes, by which hashes are keyed.
            model: "" = every model of the tenant.
            tokens_per_hash: Rounded down to whole blocks; 0 = 64.

        Raises:
            InvalidArgument: An argument is out of range.
            ResourceExhausted: Too many record already.
        """
        request = gateway_pb2.RecordRequestsRequest(
            tenant=self._tenant, model=model, key=key, tokens_per_hash=tokens_per_hash
        )
        async with aclosing(self._calls.stream(self._stub.RecordRequests, request)) as messages:
            async for message in messages:
                yield message

    async def status(self, *, model: str = "") -> RouterStatus:
        """Return the state of the gateway, its upstreams, and its observations of workers."""
        request = types_pb2.GetStatusRequest(tenant=self._tenant, model=model)
        return decode.status(await self._calls.unary(self._stub.GetStatus, request, repeatable=True))
