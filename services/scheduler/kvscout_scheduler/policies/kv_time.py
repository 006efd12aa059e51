"""`kv-time`: the worker on which a request costs the least time, its own and that of others.

Its rates are learned: seconds a prompt token from how long prefills take, seconds a token of context from inter-token
latencies. Until anything is known they are those of a large model on current accelerators. How full a cache is follows
from bookings.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from kvscout_common.worker import WorkerRank
from kvscout_scheduler.candidates import Candidates
from kvscout_scheduler.facts import End, Facts
from kvscout_scheduler.policies.policy import Policy
from kvscout_scheduler.rates import Line, Mean
from kvscout_scheduler.request import RequestKey
from kvscout_scheduler.time_cost import (
    HORIZON_SECONDS,
    ROW,
    TimeQuestion,
    TimeRow,
    ahead_of,
    crowding_of,
    priced_tokens,
)

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
    capacity: int = 0
    """Tokens that its cache holds; 0 = unknown, or it is not registered now."""
    held: int = 0
    """Of these, as many as were booked since then: an engine keeps what it has until there is no room."""

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
            self.capacity - self.held if self.capacity else inf,
        )


class KvTime(Policy):
    """The worker on which a request costs the least time, its own and that of others.

    ::

        cost(w)     = overlap_score_weight · (ahead(w) + crowding(w) · own(w)) + decode(w)        seconds

        ahead(w)    = what is left of the prompts booked there before
        own(w)      = (uncached(w) + empty · evicted(w)) · seconds a token
        evicted(w)  = what of uncached(w) goes beyond the room in w's cache, in tokens
        empty       = share of all caches that is empty
        crowding(w) = 1 / (1 − share of the time in which w has had prompts to compute)
        decode(w)   = DECODE_WEIGHT · output tokens · (contexts(w) + requests(w) · isl) · seconds a token of context

    While a worker computes a prompt, others who come wait: the more of them, the less idle it is, which is what
    `crowding` counts. So a cached prefix is worth more the more there is to do, and another worker is given a copy of
    it when its holder has no time and the other has. What a full cache loses for a prompt has to be computed again,
    which is needless as far as other caches have room; where all are full it counts nothing, as it is lost wherever the
    prompt goes. In `decode`, contexts are what slows this request down, and
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
        self._slot_of: dict[WorkerRank, int] = {}
        """Of the registered workers."""
        self._cache_tokens: dict[WorkerRank, int] = {}
        """What the cache of each of them holds; 0 = unknown."""
        self._capacity = 0
        """Σ of that."""
        self._held = 0
        """Of these, tokens that have come."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return candidates.seconds(self._question(candidates))

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        isl, now, question = candidates.request.isl_tokens, candidates.now, self._question(candidates)
        row = question.row(candidates.slots[index])
        uncached = isl - candidates.cached_tokens[index]
        seconds = row.pace * question.own_seconds * priced_tokens(uncached, row.room, question.kept)
        evicts = " and of what it evicts" if uncached > row.room and question.kept else ""
        others = question.decode_seconds * (row.contexts + row.requests * isl)
        ahead = ahead_of(row.behind, row.due_at, row.prefills, now)
        crowding = crowding_of(row.used, row.seen, row.prefills, now)
        return (
            f"{ahead:.3g} s of prompts ahead, {seconds:.3g} s of its own{evicts} that count "
            f"{crowding:.3g} times, {others:.3g} s for decoding beside others, cost {costs[index]:.3g} s"
        )

    def booked(self, facts: Facts, now: float) -> None:
        worker = self._workers.get(facts.rank)
        if worker is None:
            worker = self._add(facts.rank, now)
        worker.look(now)
        if not worker.prefills:
            worker.since = now
        request = self._requests[facts.key] = _Request(worker, facts.uncached_tokens)
        worker.prefills[request] = None
        worker.tokens += facts.uncached_tokens
        worker.requests += 1
        worker.contexts += facts.isl_tokens
        self._hold(worker, facts.uncached_tokens)
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
            self._hold(worker, end.output_tokens)
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
            self._held -= worker.held
            self._unused.append(worker.row)
            self._point(facts.rank, 0)

    def _question(self, candidates: Candidates) -> TimeQuestion:
        """What is known when a request asks."""
        request, places = candidates.request, candidates.places
        if places is not self._places:
            self._arrange(places, candidates.cache_tokens)
        return TimeQuestion(
            self._table,
            self._row_of,
            candidates.now,
            candidates.settings.overlap_score_weight,
            self.prefill.slope if request.charge_prefill else 0.0,
            DECODE_WEIGHT * (request.expected_output_tokens or self.output.value) * self.decode.slope,
            1.0 - self._held / self._capacity if self._capacity else 0.0,
        )

    def _arrange(self, places: tuple[WorkerRank, ...], cache_tokens: Mapping[int, int]) -> None:
        """Workers were registered or went: finds the row and the cache of each."""
        rows = ((worker := self._workers.get(place)) and worker.row for place in places)
        self._row_of = array("I", [row or 0 for row in rows])
        self._slot_of = {places[slot]: slot for slot in cache_tokens}
        self._places = places
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

    def _hold(self, worker: _Worker, tokens: int) -> None:
        """The cache of a worker takes new tokens."""
        more = min(tokens, worker.capacity - worker.held)
        worker.held += more
        self._held += more

    def _add(self, rank: WorkerRank, now: float) -> _Worker:
        """A worker that is not known gets a row."""
        if self._unused:
            row = self._unused.pop()
        else:
            self._table.extend(IDLE)
            row = len(self._table) // len(IDLE) - 1
        self._point(rank, row)
        made = self._workers[rank] = _Worker(row, now, now, now, capacity=self._cache_tokens.get(rank, 0))
        return made

    def _point(self, rank: WorkerRank, row: int) -> None:
        """Says where the row of a worker is, if it is registered."""
        slot = self._slot_of.get(rank)
        if slot is not None:
            self._row_of[slot] = row

    def _prefilled(self, request: _Request, now: float, *, learn: bool) -> None:
        """A request computes its prompt no more."""
        worker = request.worker
        if request not in worker.prefills:
            return
        worker.look(now)
        del worker.prefills[request]
        worker.tokens -= request.tokens
        if learn:
            # Who was stopped for an hour says little of how fast it is.
            took = min(max(0.0, now - worker.since), MOST_PACE * self.prefill.at(request.tokens))
            self.prefill.add(request.tokens, took)
            expected = self.prefill.at(request.tokens)
            worker.prefilled += worker.pace * self.prefill.slope * request.tokens
            worker.pace_mean.add(max(LEAST_PACE, took / expected), expected)
            worker.pace = worker.pace_mean.value
        worker.since = now
        worker.plan(self.prefill)
