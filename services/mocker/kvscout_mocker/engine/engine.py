"""Continuous batching of one rank, one step at a time, pure: no clock, no socket, no task.

A step is `begin_step` (schedule: slots are allocated, blocks registered, events caused) and, after the time
the cost model asks for, `finish_step` (each request that is through its prompt gets one token). The order of
decisions is vLLM's scheduler's:

1. running requests first, oldest first, each up to what is left of the token budget; one that finds no free
   block preempts the youngest running request, which loses its blocks and later recomputes;
2. then, unless a request was preempted, waiting requests in order of arrival, each with the prefix it hits.
   One is admitted only if its *whole* sequence fits now, though only a chunk of it may run in this step.

With priorities (`by_priority`) a lower number goes first in the queue, and the highest one that runs is preempted, of
equals the youngest. Running requests are then scheduled in that order, where vLLM keeps the order of their admission.

Disaggregated serving: a request whose prompt another engine computed gets its blocks when it is scheduled, but they
hold nothing until `received` says so; meanwhile it is in no batch. One that computes for another engine keeps its
blocks when it is done, until `release`.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import NamedTuple

from kvscout_common.errors import InternalError, ResourceExhausted
from kvscout_mocker.config import EngineConfig
from kvscout_mocker.engine.block_manager import BlockManager
from kvscout_mocker.engine.request import Finish, Output, Request, RequestState
from kvscout_mocker.engine.waiting import WaitingQueue, place
from kvscout_mocker.events import Event


class Scheduled(NamedTuple):
    """A request's share of a step."""

    request: Request
    tokens: int


class Pull(NamedTuple):
    """Tokens that a request needs of another engine."""

    request: Request
    tokens: int
    """Tokens of its prompt that are not cached here."""


class Step(NamedTuple):
    """Requests of one step, and its duration."""

    scheduled: list[Scheduled]
    duration_seconds: float


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start, as vLLM's metrics count them."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    failed: int = 0
    received_tokens: int = 0
    """Prompt tokens computed by another engine."""
    expected_tokens: int = 0
    """Prompt tokens that another engine was to have computed."""
    failed_transfers: int = 0
    expired_transfers: int = 0
    aborted: int = 0


class Engine:
    """The scheduler of one rank over its block manager.

    Args:
        config: Sizes and costs.
        blocks: Its blocks; None = those of a model with full attention.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager | None = None) -> None:
        self.config = config
        self.blocks = blocks or BlockManager(config.num_gpu_blocks, config.block_size)
        self.counters = EngineCounters()
        self._waiting: WaitingQueue[Request] = WaitingQueue(by_priority=config.by_priority)
        self._running: list[Request] = []
        """The last one is preempted first."""
        self._arrivals = 0
        self._pulls: list[Pull] = []
        self.receiving: set[Request] = set()
        """Requests whose prompt is on its way from another engine."""
        self._held: set[Request] = set()

    @property
    def num_running(self) -> int:
        """Return requests in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Return requests that wait for a place in the batch or for another engine, preempted ones included."""
        return len(self._waiting) + len(self.receiving)

    def submit(self, request: Request) -> None:
        """Queue a request whose prompt and output fit `max_model_len`.

        Raises:
            ResourceExhausted: The waiting queue is full.
        """
        if len(self._waiting) >= self.config.max_waiting:
            raise ResourceExhausted(
                f"the waiting queue is full ({self.config.max_waiting} requests)", retry_after_seconds=1.0
            )
        self._arrivals += 1
        request.arrival = self._arrivals
        self._waiting.add(request)

    def abort(self, request: Request) -> None:
        """End a request and free its blocks, also in the middle of a step; no-op when it has finished.

        One that receives keeps them until that is over: they are being written.
        """
        if request.state is RequestState.FINISHED:
            return
        self.counters.aborted += 1
        if request.state is RequestState.RECEIVING:
            request.state = RequestState.FINISHED
            return
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._end(request)

    def take_pulls(self) -> list[Pull]:
        """Return the transfers wanted since the last call; each ends with `received` or `lost`."""
        pulls, self._pulls = self._pulls, []
        return pulls

    def received(self, pull: Pull) -> None:
        """Handle received tokens: the request decodes next, and recomputes its last prompt token for that."""
        request = pull.request
        self.counters.received_tokens += pull.tokens
        if self._arrived(request):
            request.computed_tokens = request.prompt_tokens - 1
            self.blocks.register(request.sequence, request.table, request.prompt_tokens)
            self._waiting.put_back(request)

    def lost(self, pull: Pull, *, recompute: bool) -> bool:
        """Return the tokens do not come.

        Args:
            pull: Which ones.
            recompute: The request computes its prompt itself; else it fails.

        Returns:
            Whether somebody waits for the request and it failed.
        """
        request = pull.request
        self.counters.failed_transfers += 1
        if not self._arrived(request):
            return False
        self.blocks.release(request.table)
        if recompute:
            self._waiting.put_back(request)
            return False
        self.counters.failed += 1
        request.state = RequestState.FINISHED
        return True

    def _arrived(self, request: Request) -> bool:
        self.receiving.discard(request)
        request.receives = False
        if request.state is RequestState.FINISHED:
            self.blocks.release(request.table)
            return False
        request.state = RequestState.WAITING
        return True

    def release(self, request: Request, *, expired: bool = False) -> None:
        """Free the blocks that a finished request held for another engine; no-op when they are free.

        Args:
            request: Which one.
            expired: Nobody came for them in time.
        """
        if request in self._held:
            self._held.remove(request)
            self.blocks.release(request.table)
            self.counters.expired_transfers += expired

    def reset_prefix_cache(self, *, announced: bool = True) -> bool:
        """Forget every cached block, with an event or without; refused (False) while requests hold blocks."""
        return self.blocks.reset(announced=announced)

    def take_events(self) -> list[Event]:
        """Return the KV events since the last call, in order."""
        return self.blocks.take_events()

    def begin_step(self) -> Step | None:
        """Schedule the next step; None when there is nothing to do."""
        scheduled: list[Scheduled] = []
        budget = self.config.max_num_batched_tokens
        self.blocks.begin_step()
        budget, preempted = self._schedule_running(scheduled, budget)
        if not preempted:
            self._schedule_waiting(scheduled, budget)
        if not scheduled:
            if self._waiting and not (self._running or self.receiving or self._held):
                raise InternalError("an idle engine cannot admit its first waiting request")
            return None
        return Step(scheduled, self._duration(scheduled))

    def finish_step(self, step: Step) -> list[Output]:
        """Account for a computed step and hand out the tokens it generated, in batch order."""
        outputs: list[Output] = []
        for request, tokens in step.scheduled:
            if request.state is not RequestState.RUNNING:  # aborted while the step ran
                continue
            request.computed_tokens += tokens
            if request.computed_tokens < len(request.sequence):
                continue
            if request.output_tokens == request.fails_after:
                self._running.remove(request)
                self.counters.failed += 1
                self._end(request)
                outputs.append(Output(request, None, Finish.ERROR))
                continue
            token = request.next_token(self.config.vocab_size)
            request.sequence.append(token)
            self.counters.generation_tokens += 1
            finish = request.finish if request.output_tokens >= request.max_tokens else None
            if finish is not None:
                self._running.remove(request)
                self.counters.finished += 1
                if request.holds:
                    request.state = RequestState.FINISHED
                    self._held.add(request)
                else:
                    self._end(request)
            outputs.append(Output(request, token, finish))
        return outputs

    def _schedule_running(self, scheduled: list[Scheduled], budget: int) -> tuple[int, bool]:
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            tokens = self._chunk(request, request.computed_tokens, budget)
            if not tokens:
                index += 1
                continue
            while not self._allocate(request, tokens):
                preempted = True
                if self._preempt_last() is request:
                    return budget, True
            scheduled.append(Scheduled(request, tokens))
            budget -= tokens
            index += 1
        return budget, preempted

    def _schedule_waiting(self, scheduled: list[Scheduled], budget: int) -> None:
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            request = self._waiting.first
            has_blocks = bool(request.table.block_ids)  # it received its prompt
            prefix = [] if has_blocks else self.blocks.cached_prefix(request.sequence)
            if not self.blocks.fits(request.table, len(request.sequence), prefix):
                return
            hit = len(prefix) * self.config.block_size
            tokens = 0
            if not request.receives:
                tokens = self._chunk(request, request.computed_tokens if has_blocks else hit, budget)
                if not tokens:
                    return
            self._waiting.take()
            if request.receives:
                self._begin_receiving(request, prefix, hit)
                continue
            if request.report_prefix:
                self.blocks.report_prefix(request.sequence, len(prefix))
            if not has_blocks:
                request.computed_tokens = hit
            self._allocate(request, tokens, prefix)
            self._admitted(request, hit)
            request.state = RequestState.RUNNING
            self._run(request)
            scheduled.append(Scheduled(request, tokens))
            budget -= tokens

    def _chunk(self, request: Request, start: int, budget: int) -> int:
        tokens = min(len(request.sequence) - start, budget)
        return self.blocks.chunk(request.sequence, request.table, request.prompt_tokens, start, tokens)

    def _run(self, request: Request) -> None:
        if self.config.by_priority:
            insort(self._running, request, key=place)
        else:
            self._running.append(request)

    def _begin_receiving(self, request: Request, prefix: list[int], hit: int) -> None:
        tokens = request.prompt_tokens - hit
        self.blocks.allocate(request.sequence, request.table, request.prompt_tokens, prefix, filled_tokens=hit)
        self.counters.expected_tokens += tokens
        self._admitted(request, hit)
        request.state = RequestState.RECEIVING
        self.receiving.add(request)
        self._pulls.append(Pull(request, tokens))

    def _admitted(self, request: Request, hit: int) -> None:
        if request.cached_tokens is None:
            request.cached_tokens = hit
            self.counters.prompt_tokens += request.prompt_tokens
            self.counters.prefix_query_tokens += request.prompt_tokens
            self.counters.prefix_hit_tokens += hit

    def _allocate(self, request: Request, tokens: int, prefix: list[int] | None = None) -> bool:
        return self.blocks.allocate(request.sequence, request.table, request.computed_tokens + tokens, prefix or ())

    def _preempt_last(self) -> Request:
        request = self._running.pop()
        self.blocks.release(request.table)
        request.computed_tokens = 0
        request.state = RequestState.WAITING
        self._waiting.put_back(request)
        self.counters.preemptions += 1
        return request

    def _end(self, request: Request) -> None:
        self.blocks.release(request.table)
        request.state = RequestState.FINISHED

    def _duration(self, scheduled: list[Scheduled]) -> float:
        prefill_tokens = decodes = context_tokens = 0
        for request, tokens in scheduled:
            if tokens == 1 and request.computed_tokens >= request.prompt_tokens - 1:
                decodes += 1
                if request.output_tokens:
                    context_tokens += request.computed_tokens + 1
            else:
                prefill_tokens += tokens
        return self.config.cost.step_seconds(prefill_tokens, decodes, context_tokens)
