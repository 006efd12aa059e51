"""Speed and work of the workers of a pool, learned from the course of their requests.

::

    first tokens ──▶ seconds of a prefill step, and a token of it     ──┐
    ends ──────────▶ seconds of a decode step, and a token of context ──┼──▶ TimeCostInputs, TimeRow ──▶ time_cost
    output tokens ─▶ lengths of outputs, by class                     ──┘

Learned is what happened, not what was said. What ran before it was booked here teaches nothing, nor does a failure,
which may be quick. Until anything is known, rates are what registrations say of them (`first_rates`), or engines of
themselves (`engine_rates`). No worker is faster than others until the pool's own rate has settled (`rates.FittedLine`).

A caller that wants an answer as a whole never receives its first token (`Reservation.estimates_prefill`): such a
prefill is over when it should be, or when that of one that came later to the same worker is. Where no first token is
reported, how long whole answers take says how fast prefill and decode are together.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Final, NamedTuple

from kvscout_common.worker import WorkerRank
from kvscout_scheduler.costs.targets import StepTimes
from kvscout_scheduler.costs.time_cost import STAGE_WEIGHTS, TimeCostInputs, TimeRow
from kvscout_scheduler.estimates.first_rates import UNKNOWN, Rates
from kvscout_scheduler.estimates.output_lengths import STAGES, OutputLengths, reaching
from kvscout_scheduler.estimates.popular_prefixes import PopularPrefixes
from kvscout_scheduler.estimates.rates import FittedLine, within
from kvscout_scheduler.estimates.sessions import Sessions
from kvscout_scheduler.estimates.worker_times import LEAST_PACE, MOST_PACE, STEP_TOKENS, ActiveTimes, WorkerTimes
from kvscout_scheduler.values.request import Prompt, SelectionRequest
from kvscout_scheduler.values.reservation import End, RequestKey, Reservation

BELIEVED_TOKENS: Final = 4_096.0
"""Tokens of a prompt for which the first estimate of prefill holds."""
BELIEVED_CONTEXT: Final = 50_000.0
"""Tokens in all contexts; where what is believed of decoding holds."""
LEAST_CONTEXT_SLOPE: Final = 0.02
"""Least growth of decode steps by contexts, in what it would be without a base: beside few contexts nearly all of a
step is reading weights."""
SAME_STEP: Final = 0.25
"""First tokens of a worker that are closer to each other than this share of an empty step came out of one."""
LEAST_LEFT: Final = 0.2
"""Share of a time that stays when what else went on meanwhile is taken from it."""
UNREPORTED: Final = 50
"""Whole answers without any reported first token after which they are learned from."""
IDLE: Final = TimeRow()
"""The first row, of all workers that nothing is known of."""


class RegisteredWorkers(NamedTuple):
    """The workers of a pool that are registered."""

    places: Sequence[WorkerRank]
    """The rank at each slot."""
    cache_tokens: Mapping[int, int]
    """Tokens that the cache of each registered one holds, by slot; 0 = unknown."""


class LearnedTimes:
    """Learned times of one pool; an `Observer` of every booking in it.

    Args:
        registered: Answers which workers there are.
        believed: Answers how fast they are, as far as their registrations say.
        sessions: Sessions of the requests; they observe each booking before this does.
        reuse_weight: See `SchedulerSettings.session_reuse_weight`.
    """

    def __init__(
        self,
        registered: Callable[[], RegisteredWorkers],
        believed: Callable[[], Rates],
        sessions: Sessions,
        *,
        reuse_weight: float = 0.0,
    ) -> None:
        self._registered = registered
        self._believed = believed
        self._sessions = sessions
        self._reuse_weight = reuse_weight
        self._reported = False
        """True: engines reported their speed."""
        self._arranged = False
        """False: the registered workers have changed since they were arranged."""
        self.prefill = FittedLine(UNKNOWN.step, UNKNOWN.prompt_token, BELIEVED_TOKENS)
        """Seconds of a prefill step by its prompt tokens, without what is decoded beside them."""
        self.decode = FittedLine(UNKNOWN.step, UNKNOWN.context_token, BELIEVED_CONTEXT, LEAST_CONTEXT_SLOPE)
        """Seconds of a decode step by the tokens in its contexts, without prompts that are computed meanwhile."""
        self.outputs = OutputLengths()
        self.prefixes = PopularPrefixes()
        self._workers: dict[WorkerRank, WorkerTimes] = {}
        self._turns: deque[WorkerRank] = deque()
        """Them, the next one to be looked at first."""
        self._requests: dict[RequestKey, ActiveTimes] = {}
        self._table = array("d", IDLE)
        """A `TimeRow` a worker."""
        self._unused: list[int] = []
        """Rows of workers that went."""
        self._row_of = array("I")
        """Row of each slot of the pool."""
        self._slot_of: dict[WorkerRank, int] = {}
        """Slot of each registered worker."""
        self._cache_tokens: dict[WorkerRank, int] = {}
        """Tokens that the cache of each registered worker holds; 0 = unknown."""
        self._capacity = 0
        """Σ of that."""
        self._held = 0
        """Tokens of the capacity that are in use."""
        self._steps: deque[tuple[float, WorkerTimes]] = deque()
        """Ends of prefill steps that were not learned from yet."""
        self._stages: list[tuple[float, int, ActiveTimes]] = []
        """When to see whether an output has come to its next stage; a heap."""
        self._due: list[tuple[float, int, WorkerTimes]] = []
        """When the first prefill of a worker should be done whose end nobody is going to report; a heap."""
        self._passed: deque[RequestKey] = deque()
        """Such ones that are over, since a later one is."""
        self._numbers = 0
        """Orders what is due at one time."""
        self._unreported = 0
        """Whole answers since the last first token that was reported."""

    def workers_changed(self) -> None:
        """Arrange the rows of registered workers anew, when they are needed next."""
        self._arranged = False

    @property
    def rates(self) -> Rates:
        """Return the rates of the workers, as far as they are known."""
        if not self._arranged:
            self._arrange()
        return Rates(self.prefill.slope, self.decode.base, self.decode.slope)

    @property
    def is_belief(self) -> bool:
        """Return whether nothing was observed."""
        return self.prefill.is_belief and self.decode.is_belief

    def believe(self, rates: Rates) -> None:
        """Begin with rates that engines report, until something is observed."""
        self._reported = True
        self._believe(rates)

    def question(
        self,
        request: SelectionRequest,
        prompt: Prompt,
        block_size: int,
        *,
        now: float,
        weight: float,
        books: bool,
        session: int = 0,
    ) -> TimeCostInputs:
        """Return the estimates for the cost of a request.

        Args:
            request: The request.
            prompt: Its prompt, hashed.
            block_size: Tokens a block.
            now: On the scheduler's clock, in seconds.
            weight: Of prompts against decoding.
            books: Whether it is going to be booked.
            session: Conversation of it; 0 = unknown.
        """
        if not self._arranged:
            self._arrange()
        while self._steps and self._steps[0][0] + SAME_STEP * self.prefill.base < now:
            self._learn_step(self._steps.popleft()[1])
        while self._stages and self._stages[0][0] <= now:
            due = heappop(self._stages)[2]
            if not due.ended:
                self._advance(due, now)
        if self._turns and self._reuse_weight:
            # What sessions have left gets older; so many looks are about as many as there is to see.
            rank = self._turns[0]
            self._turns.rotate(-1)
            self._look(self._workers[rank], rank, now)
            self._workers[rank].write(self._table)
        first, second, third, fourth, last = self.outputs.expected(
            request.output_class,
            prompt.lineage(block_size),
            request.max_output_tokens,
            request.expected_output_tokens,
            session,
        )
        workers = max(1, len(self._slot_of))
        popular = self.prefixes.of(prompt.block_hashes, block_size, now, workers, counts=books)
        weights, slope = STAGE_WEIGHTS, self.decode.slope
        first, second = weights[0] * first, weights[1] * second
        third, fourth, last = weights[2] * third, weights[3] * fourth, weights[4] * last
        return TimeCostInputs(
            self._table,
            self._row_of,
            now,
            weight,
            self.prefill.slope if request.charge_prefill else 0.0,
            1.0 - self._held / self._capacity if self._capacity else 0.0,
            *popular,
            self.decode.base * (first + second + third + fourth + last),
            (slope * first, slope * second, slope * third, slope * fourth, slope * last),
        )

    @property
    def steps(self) -> StepTimes:
        """Return how long steps take here."""
        return StepTimes(self.prefill.base, self.decode.base, self.decode.slope)

    def alone_seconds(self, request: SelectionRequest, prompt: Prompt, block_size: int, now: float) -> float:
        """Return the cost of a request to itself, on an idle worker that has the longest part of its prompt.

        Args:
            request: The request.
            prompt: Its prompt, hashed.
            block_size: Tokens a block.
            now: On the scheduler's clock, in seconds.
        """
        question = self.question(request, prompt, block_size, now=now, weight=1.0, books=False)
        cached = block_size * prompt.overlaps.longest_on_device
        return question.own_seconds * max(0, request.isl_tokens - cached) + question.step_seconds

    @property
    def due_at(self) -> float:
        """Return the time at which `over` has requests to return; inf = nothing is due."""
        if self._passed:
            return -inf
        return self._due[0][0] if self._due else inf

    def over(self, now: float) -> list[RequestKey]:
        """Return requests whose prefill should be over, and of whom nobody is going to say so; each once.

        They count until `prefill_completed` is called.
        """
        found = list(self._passed)
        self._passed.clear()
        while self._due and self._due[0][0] <= now:
            worker = heappop(self._due)[2]
            first = next(iter(worker.prefills), None)
            if first is not None and first.reservation.estimates_prefill and worker.due_at <= now:
                found.append(first.reservation.key)
        return found

    def booked(self, reservation: Reservation, now: float) -> None:
        """See `reservation.Observer`."""
        if not self._arranged:
            self._arrange()
        worker = self._workers.get(reservation.rank)
        if worker is None:
            worker = self._add(reservation.rank, now)
        worker.look(now)
        expected = self.outputs.expected(
            reservation.output_class,
            reservation.lineage,
            reservation.max_output_tokens,
            reservation.expected_output_tokens,
            reservation.session,
        )
        request = ActiveTimes(worker, reservation, now, expected, reaching(expected), reservation.isl_tokens)
        self._requests[reservation.key] = request
        worker.requests += 1
        worker.prompt_tokens += reservation.isl_tokens
        worker.add(request)
        self._hold(worker, reservation, reservation.uncached_tokens)
        self._look(worker, reservation.rank, now)
        if reservation.prefilled:
            self._decodes(request, now)
        else:
            if not worker.prefills:
                worker.since = now
            worker.prefills[request] = None
            worker.prefill_tokens += reservation.uncached_tokens
            self._plan(worker)
            request.expected_ttft = max(0.0, worker.due_at - now) + worker.behind
        worker.write(self._table)

    def prefill_completed(self, reservation: Reservation, ttft_seconds: float, now: float) -> None:
        """See `reservation.Observer`."""
        request = self._requests.get(reservation.key)
        if request is None or request.first_token_at != inf:
            return
        worker = request.worker
        if reservation.estimates_prefill:
            # It was over when it was due, if nothing else says so.
            self._prefilled(request, min(now, max(worker.due_at, worker.since)), learn=False)
            self._decodes(request, now)
        else:
            self._prefilled(request, now, learn=not reservation.running)
            self._decodes(request, now)
            if not reservation.running:
                self._unreported = 0
                request.contexts, request.prefilled = self._contexts(worker, now), worker.prefilled
        worker.write(self._table)

    def ended(self, reservation: Reservation, end: End, now: float) -> None:
        """See `reservation.Observer`."""
        request = self._requests.pop(reservation.key, None)
        if request is None:
            return
        worker, tokens = request.worker, end.output_tokens
        learn = end.freed and tokens > 0 and not reservation.running
        if learn and tokens > 1:
            if reservation.estimates_prefill:
                self._learn_whole(request, tokens, now)
            elif request.contexts >= 0 and end.decode_seconds > 0:
                self._learn_decode(request, tokens, end.decode_seconds, now)
        if request.first_token_at == inf:
            # The end of a prompt computed for another worker. Other ends say nothing of it: a failure may be quick.
            self._prefilled(request, now, learn=learn and tokens == 1)
        if end.freed and tokens:
            self.outputs.add(
                reservation.output_class,
                reservation.lineage,
                reservation.max_output_tokens,
                reservation.expected_output_tokens,
                tokens,
                reservation.session,
            )
            self._hold(worker, reservation, tokens)
        self._look(worker, reservation.rank, now)
        request.ended = True
        worker.requests -= 1
        worker.prompt_tokens -= reservation.isl_tokens
        if request.first_token_at != inf:
            worker.decoding -= 1
            worker.first_tokens = worker.first_tokens - request.first_token_at if worker.decoding else 0.0
        worker.remove(request)
        worker.write(self._table)
        if not worker.requests and reservation.rank not in self._slot_of:
            # Workers come and go under new names.
            self._forget(reservation.rank)

    def _believe(self, rates: Rates) -> None:
        self.prefill.believe(rates.step, rates.prompt_token)
        self.decode.believe(rates.step, rates.context_token)

    def _arrange(self) -> None:
        self._arranged = True
        if self.is_belief and not self._reported:
            self._believe(self._believed())
        places, cache_tokens = self._registered()
        self._slot_of = {places[slot]: slot for slot in cache_tokens}
        for rank in [rank for rank, worker in self._workers.items() if not worker.requests]:
            if rank not in self._slot_of:
                self._forget(rank)
        rows = ((worker := self._workers.get(place)) and worker.row for place in places)
        self._row_of = array("I", [row or 0 for row in rows])
        self._cache_tokens = {places[slot]: tokens for slot, tokens in cache_tokens.items()}
        self._capacity, self._held = sum(cache_tokens.values()), 0
        for rank, worker in self._workers.items():
            tokens = self._cache_tokens.get(rank, 0)
            if worker.capacity != tokens:
                # One that comes back may have nothing any more.
                worker.held = min(worker.held, tokens) if worker.capacity else 0
                worker.capacity = tokens
                worker.write(self._table)
            self._held += worker.held

    def _prefilled(self, request: ActiveTimes, now: float, *, learn: bool) -> None:
        """End the prefill of a request."""
        worker = request.worker
        if request not in worker.prefills:
            return
        worker.look(now)
        over = [request]
        if learn:
            # Engines begin prompts in order: those without a reported first token are over when one behind them is.
            for earlier in worker.prefills:
                if earlier is request:
                    break
                if earlier.reservation.estimates_prefill:
                    over.append(earlier)
                    self._passed.append(earlier.reservation.key)
        tokens = 0
        for each in over:
            del worker.prefills[each]
            tokens += each.reservation.uncached_tokens
        for each in over[1:]:
            self._decodes(each, now)
        worker.prefill_tokens -= tokens
        if learn:
            if worker.step_tokens and now - worker.step_ended > SAME_STEP * self.prefill.base:
                self._learn_step(worker)
            if not worker.step_tokens:
                self._steps.append((now, worker))
            worker.step_ended = now
            worker.step_tokens += max(1, tokens)
            worker.step_seconds += max(0.0, now - worker.since)
        worker.since = now
        self._plan(worker)

    def _decodes(self, request: ActiveTimes, now: float) -> None:
        """Begin the decode phase of a request."""
        worker = request.worker
        request.first_token_at = now
        worker.decoding += 1
        worker.first_tokens += now
        self._await_stage(request, now)

    def _await_stage(self, request: ActiveTimes, now: float) -> None:
        if request.stage + 1 < len(STAGES):
            step = self._step(request.worker)
            at, soonest = request.first_token_at + step * STAGES[request.stage + 1], now + step
            self._numbers += 1
            heappush(self._stages, (at if at > soonest else soonest, self._numbers, request))

    def _advance(self, request: ActiveTimes, now: float) -> None:
        """Look whether an output has come to its next stage: then it is longer than was expected."""
        worker, next_stage = request.worker, request.stage + 1
        generated = (now - request.first_token_at) / self._step(worker)
        if generated >= STAGES[next_stage] * (1 - 1e-9):
            worker.remove(request)
            request.stage = next_stage
            request.reaching = reaching(request.expected, next_stage)
            request.context = request.reservation.isl_tokens + STAGES[next_stage]
            worker.add(request)
            worker.write(self._table)
        self._await_stage(request, now)

    def _learn_step(self, worker: WorkerTimes) -> None:
        """Learn from the first tokens that came out of one prefill step."""
        tokens, seconds = worker.step_tokens, worker.step_seconds
        worker.step_tokens, worker.step_seconds = 0, 0.0
        if not tokens:
            return
        steps = tokens / STEP_TOKENS if tokens > STEP_TOKENS else 1.0
        seconds = _left(seconds, self.decode.slope * worker.prompt_tokens * steps)
        believed = worker.pace * self.prefill.at(tokens)
        # Who was stopped for an hour says little of how fast it is, nor does a reply from a cache of answers.
        seconds = within(seconds, LEAST_PACE * believed, MOST_PACE * believed)
        self.prefill.add(tokens, seconds)
        expected = self.prefill.at(tokens)
        worker.prefilled += worker.pace * self.prefill.slope * tokens
        if self.prefill.is_settled:
            worker.prefill_pace(seconds / expected, expected)

    def _learn_decode(self, request: ActiveTimes, tokens: int, seconds: float, now: float) -> None:
        """Learn from the time between the first and the last token of an output."""
        worker = request.worker
        contexts = (request.contexts + self._contexts(worker, now)) / 2
        seconds = _left(seconds, worker.prefilled - request.prefilled)
        believed = worker.decode_pace * self.decode.at(contexts)
        step = within(seconds / (tokens - 1), LEAST_PACE * believed, MOST_PACE * believed)
        self.decode.add(contexts, step)
        expected = self.decode.at(contexts)
        if self.decode.is_settled:
            weight = expected * (tokens - 1)
            worker.step_pace(step / expected, weight if weight < 1.0 else 1.0)

    def _learn_whole(self, request: ActiveTimes, tokens: int, now: float) -> None:
        """Learn from an answer of which only the end is known, where no first token is: both rates are as wrong."""
        self._unreported += 1
        if self._unreported <= UNREPORTED:
            return
        worker, uncached = request.worker, request.reservation.uncached_tokens
        contexts = self._contexts(worker, now)
        step = self.decode.at(contexts)
        expected = request.expected_ttft + worker.decode_pace * step * (tokens - 1)
        ratio = min(max((now - request.booked_at) / expected, LEAST_PACE), MOST_PACE)
        self.prefill.add(uncached, ratio * self.prefill.at(uncached))
        self.decode.add(contexts, ratio * step)

    def _plan(self, worker: WorkerTimes) -> None:
        """Estimate when the prefills of a worker should be done."""
        if not worker.prefills:
            return
        first = next(iter(worker.prefills)).reservation
        worker.plan(
            first.uncached_tokens, self.prefill.base + self.decode.slope * worker.prompt_tokens, self.prefill.slope
        )
        if first.estimates_prefill:
            self._numbers += 1
            heappush(self._due, (worker.due_at, self._numbers, worker))

    def _step(self, worker: WorkerTimes) -> float:
        """Return seconds of a decode step of a worker, about."""
        return worker.decode_pace * self.decode.at(worker.prompt_tokens)

    def _contexts(self, worker: WorkerTimes, now: float) -> float:
        """Return tokens in all contexts of a worker."""
        return worker.prompt_tokens + worker.generated(now, self._step(worker))

    def _hold(self, worker: WorkerTimes, reservation: Reservation, tokens: int) -> None:
        """Add tokens of a request to the cache of a worker."""
        if not worker.capacity:
            return
        if self._reuse_weight:
            worker.sessions.add(reservation.session, tokens, worker.capacity)
        room = worker.capacity - worker.held
        more = tokens if tokens < room else room
        worker.held += more
        self._held += more

    def _look(self, worker: WorkerTimes, rank: WorkerRank, now: float) -> None:
        """Look what a worker evicts next, where its cache is full."""
        if self._reuse_weight and worker.capacity and worker.held == worker.capacity:
            worker.reuse = self._reuse_weight * worker.sessions.reuse(rank, self._sessions, now)

    def _add(self, rank: WorkerRank, now: float) -> WorkerTimes:
        """Add a worker, with a row of the table."""
        if self._unused:
            row = self._unused.pop()
        else:
            self._table.extend(IDLE)
            row = len(self._table) // len(IDLE) - 1
        self._turns.append(rank)
        made = self._workers[rank] = WorkerTimes(row, now, now, now, capacity=self._cache_tokens.get(rank, 0))
        self._point(rank, row)
        return made

    def _forget(self, rank: WorkerRank) -> None:
        """Forget a worker on which nothing is under way."""
        worker = self._workers.pop(rank)
        self._turns.remove(rank)
        self._held -= worker.held
        self._unused.append(worker.row)
        self._point(rank, 0)

    def _point(self, rank: WorkerRank, row: int) -> None:
        """Set the row of a worker's slot, if it is registered."""
        slot = self._slot_of.get(rank)
        if slot is not None:
            self._row_of[slot] = row


def _left(seconds: float, beside: float) -> float:
    """Return what is left of a time without what else went on meanwhile."""
    left, least = seconds - beside, LEAST_LEFT * seconds
    return left if left > least else least
