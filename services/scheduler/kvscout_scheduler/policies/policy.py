"""Candidates of a request, in columns that are computed when they are looked at, and the base class of policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, TypeVar

from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_scheduler.costs.choose import choose, probabilities
from kvscout_scheduler.costs.cost import BlockFormat, ScoreInputs, spread
from kvscout_scheduler.costs.targets import Times
from kvscout_scheduler.costs.time_cost import TimeCostInputs
from kvscout_scheduler.estimates.engine_metrics import NO_METRICS, EngineMetrics
from kvscout_scheduler.values.overlaps import Overlaps
from kvscout_scheduler.values.request import Prompt, SelectionRequest
from kvscout_scheduler.values.settings import SchedulerSettings

if TYPE_CHECKING:
    from kvscout_scheduler.load.active_load import Scores
    from kvscout_scheduler.load.pool import Pool

T = TypeVar("T")


class TierOverlap(NamedTuple):
    """Leading blocks of a prompt on one worker, cumulative: each tier includes the faster ones."""

    device: int
    host: int
    disk: int
    external: int


def uncached_tokens(request: SelectionRequest, effective_blocks: float, block_size: int) -> int:
    """Return prompt tokens to charge a worker as prefill, by the overlap as its cost counts it."""
    return max(0, request.isl_tokens - int(effective_blocks * block_size)) if request.charge_prefill else 0


_TIERS: Final = TierOverlap._fields


def _tier(tier: int) -> Callable[[Overlaps], Sequence[int]]:
    """Return what takes the column of a tier out of overlaps."""
    return lambda overlaps: overlaps.by_tier()[tier]


class Candidates:
    """Eligible workers of one request; every column has one entry a candidate, in the order of their ranks.

    Args:
        pool: Where they come from; not changed while this is in use.
        request: The request.
        members: The set of their slots (`slot_sets`); at least one, all registered.
        prompts: The request's hashes and overlaps for each block format of the pool.
        settings: Settings in effect, the request's overrides applied.
        now: On the scheduler's clock.
        books: Whether the choice is booked; queries must not change what bookings see.
        home: Slot where the request's session was last, or the parent of a new one; -1 = unknown.
        session: The session; 0 = unknown.
    """

    def __init__(
        self,
        pool: Pool,
        request: SelectionRequest,
        members: int,
        prompts: Mapping[BlockFormat, Prompt],
        settings: SchedulerSettings,
        *,
        now: float,
        books: bool = False,
        home: int = -1,
        session: int = 0,
    ) -> None:
        self.request = request
        self.members = members
        self.settings = settings
        self.now = now
        self.books = books
        self.home = home
        self.session = session
        self._pool = pool
        self._prompts = prompts
        self._slots: list[int] | None = None
        self._scored: list[tuple[int, Scores]] | None = None

    def __len__(self) -> int:
        return self.members.bit_count()

    @property
    def slots(self) -> list[int]:
        """Return their slots."""
        if self._slots is None:
            self._slots = self._pool.members(self.members)
        return self._slots

    def slot(self, index: int) -> int:
        """Return the slot of one candidate."""
        if self._slots is None and self._scored is not None and len(self._scored) == 1:
            return self._scored[0][1].slot(index)
        return self.slots[index]

    @property
    def ranks(self) -> list[WorkerRank]:
        """Return ranks, ascending."""
        return [self._pool.ranks[slot] for slot in self.slots]

    @property
    def specs(self) -> list[WorkerSpec]:
        """Return registrations."""
        return [self._pool.specs[slot] for slot in self.slots]

    @property
    def metrics(self) -> list[EngineMetrics]:
        """Return what the engines last reported."""
        return [self._pool.metrics.get(slot, NO_METRICS) for slot in self.slots]

    @property
    def active_requests(self) -> list[int]:
        """Return requests booked now."""
        column = self._pool.load.requests
        return [column[slot] for slot in self.slots]

    @property
    def active_prefill_tokens(self) -> list[int]:
        """Return active prefill tokens now."""
        column = self._pool.load.prefill_tokens
        return [column[slot] for slot in self.slots]

    @property
    def active_decode_blocks(self) -> list[int]:
        """Return active blocks now."""
        column = self._pool.load.decode_blocks
        return [column[slot] for slot in self.slots]

    @cached_property
    def device_blocks(self) -> Sequence[int]:
        """Return leading blocks of the prompt on the device, confirmed or predicted."""
        return self._column(lambda scores: scores.device_blocks)

    @cached_property
    def effective_blocks(self) -> Sequence[float]:
        """Return the overlap as the cost counts it: slower tiers weighted, 0 where the overlap score weight is 0."""
        return self._column(lambda scores: scores.effective_blocks)

    @cached_property
    def cached_tokens(self) -> Sequence[float]:
        """Return prompt tokens that each has, slower tiers weighted; at most the prompt."""
        return self._column(lambda scores: scores.cached_tokens)

    @cached_property
    def kv_usage(self) -> Sequence[float]:
        """Return the fraction of each device cache in use: booked or reported, whichever is higher; 0 = unknown."""
        columns = zip(self.active_decode_blocks, self.specs, self.metrics, strict=True)
        return [
            max(active / spec.total_kv_blocks if spec.total_kv_blocks else 0.0, metrics.kv_cache_usage or 0.0)
            for active, spec, metrics in columns
        ]

    @cached_property
    def prefill_tokens(self) -> Sequence[float]:
        """Return prompt tokens that each would have to compute, this request's included."""
        return self._column(lambda scores: scores.prefill_tokens)

    @cached_property
    def decode_blocks(self) -> Sequence[int]:
        """Return blocks that would be active on each, this request's included."""
        return self._column(lambda scores: scores.decode_blocks)

    @property
    def prefill_blocks(self) -> list[float]:
        """Return `prefill_tokens` in each worker's own blocks."""
        format_of = self._pool.format_of
        return [
            tokens / format_of[slot].block_size for slot, tokens in zip(self.slots, self.prefill_tokens, strict=True)
        ]

    @property
    def kv_costs(self) -> Sequence[float]:
        """Return the cost of `kvscout_scheduler.costs.cost`; where block sizes differ, in blocks of the smallest."""
        return self._column(lambda scores: scores.costs)

    def time_cost_inputs(self) -> TimeCostInputs:
        """Return what is known of the workers and of the time that the request takes."""
        block_format, prompt = next(iter(self._prompts.items()))
        return self._pool.times.question(
            self.request,
            prompt,
            block_format.block_size,
            now=self.now,
            weight=self.settings.overlap_score_weight,
            books=self.books,
            session=self.session,
        )

    def seconds(self, question: TimeCostInputs) -> Sequence[float]:
        """Return the cost of `kvscout_scheduler.costs.time_cost`.

        Args:
            question: With a row for each slot of the pool.
        """
        scored = self._scored or self._scores
        if len(scored) == 1:
            return scored[0][1].seconds(question)
        return self._column(lambda scores: scores.seconds(question))

    def response_times(self) -> Sequence[Times]:
        """Return the response times to expect on each, by `kvscout_scheduler.costs.targets`."""
        question, steps = self.time_cost_inputs(), self._pool.times.steps
        return self._column(lambda scores: scores.response_times(question, steps))

    def overlap(self, index: int) -> tuple[int, float]:
        """Return `device_blocks` and `effective_blocks` of one candidate."""
        scored = self._scored or self._scores
        if len(scored) == 1:
            return scored[0][1].overlap(index)
        return self.device_blocks[index], self.effective_blocks[index]

    def uncached_tokens(self, slot: int, effective_blocks: float) -> int:
        """Return prompt tokens to charge the candidate at a slot as prefill, by its `effective_blocks`."""
        return uncached_tokens(self.request, effective_blocks, self._pool.format_of[slot].block_size)

    def of(self, members: int) -> Candidates:
        """Return the same question of other workers."""
        return Candidates(
            self._pool,
            self.request,
            members,
            self._prompts,
            self.settings,
            now=self.now,
            books=self.books,
            home=self.home,
            session=self.session,
        )

    def tiers(self) -> Sequence[TierOverlap]:
        """Return the overlap of each by tier."""
        found: dict[int, TierOverlap] = {}
        for block_format, members in self._pool.formats.items():
            slots = self._pool.members(members & self.members)
            overlaps = self._prompts[block_format].overlaps.plain
            columns = [spread(overlaps, _tier(tier), slots, self._pool.slot_of) for tier in range(len(_TIERS))]
            found.update(zip(slots, map(TierOverlap._make, zip(*columns, strict=True)), strict=True))
        return [found[slot] for slot in self.slots]

    def _column(self, of: Callable[[Scores], Sequence[T]]) -> Sequence[T]:
        """Return a column of all, from those of each block format."""
        scored = self._scores
        if len(scored) == 1:
            return of(scored[0][1])
        found: dict[int, T] = {}
        for members, scores in scored:
            found.update(zip(self._pool.members(members), of(scores), strict=True))
        return [found[slot] for slot in self.slots]

    @property
    def _scores(self) -> list[tuple[int, Scores]]:
        """Return the candidates of each block format, and their scores."""
        # Once a request: `cached_property` takes a lock to compute, in Python 3.11.
        if self._scored is None:
            if len(self._prompts) == 1:
                (block_format,) = self._prompts
                slots = None if self.members == self._pool.everyone else self.members
                self._scored = [(self.members, self._score(block_format, slots, block_format.block_size))]
            else:
                formats = {block_format: members & self.members for block_format, members in self._pool.formats.items()}
                unit = min(block_format.block_size for block_format in formats)
                self._scored = [
                    (members, self._score(block_format, members, unit)) for block_format, members in formats.items()
                ]
        return self._scored

    def _score(self, block_format: BlockFormat, slots: int | None, unit: int) -> Scores:
        prompt, settings = self._prompts[block_format], self.settings
        question = ScoreInputs(
            block_format,
            prompt.block_hashes,
            self.request.isl_tokens,
            settings.overlap_score_weight,
            settings.tier_weights,
            self.request.charge_prefill,
            block_format.block_size / unit,
        )
        return self._pool.load.score(question, prompt.overlaps, slots)


class Formula(Enum):
    """Costs that the load computes, and finds the least of, in one call (`ActiveLoad.cheapest`)."""

    BLOCKS = auto()
    """The formula `costs.cost`."""
    SECONDS = auto()
    """The formula `costs.time_cost`."""


class Policy(ABC):
    """Policy that picks one of the candidates, which are eligible. A subclass says what a candidate costs, the rest is
    here.

    At temperature 0 the least cost wins, of exact ties the worker where the session was, else any with equal chance;
    above, softmax over range-normalised costs.

    Every pool has an instance of its own, which may keep state and must not block. One that has methods of
    `reservation.Observer` observes the course of requests through them, so that it can learn how fast workers are.
    """

    formula: ClassVar[Formula | None] = None
    """What `costs` returns, if `pick` is the one below: such a class is not asked at temperature 0 without explanation.
    It says nothing of its subclasses."""
    unit: ClassVar[str | None] = ""
    """Unit of `costs` in explanations, such as "blocks"; "s" = seconds, shown as milliseconds; "" = a plain number;
    None = costs do not show why a worker was picked, `reason` does."""

    @abstractmethod
    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Return the costs to minimise, one a candidate, none NaN; change nothing."""

    def temperature(self, candidates: Candidates) -> float:
        """Return the temperature of its draws; 0 where a policy knows none."""
        return candidates.settings.router_temperature

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        """Return the index of the candidate it picks.

        Args:
            candidates: At least one.
            costs: What `costs` said of them.
            rng: The only source of chance.
        """
        home = candidates.home
        prefers = (lambda index: candidates.slot(index) == home) if home >= 0 else None
        return choose(costs, self.temperature(candidates), rng, prefers)

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        """Return the probability of each candidate, where a temperature is used; else all 0."""
        temperature = self.temperature(candidates)
        return probabilities(costs, temperature) if temperature > 0 else [0.0] * len(costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        """Return why it picked this one, in one sentence."""
        what, temperature = self.describe(candidates, costs, index), self.temperature(candidates)
        if temperature > 0:
            return f"drawn at temperature {temperature:g}: {what}"
        ties = costs.count(costs[index])
        return f"least cost: {what}" if ties == 1 else f"drawn among {ties} workers of equal least cost: {what}"

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        """Return the parts of a candidate's cost, in words."""
        return f"cost {costs[index]:g}"
