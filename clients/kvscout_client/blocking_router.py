"""The blocking forms of `Router` and `Booking`. Written by clients/generate_blocking.py: do not edit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, overload

from kvscout.v1 import events_pb2
from kvscout_client.blocking import BlockingBookingBase, BlockingRouterBase
from kvscout_client.booking import Booking
from kvscout_client.options import OutputOptions, RouterOverride, SamplingOptions, StopConditions
from kvscout_client.results import (
    ActiveRequest,
    BusyThresholds,
    FreeOutcome,
    GenerateChunk,
    RegisteredWorker,
    RouteDecision,
    RouterStatus,
    WorkerLoad,
    WorkerRecord,
)
from kvscout_client.router import UNCHANGED, Unchanged, WorkerId
from kvscout_client.tokens import Tokens
from kvscout_common.hashing import MmItem
from kvscout_common.worker import Role, WorkerSpec


class BlockingRouter(BlockingRouterBase):
    """`Router` for code without an event loop, and for any number of threads."""

    @overload
    def route(
        self,
        token_ids: Tokens = (),
        *,
        request_id: None = None,
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
        expected_output_tokens: int = 0,
        max_output_tokens: int = 0,
        output_class: str = "",
        estimate_prefill_complete: bool = False,
        explain: bool = False,
        lease_seconds: int = 0,
    ) -> RouteDecision: ...

    @overload
    def route(
        self,
        token_ids: Tokens = (),
        *,
        request_id: str,
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
        expected_output_tokens: int = 0,
        max_output_tokens: int = 0,
        output_class: str = "",
        estimate_prefill_complete: bool = False,
        explain: bool = False,
        lease_seconds: int = 0,
    ) -> BlockingBooking: ...

    def route(
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
        expected_output_tokens: int = 0,
        max_output_tokens: int = 0,
        output_class: str = "",
        estimate_prefill_complete: bool = False,
        explain: bool = False,
        lease_seconds: int = 0,
    ) -> RouteDecision | BlockingBooking:
        """See `Router.route`."""
        inner: Any = self._router
        answer: RouteDecision | Booking = self._answer(
            inner.route(
                token_ids,
                request_id=request_id,
                block_hashes=block_hashes,
                block_size=block_size,
                isl_tokens=isl_tokens,
                attempt_id=attempt_id,
                model=model,
                lora_name=lora_name,
                cache_salt=cache_salt,
                mm_items=mm_items,
                role=role,
                pinned_worker_id=pinned_worker_id,
                pinned_dp_rank=pinned_dp_rank,
                allowed_worker_ids=allowed_worker_ids,
                required_labels=required_labels,
                override=override,
                priority=priority,
                expected_output_tokens=expected_output_tokens,
                max_output_tokens=max_output_tokens,
                output_class=output_class,
                estimate_prefill_complete=estimate_prefill_complete,
                explain=explain,
                lease_seconds=lease_seconds,
            )
        )
        return BlockingBooking(self, answer) if isinstance(answer, Booking) else answer

    def generate(
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
        explain: bool = False,
        timeout_seconds: float | None = None,
        start_timeout_seconds: float | None = None,
    ) -> Iterator[GenerateChunk]:
        """See `Router.generate`."""
        return self._each(
            self._router.generate(
                token_ids,
                model=model,
                request_id=request_id,
                stop=stop,
                sampling=sampling,
                output=output,
                lora_name=lora_name,
                cache_salt=cache_salt,
                mm_items=mm_items,
                engine_fields=engine_fields,
                pinned_worker_id=pinned_worker_id,
                pinned_dp_rank=pinned_dp_rank,
                allowed_worker_ids=allowed_worker_ids,
                required_labels=required_labels,
                override=override,
                priority=priority,
                explain=explain,
                timeout_seconds=timeout_seconds,
                start_timeout_seconds=start_timeout_seconds,
            )
        )

    def mark_prefill_complete(
        self, request_id: str, *, model: str = "", attempt_id: int = 0, role: Role = Role.AGGREGATED
    ) -> bool:
        """See `Router.mark_prefill_complete`."""
        return self._answer(
            self._router.mark_prefill_complete(request_id, model=model, attempt_id=attempt_id, role=role)
        )

    def free(
        self,
        request_id: str,
        *,
        model: str = "",
        attempt_id: int = 0,
        role: Role = Role.AGGREGATED,
        output_tokens: int = 0,
    ) -> FreeOutcome:
        """See `Router.free`."""
        return self._answer(
            self._router.free(request_id, model=model, attempt_id=attempt_id, role=role, output_tokens=output_tokens)
        )

    def renew(
        self,
        request_ids: Iterable[str],
        *,
        model: str = "",
        attempt_id: int = 0,
        role: Role = Role.AGGREGATED,
        lease_seconds: int = 0,
    ) -> list[str]:
        """See `Router.renew`."""
        return self._answer(
            self._router.renew(request_ids, model=model, attempt_id=attempt_id, role=role, lease_seconds=lease_seconds)
        )

    def add_output(
        self, request_id: str, blocks: int, *, model: str = "", attempt_id: int = 0, role: Role = Role.AGGREGATED
    ) -> int:
        """See `Router.add_output`."""
        return self._answer(self._router.add_output(request_id, blocks, model=model, attempt_id=attempt_id, role=role))

    def active_requests(self, *, model: str = "", worker_id: WorkerId = "", limit: int = 1000) -> list[ActiveRequest]:
        """See `Router.active_requests`."""
        return self._answer(self._router.active_requests(model=model, worker_id=worker_id, limit=limit))

    def register_worker(self, spec: WorkerSpec, *, lease_seconds: int = 0) -> RegisteredWorker:
        """See `Router.register_worker`."""
        return self._answer(self._router.register_worker(spec, lease_seconds=lease_seconds))

    def update_worker(self, spec: WorkerSpec) -> WorkerSpec:
        """See `Router.update_worker`."""
        return self._answer(self._router.update_worker(spec))

    def remove_worker(self, worker_id: WorkerId) -> None:
        """See `Router.remove_worker`."""
        return self._answer(self._router.remove_worker(worker_id))

    def drain_worker(self, worker_id: WorkerId, *, undo: bool = False) -> int:
        """See `Router.drain_worker`."""
        return self._answer(self._router.drain_worker(worker_id, undo=undo))

    def keep_alive(self, worker_ids: Iterable[WorkerId]) -> tuple[str, ...]:
        """See `Router.keep_alive`."""
        return self._answer(self._router.keep_alive(worker_ids))

    def list_workers(self, *, model: str = "") -> list[WorkerRecord]:
        """See `Router.list_workers`."""
        return self._answer(self._router.list_workers(model=model))

    def potential_loads(
        self,
        token_ids: Tokens = (),
        *,
        model: str = "",
        role: Role = Role.AGGREGATED,
        lora_name: str = "",
        cache_salt: str = "",
    ) -> list[WorkerLoad]:
        """See `Router.potential_loads`."""
        return self._answer(
            self._router.potential_loads(token_ids, model=model, role=role, lora_name=lora_name, cache_salt=cache_salt)
        )

    def busy_thresholds(self, *, model: str = "") -> BusyThresholds:
        """See `Router.busy_thresholds`."""
        return self._answer(self._router.busy_thresholds(model=model))

    def list_busy_thresholds(self) -> list[BusyThresholds]:
        """See `Router.list_busy_thresholds`."""
        return self._answer(self._router.list_busy_thresholds())

    def set_busy_thresholds(
        self,
        *,
        model: str = "",
        active_decode_blocks_threshold: float | Unchanged | None = UNCHANGED,
        active_prefill_tokens_threshold: int | Unchanged | None = UNCHANGED,
    ) -> BusyThresholds:
        """See `Router.set_busy_thresholds`."""
        return self._answer(
            self._router.set_busy_thresholds(
                model=model,
                active_decode_blocks_threshold=active_decode_blocks_threshold,
                active_prefill_tokens_threshold=active_prefill_tokens_threshold,
            )
        )

    def dump(self, *, model: str = "") -> Iterator[events_pb2.KvEventBatch]:
        """See `Router.dump`."""
        return self._each(self._router.dump(model=model))

    def status(self, *, model: str = "") -> RouterStatus:
        """See `Router.status`."""
        return self._answer(self._router.status(model=model))


class BlockingBooking(BlockingBookingBase):
    """`Booking` for code without an event loop, and for any number of threads."""

    def prefill_complete(self) -> bool:
        """See `Booking.prefill_complete`."""
        return self._answer(self._booking.prefill_complete())

    def renew(self, lease_seconds: int = 0) -> bool:
        """See `Booking.renew`."""
        return self._answer(self._booking.renew(lease_seconds))

    def add_output(self, blocks: int) -> int:
        """See `Booking.add_output`."""
        return self._answer(self._booking.add_output(blocks))

    def free(self, output_tokens: int = 0) -> FreeOutcome:
        """See `Booking.free`."""
        return self._answer(self._booking.free(output_tokens))
