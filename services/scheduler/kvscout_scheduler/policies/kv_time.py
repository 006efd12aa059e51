"""`kv-time`: the worker on which a request costs the least time, its own and that of others.

Its rates are learned: seconds a prompt token from how long prefills take, seconds a token of context from inter-token
latencies. Until anything is known they are those of a large model on current accelerators.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvscout_common.worker import WorkerRank
from kvscout_scheduler.candidates import Candidates
from kvscout_scheduler.facts import End, Facts
from kvscout_scheduler.policies.policy import Policy
from kvscout_scheduler.rates import Line, Mean
from kvscout_scheduler.request import RequestKey
from kvscout_scheduler.time_cost import HORIZON_SECONDS, ROW, TimeQuestion, TimeRow, ahead_of, crowding_of

PREFILL: Final = (0.01, 50e-6, 4_096.0)
"""What is believed at first: seconds of a prefill without tokens, seconds a token, and where that holds."""
DECODE: Final = (0.01, 20e-9, 50_000.0)
"""Seconds of a decode step without contexts, seconds a token of context, and where that holds."""
OUTPUT_TOKENS: Final = 250.0
"""Of a request, until any was counted."""
LEAST_PACE: Final = 0.1
MOST_PACE: Final = 10.0
"""Where a worker's pace is, in that of all."""
DECODE_WEIGHT: Final = 0.25
"""Of a second between tokens, in seconds before the first: they are shared out over many tokens, and go by while
something is being read."""
MOST_USED: Final = 0.999
IDLE: Final = TimeRow()
"""The first row, of all workers that nothing is known of."""


@dataclass(slots=True, eq=False)
class _Request:
    """One booking."""

    worker: _Worker
    tokens: int
    """Uncached ones of its prompt."""
    contexts: int = -1
    """Of its worker at its first token; -1 = that is not out yet."""
    prefilled: float = 0.0
    """Of its worker at its first token."""


@dataclass(slots=True, eq=False)
class _Worker:
    """What is under way on one worker rank, as far as bookings tell; `TimeRow` has what is not explained here."""

    row: int
    since: float
    """When the first of its prefills could begin."""
    due_at: float
    seen: float
    prefills: dict[_Request, None] = field(default_factory=dict)
    """Those without a first token, in order of booking."""
    tokens: int = 0
    """Σ of theirs."""
    behind: float = 0.0
    requests: int = 0
    contexts: int = 0
    pace_mean: Mean = field(default_factory=lambda: Mean(1.0, 1.0, kept=0.95))
    pace: float = 1.0
    prefilled: float = 0.0
    """Seconds of all prefills so far: those that decode had to wait meanwhile."""
    used: float = 0.0

    def look(self, now: float) -> None:
        """Brings `used` up to a time."""
        passed = (now - self.seen) / HORIZON_SECONDS
        if passed > 0.0:
            used = (self.used + (passed if self.prefills else 0.0)) / (1.0 + passed)
            # Never 1, whatever is rounded: nothing is crowded without end.
            self.used = used if used < MOST_USED else MOST_USED
        self.seen = now

    def plan(self, prefill: Line) -> None:
        """Says when its prefills should be done, by what is known of how long they take."""
        if self.prefills:
            first = self.pace * prefill.at(next(iter(self.prefills)).tokens)
            self.due_at = self.since + first
            self.behind = self.pace * (prefill.base * len(self.prefills) + prefill.slope * self.tokens) - first

    def write(self, table: array[float]) -> None:
        """Writes its row of a table."""
        ROW.pack_into(
            table,
            self.row * ROW.size,
            self.behind,
            self.due_at,
            self.pace,
            self.used,
            self.seen,
            self.contexts,
            self.requests,
            len(self.prefills),
        )


class KvTime(Policy):
    """The worker on which a request costs the least time, its own and that of others.

    ::

        cost(w)     = overlap_score_weight · (ahead(w) + crowding(w) · own(w)) + decode(w)        seconds

        ahead(w)    = what is left of the prompts booked there before
        own(w)      = uncached tokens · seconds a token
        crowding(w) = 1 / (1 − share of the time in which w has had prompts to compute)
        decode(w)   = DECODE_WEIGHT · output tokens · (contexts(w) + requests(w) · isl) · seconds a token of context

    While a worker computes a prompt, others who come wait: the more of them, the less idle it is, which is what
    `crowding` counts. So a cached prefix is worth more the more there is to do, and another worker is given a copy of
    it when its holder has no time and the other has. In `decode`, contexts are what slows this request down, and
    requests times its own context are what it slows down.
    """

    def __init__(self) -> None:
        self.prefill = Line(*PREFILL)
        """Seconds of a prefill by its uncached tokens."""
        self.decode = Line(*DECODE)
        """Seconds of a decode step by the tokens in its contexts."""
        self.output = Mean(OUTPUT_TOKENS)
        self._workers: dict[WorkerRank, _Worker] = {}
        self._requests: dict[RequestKey, _Request] = {}
        self._table = array("d", IDLE)
        """What is known of workers, a row each; see `time_cost`."""
        self._unused: list[int] = []
        """Rows of workers that went."""
        self._places: tuple[WorkerRank, ...] | None = None
        """Of the pool when `_row_of` was made."""
        self._row_of = array("I")

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return candidates.seconds(self._question(candidates))

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        isl, now, question = candidates.request.isl_tokens, candidates.now, self._question(candidates)
        row = question.row(candidates.slots[index])
        seconds = row.pace * question.own_seconds * (isl - candidates.cached_tokens[index])
        others = question.decode_seconds * (row.contexts + row.requests * isl)
        ahead = ahead_of(row.behind, row.due_at, row.prefills, now)
        crowding = crowding_of(row.used, row.seen, row.prefills, now)
        return (
            f"{ahead:.3g} s of prompts ahead, {seconds:.3g} s of its own that count "
            f"{crowding:.3g} times, {others:.3g} s for decoding beside others, cost {costs[index]:.3g} s"
        )

    def booked(self, facts: Facts, now: float) -> None:
        worker = self._workers.get(facts.rank)
        if worker is None:
            worker = self._workers[facts.rank] = _Worker(self._new_row(), now, now, now)
        worker.look(now)
        if not worker.prefills:
            worker.since = now
        request = self._requests[facts.key] = _Request(worker, facts.uncached_tokens)
        worker.prefills[request] = None
        worker.tokens += facts.uncached_tokens
        worker.requests += 1
        worker.contexts += facts.isl_tokens
        worker.plan(self.prefill)
        worker.write(self._table)

    def prefill_completed(self, facts: Facts, ttft_seconds: float, now: float) -> None:
        request = self._requests.get(facts.key)
        if request is not None:
            worker = request.worker
            self._prefilled(request, now, learn=True)
            request.contexts, request.prefilled = worker.contexts, worker.prefilled
            worker.write(self._table)

    def ended(self, facts: Facts, end: End, now: float) -> None:
        request = self._requests.pop(facts.key, None)
        if request is None:
            return
        worker = request.worker
        # The end of a prompt computed for another worker. Other ends say nothing of it: a failure may be quick.
        self._prefilled(request, now, learn=end.freed and end.output_tokens == 1)
        if end.freed and end.output_tokens:
            self.output.add(end.output_tokens)
            if request.contexts >= 0 and end.output_tokens > 1:
                contexts = (request.contexts + worker.contexts) / 2
                seconds = max(0.0, end.decode_seconds - (worker.prefilled - request.prefilled))
                step = min(seconds / (end.output_tokens - 1), MOST_PACE * self.decode.at(contexts))
                self.decode.add(contexts, step)
        worker.requests -= 1
        worker.contexts -= facts.isl_tokens
        worker.write(self._table)
        if not worker.requests and len(self._workers) > 2 * len(self._requests) + 1_024:
            # Workers come and go under new names.
            del self._workers[facts.rank]
            self._unused.append(worker.row)
            self._places = None

    def _question(self, candidates: Candidates) -> TimeQuestion:
        """What is known when a request asks."""
        request, places = candidates.request, candidates.places
        if places is not self._places:
            known = map(self._workers.get, places)
            self._row_of = array("I", [0 if worker is None else worker.row for worker in known])
            self._places = places
        return TimeQuestion(
            self._table,
            self._row_of,
            candidates.now,
            candidates.settings.overlap_score_weight,
            self.prefill.slope if request.charge_prefill else 0.0,
            DECODE_WEIGHT * (request.expected_output_tokens or self.output.value) * self.decode.slope,
        )

    def _new_row(self) -> int:
        """For a worker that is not known."""
        self._places = None
        if self._unused:
            return self._unused.pop()
        self._table.extend(IDLE)
        return len(self._table) // len(IDLE) - 1

    def _prefilled(self, request: _Request, now: float, *, learn: bool) -> None:
        """A request computes its prompt no more."""
        worker = request.worker
        if request not in worker.prefills:
            return
        worker.look(now)
        del worker.prefills[request]
        worker.tokens -= request.tokens
        if learn:
            expected = self.prefill.at(request.tokens)
            # Who was stopped for an hour says little of how fast it is.
            took = min(max(0.0, now - worker.since), MOST_PACE * expected)
            self.prefill.add(request.tokens, took)
            worker.prefilled += worker.pace * self.prefill.slope * request.tokens
            worker.pace_mean.add(max(LEAST_PACE, took / expected), expected)
            worker.pace = worker.pace_mean.value
        worker.since = now
        worker.plan(self.prefill)
