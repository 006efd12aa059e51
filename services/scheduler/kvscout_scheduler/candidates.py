"""The workers that a policy chooses among, in columns; what a policy does not look at is not computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_scheduler import cost
from kvscout_scheduler.active_load import Lane
from kvscout_scheduler.cost import DEFAULT_TIER_WEIGHTS, TierWeights
from kvscout_scheduler.pool import NO_METRICS, EngineMetrics, Pool
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
    """

    def __init__(
        self,
        pool: Pool,
        request: SelectionRequest,
        slots: list[int],
        prompts: Mapping[Lane, Prompt],
        settings: SelectionSettings,
    ) -> None:
        self.request = request
        self.slots = slots
        self.settings = settings
        self._pool = pool
        self._prompts = prompts

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
        return [self._pool.load.requests[slot] for slot in self.slots]

    @property
    def active_prefill_tokens(self) -> list[int]:
        """Active prefill tokens now."""
        return [self._pool.load.prefill_tokens[slot] for slot in self.slots]

    @property
    def active_decode_blocks(self) -> list[int]:
        """Active blocks now."""
        return [self._pool.load.decode_blocks[slot] for slot in self.slots]

    @cached_property
    def device_blocks(self) -> Sequence[int]:
        """Leading blocks of the prompt on the device, confirmed or predicted."""
        return self._by_lane(lambda lane, slots: self._spread(lane, slots, self._prompts[lane].overlaps.device()))

    @cached_property
    def effective_blocks(self) -> Sequence[float]:
        """Overlap as the cost counts it: slower tiers weighted, 0 where the overlap score weight is 0."""
        if not self.settings.overlap_score_weight:
            return [0] * len(self.slots)
        if not any(prompt.overlaps.slower_tiers for prompt in self._prompts.values()):
            return self.device_blocks
        tiers = self.settings.tier_weights
        return self._by_lane(
            lambda lane, slots: self._spread(
                lane, slots, self._prompts[lane].overlaps.effective(tiers.host, tiers.disk)
            )
        )

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
        if not self.request.charge_prefill:
            return self.active_prefill_tokens
        load, isl, effective = self._pool.load, self.request.isl_tokens, self.effective_blocks
        if len(self._prompts) == 1:
            (lane,) = self._prompts
            return cost.prefill_tokens(load, self.slots, effective, isl, lane.block_size)
        by_slot = dict(zip(self.slots, effective, strict=True))
        return self._by_lane(
            lambda lane, slots: cost.prefill_tokens(load, slots, [by_slot[s] for s in slots], isl, lane.block_size)
        )

    @cached_property
    def decode_blocks(self) -> Sequence[int]:
        """Blocks that would be active on each, this request's included."""
        load = self._pool.load

        def of_lane(lane: Lane, slots: Sequence[int]) -> list[int]:
            hashes = self._prompts[lane].block_hashes
            return cost.decode_blocks(load, slots, load.shared(lane, hashes), self.total_blocks(lane))

        return self._by_lane(of_lane)

    @property
    def prefill_blocks(self) -> list[float]:
        """`prefill_tokens` in each worker's own blocks."""
        lane_of = self._pool.lane_of
        return [tokens / lane_of[slot].block_size for slot, tokens in zip(self.slots, self.prefill_tokens, strict=True)]

    @cached_property
    def kv_costs(self) -> Sequence[float]:
        """Cost of `cost.costs`; where block sizes differ, in blocks of the smallest."""
        prefill, decode, weight = self.prefill_tokens, self.decode_blocks, self.settings.overlap_score_weight
        if len(self._prompts) == 1:
            (lane,) = self._prompts
            return cost.costs(prefill, decode, block_size=lane.block_size, overlap_score_weight=weight)
        by_slot = dict(zip(self.slots, zip(prefill, decode, strict=True), strict=True))
        unit = min(lane.block_size for lane in self._prompts)
        return self._by_lane(
            lambda lane, slots: cost.costs(
                [by_slot[slot][0] for slot in slots],
                [by_slot[slot][1] for slot in slots],
                block_size=lane.block_size,
                overlap_score_weight=weight,
                scale=lane.block_size / unit,
            )
        )

    def uncached_tokens(self, index: int) -> int:
        """Prompt tokens to charge one candidate as prefill."""
        if not self.request.charge_prefill:
            return 0
        block_size = self._pool.lane_of[self.slots[index]].block_size
        return max(0, self.request.isl_tokens - int(self.effective_blocks[index] * block_size))

    def of(self, slots: list[int]) -> Candidates:
        """The same question of other workers."""
        return Candidates(self._pool, self.request, slots, self._prompts, self.settings)

    def tiers(self) -> Sequence[TierOverlap]:
        """Overlap of each by tier."""

        def of_lane(lane: Lane, slots: Sequence[int]) -> list[TierOverlap]:
            columns = [self._spread(lane, slots, column) for column in self._prompts[lane].overlaps.by_tier()]
            return [TierOverlap(*row) for row in zip(*columns, strict=True)]

        return self._by_lane(of_lane)

    def total_blocks(self, lane: Lane) -> int:
        """Blocks that the prompt fills or begins on workers of a lane."""
        return -(-self.request.isl_tokens // lane.block_size)

    def prompt(self, lane: Lane) -> Prompt:
        """The prompt as hashed for a lane."""
        return self._prompts[lane]

    def _spread(self, lane: Lane, slots: Sequence[int], column: Sequence[T]) -> list[T]:
        """One column of a lane's overlaps, from its rows to slots; 0 where a slot has no row."""
        if not column:
            return [0] * len(slots)  # type: ignore[list-item]  # T is a number
        rows = dict(zip(map(self._pool.slot_of.get, self._prompts[lane].overlaps.ranks()), column, strict=False))
        get = rows.get
        return [get(slot, 0) for slot in slots]  # type: ignore[misc]

    def _by_lane(self, column: Callable[[Lane, Sequence[int]], Sequence[T]]) -> Sequence[T]:
        """Computes a column lane by lane and puts it in the candidates' order."""
        if len(self._prompts) == 1:
            return column(next(iter(self._prompts)), self.slots)
        wanted = set(self.slots)
        found: dict[int, T] = {}
        for lane, members in self._pool.lanes.items():
            slots = [slot for slot in members if slot in wanted]
            found.update(zip(slots, column(lane, slots), strict=True))
        return [found[slot] for slot in self.slots]
