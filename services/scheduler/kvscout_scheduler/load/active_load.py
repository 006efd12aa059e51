"""Active load of one pool: numbers a worker slot, and the prefixes that its requests share.

A *slot* is a small integer that stands for a worker rank, so that every quantity is a column. This module,
`prefix_tree` and `cost` see slots, packed hashes and numbers, no request and no clock: they are the reference of the
native backend (`native`, native/src/load), which answers the same.

Invariants
1. `decode_blocks[slot]` = distinct active blocks of the slot's allocations + their private blocks.
2. `prefill_tokens[slot]` = Σ prefill tokens of its allocations in the prefill phase.
3. `requests[slot]` = its allocations. Without allocations all columns are exactly 0; none is ever negative.

An allocation costs O(runs of its path), `prefix_tree`. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvscout_scheduler.costs.choose import least_of
from kvscout_scheduler.costs.cost import BlockFormat, ReferenceScores, ScoreInputs
from kvscout_scheduler.costs.targets import StepTimes, Times
from kvscout_scheduler.costs.time_cost import TimeCostInputs
from kvscout_scheduler.load.prefix_tree import Node, PrefixTree
from kvscout_scheduler.values.overlaps import AnyOverlaps
from kvscout_scheduler.values.slot_sets import in_order, slot_set
from kvscout_scheduler.values.thresholds import NO_LIMIT


class Allocation(Protocol):
    """Load of one request; opaque but for its slot, valid until removed."""

    @property
    def slot(self) -> int:
        """Return its slot."""


class SlotLoad(NamedTuple):
    """Load of one slot."""

    requests: int
    prefill_tokens: int
    decode_blocks: int


class Limits(NamedTuple):
    """The most that a worker may have to do; above, it is busy, or requests wait for it."""

    prefill_tokens: int = NO_LIMIT
    """With more it is busy."""
    decode_blocks: int = NO_LIMIT
    """With more it is busy; -1 = it is."""
    queued_prefill_tokens: int = NO_LIMIT
    """With more it has no room for requests that wait."""


class Scores(Protocol):
    """The columns of one decision, one entry a requested slot; see `cost.ReferenceScores`."""

    @property
    def device_blocks(self) -> Sequence[int]: ...

    @property
    def effective_blocks(self) -> Sequence[float]: ...

    @property
    def cached_tokens(self) -> Sequence[float]: ...

    @property
    def prefill_tokens(self) -> Sequence[float]: ...

    @property
    def decode_blocks(self) -> Sequence[int]: ...

    @property
    def costs(self) -> Sequence[float]: ...

    def seconds(self, question: TimeCostInputs) -> Sequence[float]: ...

    def response_times(self, question: TimeCostInputs, steps: StepTimes) -> Sequence[Times]: ...

    def overlap(self, index: int) -> tuple[int, float]: ...

    def slot(self, index: int) -> int: ...


Draw: TypeAlias = Callable[[int], int]
"""Returns a number below another one."""
Cheapest: TypeAlias = tuple[int, int, float, float, float]
"""Slot, leading blocks of the prompt on its device, effective ones, the cost, and what the cheapest of those with most
blocks on the device would cost more."""


class ActiveLoad(Protocol):
    """Load of one pool."""

    track_blocks: bool
    """False: requests occupy no blocks."""

    @property
    def requests(self) -> Sequence[int]:
        """Return active requests by slot; a column may be made anew each time."""

    @property
    def prefill_tokens(self) -> Sequence[int]:
        """Return active prefill tokens by slot."""

    @property
    def decode_blocks(self) -> Sequence[int]:
        """Return active blocks by slot."""

    def at(self, slot: int) -> SlotLoad:
        """Return one row of them."""

    def ensure_slot(self, slot: int) -> None:
        """Make room for a slot; new ones are idle."""

    def limit(self, slot: int, limits: Limits) -> None:
        """Set the limits of a slot; new ones have none."""

    def busy(self) -> int:
        """Return the set of slots that have more to do than they may; see `slot_sets`."""

    def full(self) -> int:
        """Return the set of slots without room for requests that wait: busy ones, and those with much prefill."""

    def arrange(self, slot_of: Mapping[tuple[str, int], int], order: Sequence[int]) -> None:
        """Set the worker ranks of slots.

        Args:
            slot_of: Slots in use, by (worker_id, dp_rank).
            order: The same slots, by rank.
        """

    def add(
        self, slot: int, block_format: BlockFormat, hashes: bytes, *, private_blocks: int = 0, prefill_tokens: int = 0
    ) -> Allocation:
        """Add a request to a slot.

        Args:
            slot: The worker.
            block_format: Format of its block hashes.
            hashes: Packed local hashes of the blocks that other requests can share.
            private_blocks: Further blocks: the partial tail, blocks that were not hashed.
            prefill_tokens: Uncached prompt tokens.
        """

    def complete_prefill(self, allocation: Any) -> None:
        """End the prefill phase of a request; a second time changes nothing."""

    def add_private(self, allocation: Any, blocks: int) -> None:
        """Add blocks to a request that no other request shares."""

    def remove(self, allocation: Any) -> None:
        """Release all that a request occupies; it must not be used again."""

    def shared(self, block_format: BlockFormat, hashes: bytes) -> dict[int, int]:
        """Return leading blocks of a prompt that are active on each slot; slots with none are left out."""

    def score(self, question: ScoreInputs, overlaps: AnyOverlaps, slots: int | None) -> Scores:
        """Return the scores of workers for one request.

        Args:
            question: The prompt.
            overlaps: Where it is cached; checked.
            slots: Set of workers of its block format, in which those that are not arranged do not count; None = all
            that are arranged. Columns are by rank.
        """

    def cheapest(
        self,
        question: ScoreInputs,
        overlaps: AnyOverlaps,
        slots: int | None,
        times: TimeCostInputs | None,
        home: int,
        draw: Draw,
    ) -> Cheapest:
        """Return the worker of least cost.

        Args:
            question: As of `score`.
            overlaps: As of `score`.
            slots: As of `score`.
            times: Costs are in seconds, by these (`time_cost`); None = in blocks (`cost`).
            home: The slot that is taken where several cost as little; -1 = none.
            draw: Where that is none of them, it chooses one of their number, by rank.
        """


MakeLoad = Callable[..., ActiveLoad]
"""Makes the load of an idle pool in one of the backends; takes `track_blocks`."""


def further_cost(device_blocks: Sequence[int], costs: Sequence[float], index: int) -> float:
    """Return what the cheapest of those with most blocks on the device would cost more than one of the candidates."""
    most = max(device_blocks)
    return min(cost for blocks, cost in zip(device_blocks, costs, strict=True) if blocks == most) - costs[index]


@dataclass(slots=True, eq=False)
class ReferenceAllocation:
    """See `Allocation`."""

    slot: int
    block_format: BlockFormat
    node: Node | None
    private_blocks: int
    prefill_tokens: int


class ReferenceLoad:
    """See `ActiveLoad`.

    Args:
        track_blocks: False: requests occupy no blocks (prefill pools, --no-track-active-blocks).
    """

    def __init__(self, *, track_blocks: bool = True) -> None:
        self.requests: list[int] = []
        self.prefill_tokens: list[int] = []
        self.decode_blocks: list[int] = []
        self.track_blocks = track_blocks
        self._limits: list[Limits] = []
        self._trees: dict[BlockFormat, PrefixTree] = {}
        self._slot_of: Mapping[tuple[str, int], int] = {}
        self._order: Sequence[int] = ()

    def at(self, slot: int) -> SlotLoad:
        return SlotLoad(self.requests[slot], self.prefill_tokens[slot], self.decode_blocks[slot])

    def arrange(self, slot_of: Mapping[tuple[str, int], int], order: Sequence[int]) -> None:
        self._slot_of, self._order = slot_of, order

    def ensure_slot(self, slot: int) -> None:
        missing = slot + 1 - len(self.requests)
        for column in (self.requests, self.prefill_tokens, self.decode_blocks):
            column.extend([0] * missing)
        self._limits.extend([Limits()] * missing)

    def limit(self, slot: int, limits: Limits) -> None:
        self._limits[slot] = limits

    def busy(self) -> int:
        return slot_set(slot for slot, limits in enumerate(self._limits) if self._over(slot, limits))

    def full(self) -> int:
        prefill_tokens = self.prefill_tokens
        return slot_set(
            slot
            for slot, limits in enumerate(self._limits)
            if prefill_tokens[slot] > limits.queued_prefill_tokens or self._over(slot, limits)
        )

    def _over(self, slot: int, limits: Limits) -> bool:
        return self.prefill_tokens[slot] > limits.prefill_tokens or self.decode_blocks[slot] > limits.decode_blocks

    def add(
        self, slot: int, block_format: BlockFormat, hashes: bytes, *, private_blocks: int = 0, prefill_tokens: int = 0
    ) -> ReferenceAllocation:
        node = None
        if self.track_blocks:
            tree = self._trees.get(block_format)
            if tree is None:
                tree = self._trees[block_format] = PrefixTree()
            node, new_blocks = tree.add(hashes, slot)
            self.decode_blocks[slot] += new_blocks + private_blocks
        else:
            private_blocks = 0
        self.requests[slot] += 1
        self.prefill_tokens[slot] += prefill_tokens
        return ReferenceAllocation(slot, block_format, node, private_blocks, prefill_tokens)

    def complete_prefill(self, allocation: ReferenceAllocation) -> None:
        self.prefill_tokens[allocation.slot] -= allocation.prefill_tokens
        allocation.prefill_tokens = 0

    def add_private(self, allocation: ReferenceAllocation, blocks: int) -> None:
        if self.track_blocks:
            allocation.private_blocks += blocks
            self.decode_blocks[allocation.slot] += blocks

    def remove(self, allocation: ReferenceAllocation) -> None:
        slot = allocation.slot
        gone = allocation.private_blocks
        if allocation.node is not None:
            gone += self._trees[allocation.block_format].remove(allocation.node, slot)
            allocation.node = None
        self.decode_blocks[slot] -= gone
        self.prefill_tokens[slot] -= allocation.prefill_tokens
        self.requests[slot] -= 1

    def shared(self, block_format: BlockFormat, hashes: bytes) -> dict[int, int]:
        tree = self._trees.get(block_format)
        return tree.shared(hashes) if tree is not None and self.track_blocks else {}

    def score(self, question: ScoreInputs, overlaps: AnyOverlaps, slots: int | None) -> ReferenceScores:
        return ReferenceScores(
            question,
            self._order if slots is None else in_order(slots, self._order),
            overlaps.plain,
            self._slot_of,
            prefill_tokens=self.prefill_tokens,
            decode_blocks=self.decode_blocks if self.track_blocks else None,
            shared=self.shared(question.block_format, question.hashes),
        )

    def cheapest(
        self,
        question: ScoreInputs,
        overlaps: AnyOverlaps,
        slots: int | None,
        times: TimeCostInputs | None,
        home: int,
        draw: Draw,
    ) -> Cheapest:
        scores = self.score(question, overlaps, slots)
        costs = scores.costs if times is None else scores.seconds(times)
        ties = least_of(costs)
        at_home = [index for index in ties if scores.slot(index) == home]
        index = ties[0] if len(ties) == 1 else at_home[0] if at_home else ties[draw(len(ties))]
        return (
            scores.slot(index),
            *scores.overlap(index),
            costs[index],
            further_cost(scores.device_blocks, costs, index),
        )
