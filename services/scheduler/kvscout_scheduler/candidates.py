"""The workers that a policy chooses among, in columns; what a policy does not look at is not computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_scheduler.active_load import Scores
from kvscout_scheduler.cost import DEFAULT_TIER_WEIGHTS, Lane, Question, TierWeights, spread
from kvscout_scheduler.engine_metrics import NO_METRICS, EngineMetrics
from kvscout_scheduler.pool import Pool
from kvscout_scheduler.request import Prompt, SelectionRequest

T = TypeVar("T")

DEFAULT_CPU_TO_GPU_RATIO = 8.0


@dataclass(frozen=True, slots=True)
class SelectionSettings:
    """Settings in effect for one selection, overrides applied."""

    overlap_score_weight: float = 1.0
    router_temperature: float = 0.0
    tier_weights: TierWeights = DEFAULT_TIER_WEIGHTS
    cpu_to_gpu_ratio: float = DEFAULT_CPU_TO_GPU_RATIO
    """Requests that an accelerator carries in the time of one CPU worker."""
    books: bool = True
    """Whether the choice is booked; queries must not change what bookings see."""


class TierOverlap(NamedTuple):
    """Leading blocks of a prompt on one worker, cumulative: each tier includes the faster ones."""

    device: int
    host: int
    disk: int
    external: int


class Candidates:
    """Eligible workers of one request; every column has one entry a candidate, in the order of their ranks.

    Args:
        pool: Where they come from; not changed while this is in use.
        request: The request.
        slots: Their slots; at least one.
        prompts: The request's hashes and overlaps for each lane of the pool.
        settings: Settings in effect.
        now: On the scheduler's clock.
    """

    def __init__(
        self,
        pool: Pool,
        request: SelectionRequest,
        slots: list[int],
        prompts: Mapping[Lane, Prompt],
        settings: SelectionSettings,
        *,
        now: float,
    ) -> None:
        self.request = request
        self.slots = slots
        self.settings = settings
        self.now = now
        self._pool = pool
        self._prompts = prompts
        self._known: dict[Lane, Scores] | None = None

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def ranks(self) -> list[WorkerRank]:
        """Ranks, ascending."""
        return [self._pool.ranks[slot] for slot in self.slots]

    @property
    def specs(self) -> list[WorkerSpec]:
        """Registrations."""
        return [self._pool.specs[slot] for slot in self.slots]

    @property
    def metrics(self) -> list[EngineMetrics]:
        """What the engines last reported."""
        return [self._pool.metrics.get(slot, NO_METRICS) for slot in self.slots]

    @property
    def active_requests(self) -> list[int]:
        """Requests booked now."""
        column = self._pool.load.requests
        return [column[slot] for slot in self.slots]

    @property
    def active_prefill_tokens(self) -> list[int]:
        """Active prefill tokens now."""
        column = self._pool.load.prefill_tokens
        return [column[slot] for slot in self.slots]

    @property
    def active_decode_blocks(self) -> list[int]:
        """Active blocks now."""
        column = self._pool.load.decode_blocks
        return [column[slot] for slot in self.slots]

    @cached_property
    def device_blocks(self) -> Sequence[int]:
        """Leading blocks of the prompt on the device, confirmed or predicted."""
        return self._column(lambda scores: scores.device_blocks)

    @cached_property
    def effective_blocks(self) -> Sequence[float]:
        """Overlap as the cost counts it: slower tiers weighted, 0 where the overlap score weight is 0."""
        return self._column(lambda scores: scores.effective_blocks)

    @cached_property
    def cached_tokens(self) -> Sequence[float]:
        """Prompt tokens that each has, slower tiers weighted; at most the prompt."""
        isl, lane_of = self.request.isl_tokens, self._pool.lane_of
        return [
            min(isl, blocks * lane_of[slot].block_size)
            for slot, blocks in zip(self.slots, self.effective_blocks, strict=True)
        ]

    @cached_property
    def kv_usage(self) -> Sequence[float]:
        """Fraction of each device cache in use: booked or reported, whichever is higher; 0 where neither is known."""
        columns = zip(self.active_decode_blocks, self.specs, self.metrics, strict=True)
        return [
            max(active / spec.total_kv_blocks if spec.total_kv_blocks else 0.0, metrics.kv_cache_usage or 0.0)
            for active, spec, metrics in columns
        ]

    @cached_property
    def prefill_tokens(self) -> Sequence[float]:
        """Prompt tokens that each would have to compute, this request's included."""
        return self._column(lambda scores: scores.prefill_tokens)

    @cached_property
    def decode_blocks(self) -> Sequence[int]:
        """Blocks that would be active on each, this request's included."""
        return self._column(lambda scores: scores.decode_blocks)

    @property
    def prefill_blocks(self) -> list[float]:
        """`prefill_tokens` in each worker's own blocks."""
        lane_of = self._pool.lane_of
        return [tokens / lane_of[slot].block_size for slot, tokens in zip(self.slots, self.prefill_tokens, strict=True)]

    @property
    def kv_costs(self) -> Sequence[float]:
        """Cost of `kvscout_scheduler.cost`; where block sizes differ, in blocks of the smallest."""
        return self._column(lambda scores: scores.costs)

    def overlap(self, index: int) -> tuple[int, float]:
        """`device_blocks` and `effective_blocks` of one candidate."""
        if len(self._prompts) == 1:
            (scores,) = self._scores.values()
            return scores.overlap(index)
        return self.device_blocks[index], self.effective_blocks[index]

    def uncached_tokens(self, index: int, effective_blocks: float) -> int:
        """Prompt tokens to charge one candidate as prefill, by its `effective_blocks`."""
        if not self.request.charge_prefill:
            return 0
        block_size = self._pool.lane_of[self.slots[index]].block_size
        return max(0, self.request.isl_tokens - int(effective_blocks * block_size))

    def of(self, slots: list[int]) -> Candidates:
        """The same question of other workers."""
        return Candidates(self._pool, self.request, slots, self._prompts, self.settings, now=self.now)

    def tiers(self) -> Sequence[TierOverlap]:
        """Overlap of each by tier."""

        def of_lane(lane: Lane, slots: Sequence[int]) -> list[TierOverlap]:
            overlaps = self._prompts[lane].overlaps.plain
            columns = [spread(overlaps, column, slots, self._pool.slot_of) for column in overlaps.by_tier()]
            return [TierOverlap(*row) for row in zip(*columns, strict=True)]

        return self._by_lane(of_lane)

    def prompt(self, lane: Lane) -> Prompt:
        """The prompt as hashed for a lane."""
        return self._prompts[lane]

    @property
    def _scores(self) -> dict[Lane, Scores]:
        """What the load says of the candidates of each lane."""
        if self._known is None:
            self._known = self._score()
        return self._known

    def _score(self) -> dict[Lane, Scores]:
        pool, settings = self._pool, self.settings
        if len(self._prompts) == 1:
            (only,) = self._prompts
            lanes: Mapping[Lane, list[int] | None] = {only: None if self.slots is pool.order else self.slots}
            unit = only.block_size
        else:
            lanes = self._slots_by_lane
            unit = min(lane.block_size for lane in lanes)
        scores = {}
        for lane, slots in lanes.items():
            prompt = self._prompts[lane]
            question = Question(
                lane,
                prompt.block_hashes,
                self.request.isl_tokens,
                settings.overlap_score_weight,
                settings.tier_weights,
                self.request.charge_prefill,
                lane.block_size / unit,
            )
            scores[lane] = pool.load.score(question, prompt.overlaps, slots)
        return scores

    @cached_property
    def _slots_by_lane(self) -> dict[Lane, list[int]]:
        wanted = set(self.slots)
        return {lane: [slot for slot in members if slot in wanted] for lane, members in self._pool.lanes.items()}

    def _column(self, column: Callable[[Scores], Sequence[T]]) -> Sequence[T]:
        """A column of the scores in the candidates' order."""
        if len(self._prompts) == 1:
            (scores,) = self._scores.values()
            return column(scores)
        return self._by_lane(lambda lane, slots: column(self._scores[lane]))

    def _by_lane(self, column: Callable[[Lane, Sequence[int]], Sequence[T]]) -> Sequence[T]:
        """Computes a column lane by lane and puts it in the candidates' order."""
        if len(self._prompts) == 1:
            return column(next(iter(self._prompts)), self.slots)
        found: dict[int, T] = {}
        for lane, slots in self._slots_by_lane.items():
            found.update(zip(slots, column(lane, slots), strict=True))
        return [found[slot] for slot in self.slots]
