"""Cost of a request on each worker of one block format, in blocks.

::

    cached_tokens(w)  = (device + host_weight·host_ext + disk_weight·(disk_ext + external_ext)) · block_size
    prefill_tokens(w) = active_prefill_tokens(w) + max(0, isl - cached_tokens(w))
    prefill_blocks(w) = prefill_tokens(w) / block_size
    decode_blocks(w)  = blocks active on w with this request added (those it shares with active ones count once)
    cost(w)           = overlap_score_weight · prefill_blocks(w) + decode_blocks(w)

Worked example, weight 1: (prefill, decode) = (8, 10), (5, 5), (2, 9) → costs 18, 10, 11 → the second worker.

The formula is that of Dynamo's KV router. Columns in, columns out; the native backend is `native/src/load/score.rs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

from kvscout_scheduler.costs.targets import StepTimes, Times, response_times
from kvscout_scheduler.costs.time_cost import TimeCostInputs, time_costs
from kvscout_scheduler.values.overlaps import DEFAULT_TIER_WEIGHTS, Overlaps, TierWeights

T = TypeVar("T", int, float)


class BlockFormat(NamedTuple):
    """Format of block hashes: those of one format are comparable."""

    block_size: int
    eagle: bool


class ScoreInputs(NamedTuple):
    """Request for scores: one prompt, as hashed for the workers of a block format."""

    block_format: BlockFormat
    hashes: bytes
    """Packed local hashes."""
    isl_tokens: int
    overlap_score_weight: float = 1.0
    """Weight of prefill against decode; 0 = decode load alone, prefix caches are ignored."""
    tiers: TierWeights = DEFAULT_TIER_WEIGHTS
    charge_prefill: bool = True
    """False: the prompt is computed by another worker."""
    scale: float = 1.0
    """Size of these blocks in units of the blocks that costs are compared in, where block sizes differ."""

    @property
    def blocks(self) -> int:
        """Return blocks that the prompt fills or begins."""
        return -(-self.isl_tokens // self.block_format.block_size)


class ReferenceScores:
    """Scores of workers of one block format, one entry a slot; a column is computed when it is looked at.

    Args:
        question: The prompt.
        slots: The workers.
        overlaps: Where it is cached.
        slot_of: Slots by (worker_id, dp_rank).
        prefill_tokens: Active ones by slot.
        decode_blocks: Active ones by slot; None: blocks are not counted.
        shared: Leading blocks of the prompt that are active on a slot; those without are left out.
    """

    def __init__(
        self,
        question: ScoreInputs,
        slots: Sequence[int],
        overlaps: Overlaps,
        slot_of: Mapping[tuple[str, int], int],
        *,
        prefill_tokens: Sequence[int],
        decode_blocks: Sequence[int] | None,
        shared: Mapping[int, int],
    ) -> None:
        self._question = question
        self._slots = slots
        self._overlaps = overlaps
        self._slot_of = slot_of
        self._prefill_tokens = prefill_tokens
        self._decode_blocks = decode_blocks
        self._shared = shared

    @cached_property
    def device_blocks(self) -> Sequence[int]:
        """Return leading blocks of the prompt on the device, confirmed or predicted."""
        return spread(self._overlaps, Overlaps.device, self._slots, self._slot_of)

    @cached_property
    def effective_blocks(self) -> Sequence[float]:
        """Return the overlap as the cost counts it: slower tiers weighted, 0 where the overlap score weight is 0."""
        if not self._question.overlap_score_weight:
            return [0.0] * len(self._slots)
        if not self._overlaps.slower_tiers:
            return self.device_blocks
        tiers = self._question.tiers
        return spread(self._overlaps, lambda rows: rows.effective(tiers.host, tiers.disk), self._slots, self._slot_of)

    @cached_property
    def cached_tokens(self) -> Sequence[float]:
        """Return prompt tokens that each has, slower tiers weighted; at most the prompt."""
        isl, block_size = self._question.isl_tokens, self._question.block_format.block_size
        return [min(isl, blocks * block_size) for blocks in self.effective_blocks]

    @cached_property
    def prefill_tokens(self) -> Sequence[float]:
        """Return prompt tokens that each worker has to compute, this request's included."""
        active, isl = self._prefill_tokens, self._question.isl_tokens
        if not self._question.charge_prefill:
            return [active[slot] for slot in self._slots]
        return [active[slot] + (isl - cached) for slot, cached in zip(self._slots, self.cached_tokens, strict=True)]

    @cached_property
    def decode_blocks(self) -> Sequence[int]:
        """Return blocks active on each worker with this request added."""
        active, shared, blocks = self._decode_blocks, self._shared, self._question.blocks
        if active is None:
            return [0] * len(self._slots)
        return [active[slot] + blocks - shared.get(slot, 0) for slot in self._slots]

    @cached_property
    def costs(self) -> Sequence[float]:
        """Return the cost of each worker."""
        _, _, _, weight, _, _, scale = self._question
        if not weight:
            return [scale * blocks for blocks in self.decode_blocks]
        block_size = self._question.block_format.block_size
        return [
            scale * (weight * (tokens / block_size) + blocks)
            for tokens, blocks in zip(self.prefill_tokens, self.decode_blocks, strict=True)
        ]

    def seconds(self, question: TimeCostInputs) -> Sequence[float]:
        """Return the cost of each worker in seconds, `time_cost`."""
        return time_costs(question, self._question.isl_tokens, self._slots, self.cached_tokens)

    def response_times(self, question: TimeCostInputs, steps: StepTimes) -> Sequence[Times]:
        """Return the response times to expect on each worker, `targets`."""
        return response_times(question, steps, self._question.isl_tokens, self._slots, self.cached_tokens)

    def overlap(self, index: int) -> tuple[int, float]:
        """Return `device_blocks` and `effective_blocks` of one worker."""
        return self.device_blocks[index], self.effective_blocks[index]

    def slot(self, index: int) -> int:
        """Return the slot of one worker."""
        return self._slots[index]


def spread(
    overlaps: Overlaps,
    column: Callable[[Overlaps], Sequence[T]],
    slots: Sequence[int],
    slot_of: Mapping[tuple[str, int], int],
) -> list[T]:
    """Return a column of overlaps, from its rows to slots; where a slot has no row, what the others have."""
    (rest,) = column(overlaps.rest)
    rows = dict(zip(map(slot_of.get, overlaps.ranks()), column(overlaps), strict=False))
    get = rows.get
    return [get(slot, rest) for slot in slots]
