"""An attempt of a request: one worker that it runs on, the booking there, and the accounts of what happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from kvscout_common.errors import DeadlineExceeded, FailedPrecondition
from kvscout_common.http.dialect import Dialect, Usage
from kvscout_common.http.http import HttpAnswer, Sink, SinkGone, SinkStalled
from kvscout_common.worker import EngineKind, WorkerSpec
from kvscout_gateway.engines.answer import answer_read
from kvscout_gateway.engines.faults import reported
from kvscout_gateway.engines.observation import Observations, computes_a_block, predicted_cached_tokens
from kvscout_gateway.engines.vllm import pull_fields
from kvscout_gateway.values.cache_reports import HASH_BYTES, MAX_BLOCKS, Miss
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.request import NO_FIELDS, EngineAdapter, Request

if TYPE_CHECKING:
    from kvscout_gateway.engines.engine_call import EngineCall, Engines
    from kvscout_gateway.engines.health import Key, WorkerHealth
    from kvscout_gateway.ladder.ladders import Ladders, Placed
    from kvscout_gateway.request.metrics import GatewayMetrics
    from kvscout_gateway.request.recent import RecentRequests
    from kvscout_gateway.request.recording import Recording
    from kvscout_gateway.request.routing import RoutingFlow
    from kvscout_gateway.upstreams.interfaces import Scheduler

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Longest answer that is no stream of events."""


class Reply(Protocol):
    """The client's side of an exchange, as a front has it."""

    async def placed(self, decision: Decision) -> None:
        """Take the decision before the request is sent; again if it has to move."""

    async def begin(self, answer: HttpAnswer) -> Sink:
        """Take the head of an engine's answer; return the sink of its body.

        The engine may still fail before the first byte of it: then this is asked again for another engine's answer, or
        the exchange ends with an error.
        """


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """Collaborators of every attempt: one for a gateway."""

    routing: RoutingFlow
    scheduler: Scheduler
    engines: Engines
    adapters: Mapping[EngineKind, EngineAdapter]
    observations: Observations
    health: WorkerHealth
    metrics: GatewayMetrics
    recording: Recording
    recent: RecentRequests
    ladders: Ladders | None = None
    """None = it is switched off."""
    clock: Callable[[], float] = time.perf_counter

    def adapter_of(self, spec: WorkerSpec | None) -> EngineAdapter:
        """Return the adapter of a worker's engine; vLLM's for a worker that this gateway does not know yet."""
        return self.adapters.get(spec.engine if spec is not None else EngineKind.VLLM, self.adapters[EngineKind.VLLM])


class Attempt:
    """A request on one worker; its booking is freed when it is left."""

    def __init__(
        self,
        context: AttemptContext,
        request: Request,
        decision: Decision,
        *,
        started: float,
        on_output: Callable[[], None],
    ) -> None:
        """Renew the lease of the booking from now on.

        Args:
            context: Collaborators of every attempt.
            request: Request to the worker.
            decision: Worker and booking.
            started: Time of the client's request, on the context's clock.
            on_output: Called at the first output.
        """
        self._context = context
        self.request = request
        self.decision = decision
        self.adapter = context.adapter_of(decision.spec)
        """Of its engine."""
        self.key: Key = (request.tenant, decision.worker)
        self.seen = context.observations.of(*self.key)
        self._metrics = context.metrics.of(request.tenant, request.model)
        self._on_output = on_output
        self._started = started
        self.opened_at = context.clock()
        """When the decision was made, on the context's clock."""
        self.freed_at = 0.0
        """When it was left; 0 = not yet."""
        self._sent_at = 0.0
        self._placed: Placed | None = None
        self._prefill_seconds = 0.0
        """From being sent to the first token; 0 = unknown."""
        self._call: EngineCall | None = None
        self._answer: HttpAnswer | None = None
        """Answer of which not all has been read."""
        self._relayed: HttpAnswer | None = None
        self._freed = False
        self.has_output = False
        self.ttft_seconds = 0.0
        """From the client's request to the first output; 0 = there is none yet."""
        self.all_passed = False
        """The client has left with all of the answer."""
        self._generated = 0
        self.usage: Usage | None = None
        """Usage that its engine reported at the end of its answer."""
        if decision.booking is not None:
            context.scheduler.hold(decision.booking)
        context.health.sent(self.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    @property
    def passed(self) -> bool:
        """Tell whether the client has something of its answer: it cannot be had from elsewhere any more."""
        return self.has_output or (self._relayed is not None and self._relayed.report.passed > 0)

    @property
    def dialect(self) -> Dialect:
        """Return the dialect of its engine's answer."""
        return self.request.body.dialect(self.adapter)

    def sent(self) -> None:
        """Record that it goes to its engine."""
        self.seen.requests += 1
        self.seen.prompt_tokens += self.request.prompt.isl_tokens
        self._sent_at = self._context.clock()
        if self._context.ladders is not None and not self.request.remote_prefill:
            self._placed = self._context.ladders.placed(self.request, self.decision)
        self._context.routing.dispatched(self.decision)

    async def send(self, fields: Mapping[str, Any] = NO_FIELDS, *, whole_answer: bool | None = None) -> HttpAnswer:
        """Send it to its engine; return when an answer begins.

        Args:
            fields: What this attempt sets in the client's body; None = the body has no such field.
            whole_answer: The engine answers only when it has generated everything; None = as the request says.

        Raises:
            EngineFailed: None does.
            FailedPrecondition: The worker has no HTTP endpoint.
        """
        self._end_call()  # of another try with the same worker
        decision, body = self.decision, self.request.body
        if not decision.endpoint:
            raise FailedPrecondition(
                f"worker {decision.worker.worker_id!r} has no HTTP endpoint: Route places requests on it, "
                "Generate cannot run them"
            )
        if decision.spec is not None and decision.spec.engine in (EngineKind.VLLM, EngineKind.MOCK):
            fields = {**pull_fields(decision, self.request.request_id), **fields}
        written = await body.write(self.adapter, decision, self.request, fields)
        self.sent()
        self._call = self._context.engines.call(
            decision.endpoint,
            # What is computed elsewhere is waited for here, or computed here after all.
            uncached_tokens=self.request.prompt.isl_tokens if self.request.remote_prefill else decision.uncached_tokens,
            liveness=self.seen.liveness,
            whole_answer=body.whole_answer if whole_answer is None else whole_answer,
            clients_key=body.with_key,
        )
        self._answer = await self._call.send(written)
        return self._answer

    async def relay(self, answer: HttpAnswer, reply: Reply) -> None:
        """Move the answer to the client, to its end.

        Raises:
            EngineFailed: It has none.
            DeadlineExceeded: The client takes nothing.
            SinkGone: It is gone.
        """
        body = self.request.body
        if not body.whole_answer:
            assert self._call is not None
            await self._call.require_stream(answer)
        sink = await reply.begin(answer)
        if body.whole_answer:
            await self._pass_whole(answer, sink)
            return
        assert self._call is not None
        self._relayed = answer

        def begins() -> None:
            self.first_output()
            self.request.settle()

        try:
            await self._call.relay(
                answer,
                sink,
                body.form,
                self.dialect,
                max_tokens=body.max_tokens,
                on_first_output=begins,
            )
        except SinkStalled as error:
            seconds = self._context.engines.client_write_seconds
            raise DeadlineExceeded(f"the client has read nothing for {seconds:g} s", cause="gone") from error
        except (SinkGone, asyncio.CancelledError):
            # A client may leave when it has read that this was all, before the last byte of how that is framed.
            self.all_passed = answer.report.done
            if self.all_passed:
                self.ended(answer.report.usage)
            raise
        self._answer = None
        self.ended(answer.report.usage)

    async def read(self, answer: HttpAnswer) -> dict[str, Any]:
        """Read an answer that is no stream (`answer_read`).

        Raises:
            EngineFailed: It breaks off, is too long, or reports an error.
        """
        assert self._call is not None
        return await self._read_document(await self._call.read(answer, MAX_ANSWER_BYTES))

    def first_output(self, *, whole_answer: bool = False) -> None:
        """Record the first output. A second call does nothing.

        Args:
            whole_answer: All of it is here. When the prefill was over nobody knows; the Free that follows implies it.
        """
        if self.has_output:
            return
        self.has_output = True
        self._context.health.ran(self.key)
        self._on_output()
        self.ttft_seconds = self._context.clock() - self._started
        self._metrics.first_token(self.ttft_seconds)
        if self._sent_at and not whole_answer:
            self._prefill_seconds = self._context.clock() - self._sent_at
        self.seen.first_tokens += 1
        self.seen.ttft_seconds += self.ttft_seconds
        if not whole_answer and self.decision.booking is not None:
            self._context.scheduler.prefill_complete(self.decision.booking)

    def prefilled(self, usage: Usage | None) -> None:
        """End an attempt that only had to compute the prompt.

        Args:
            usage: Usage that the engine reports; None = nothing.
        """
        self._context.health.ran(self.key)
        self._on_output()
        self.ended(usage)
        self.free()

    def ended(self, usage: Usage | None) -> None:
        """Record the end of the engine's answer.

        Args:
            usage: What it says of the prompt; None = nothing.
        """
        self.usage = usage
        if self.request.remote_prefill:
            return  # what it says of the prompt is another worker's doing
        if usage is not None:
            self._check(usage)
            self._count(usage)
        cached = usage.cached_tokens if usage is not None else None
        if self._call is not None and usage is not None:
            self._call.span.record(prompt_tokens=usage.prompt_tokens)
            if cached is not None:
                self._call.span.record(cached_tokens=cached)
        isl_tokens = self.request.prompt.isl_tokens if usage is None else usage.prompt_tokens
        if computes_a_block(isl_tokens, cached or 0, self.decision.block_size):
            self.seen.eventful.append(self._sent_at)

    def generated(self, output_tokens: int) -> None:
        """Record the output's length as its engine reports it, whatever is known of its prompt; 0 = unknown."""
        self._generated = output_tokens

    def free(self) -> None:
        """Free the booking, and abort an answer that is not at its end. A second call does nothing."""
        if self._freed:
            return
        self._freed = True
        self.freed_at = self._context.clock()
        self._context.health.withdrawn(self.key)
        self._end_call()
        if self._relayed is not None:
            self._metrics.between_tokens(self._relayed.report)
        if self.decision.booking is not None:
            self._context.scheduler.free(self.decision.booking, self.output_tokens)

    @property
    def output_tokens(self) -> int:
        """Return tokens that were generated, as its engine says, else as they were counted; 0 = unknown."""
        counted = self._relayed.report.tokens if self._relayed is not None else 0
        return (self.usage.output_tokens if self.usage is not None else 0) or self._generated or counted

    def _end_call(self) -> None:
        if self._answer is not None:
            self._answer.abort()
            self._answer = None
        if self._call is not None:
            self._call.end()

    async def _pass_whole(self, answer: HttpAnswer, sink: Sink) -> None:
        assert self._call is not None
        body = await self._call.read(answer, MAX_ANSWER_BYTES)
        document = await self._read_document(body)
        self.first_output(whole_answer=True)
        await sink.write(body)
        self.ended(self.dialect.usage(document))

    async def _read_document(self, body: bytes) -> dict[str, Any]:
        document = await answer_read(body)
        error = document.get("error")
        if error:
            raise reported(error)
        return document

    def _count(self, usage: Usage) -> None:
        if self._placed is None or self._context.ladders is None:
            return
        prompt = self.request.prompt
        self._context.ladders.ended(
            self._placed,
            usage,
            self.decision.worker.worker_id,
            estimated=bool(prompt.partial or prompt.further_tokens),
            ttft_seconds=self._prefill_seconds,
        )
        self._placed = None

    def _check(self, usage: Usage) -> None:
        decision, request, isl_tokens = self.decision, self.request, usage.prompt_tokens
        prompt, observations = request.prompt, self._context.observations
        # Only what events confirm is checked: a prediction is allowed to fail. Nor is one of other tokens.
        known = not prompt.unknown and not prompt.further_tokens and prompt.isl_tokens == isl_tokens
        checked = decision.confirmed_blocks is not None and known
        observations.reported(
            *self.key,
            isl_tokens=isl_tokens,
            cached=usage.cached_tokens,
            predicted=predicted_cached_tokens(decision.confirmed_blocks or 0, isl_tokens, decision.block_size)
            if checked
            else None,
        )
        if known and decision.block_size and observations.reports(request.tenant, decision.worker.worker_id):
            usable = (isl_tokens - 1) // decision.block_size
            blocks = decision.overlap_blocks if decision.confirmed_blocks is None else decision.confirmed_blocks
            hashes = decision.block_hashes[: min(blocks, usable, MAX_BLOCKS) * HASH_BYTES]
            observations.caches.add(
                self.key,
                predicted=Miss(hashes, 0, *decision.pool),
                confirmed=decision.confirmed_blocks is not None,
                reported_blocks=(usage.cached_tokens or 0) // decision.block_size,
                sent_at=self._sent_at,
            )
