"""Native backend of `active_load`, `prefix_tree` and `cost`, and of the messages of `Lifecycle` streams.

The one module of this package that imports the extension, and does so only where it is used
(`kvscout_common.hashing.native_available`). Lists are made of its columns only where somebody looks at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from kvscout_common.hashing import native_available
from kvscout_scheduler.costs.choose import RankedCosts
from kvscout_scheduler.costs.cost import ScoreInputs
from kvscout_scheduler.costs.targets import StepTimes, Times
from kvscout_scheduler.costs.time_cost import TimeCostInputs
from kvscout_scheduler.load.active_load import ActiveLoad, Cheapest, Draw, ReferenceLoad, SlotLoad
from kvscout_scheduler.values.overlaps import NO_OVERLAPS, AnyOverlaps, PackedOverlaps
from kvscout_scheduler.values.slot_sets import packed

if TYPE_CHECKING or native_available():
    import kvscout_native
    from kvscout_native import (
        lifecycle_operations,
        number_result,
        select_request,
        select_response,
        select_result,
    )

__all__ = [
    "NativeLoad",
    "lifecycle_operations",
    "make_load",
    "number_result",
    "select_request",
    "select_response",
    "select_result",
]


def make_load(*, track_blocks: bool = True) -> ActiveLoad:
    """Return an idle pool: native where the extension is built and not switched off, else the reference.

    Args:
        track_blocks: False: requests occupy no blocks (prefill pools, --no-track-active-blocks).
    """
    return (NativeLoad if native_available() else ReferenceLoad)(track_blocks=track_blocks)


class NativeLoad:
    """See `ActiveLoad`; a column is made anew each time."""

    def __init__(self, *, track_blocks: bool = True) -> None:
        self.track_blocks = track_blocks
        self._core = core = kvscout_native.ActiveLoad(track_blocks)
        self.ensure_slot = core.ensure_slot
        self.limit = core.limit
        self.add = core.add
        self.complete_prefill = core.complete_prefill
        self.add_private = core.add_private
        self.remove = core.remove
        self.shared = core.shared
        self._score, self._cheapest = core.score, core.cheapest
        self._arrangement: tuple[Mapping[tuple[str, int], int], Sequence[int]] | None = None
        """Last one that the extension does not have yet: a fleet registers worker by worker."""

    @property
    def requests(self) -> list[int]:
        return self._core.requests

    @property
    def prefill_tokens(self) -> list[int]:
        return self._core.prefill_tokens

    @property
    def decode_blocks(self) -> list[int]:
        return self._core.decode_blocks

    def at(self, slot: int) -> SlotLoad:
        return SlotLoad(*self._core.at(slot))

    def busy(self) -> int:
        return int.from_bytes(self._core.busy(), "little")

    def full(self) -> int:
        return int.from_bytes(self._core.full(), "little")

    def arrange(self, slot_of: Mapping[tuple[str, int], int], order: Sequence[int]) -> None:
        self._arrangement = slot_of, order

    def _arrange(self, slot_of: Mapping[tuple[str, int], int], order: Sequence[int]) -> None:
        ranks = {slot: rank for rank, slot in slot_of.items()}
        self._core.arrange([(*ranks[slot], slot) for slot in order])
        self._arrangement = None

    def score(self, question: ScoreInputs, overlaps: AnyOverlaps, slots: int | None) -> NativeScores:
        if self._arrangement is not None:
            self._arrange(*self._arrangement)
        return NativeScores(self._score(question, _native(overlaps), None if slots is None else packed(slots)))

    def cheapest(
        self,
        question: ScoreInputs,
        overlaps: AnyOverlaps,
        slots: int | None,
        times: TimeCostInputs | None,
        home: int,
        draw: Draw,
    ) -> Cheapest:
        if self._arrangement is not None:
            self._arrange(*self._arrangement)
        members = None if slots is None else packed(slots)
        return self._cheapest(question, _native(overlaps), members, times, home, draw)


def _native(overlaps: AnyOverlaps) -> kvscout_native.Overlaps | None:
    if isinstance(overlaps, PackedOverlaps):
        return overlaps.native  # type: ignore[return-value]  # the extension's own
    if overlaps is NO_OVERLAPS or not (overlaps.worker_ids or overlaps.others):
        return None
    tiers = (overlaps.device_blocks, overlaps.host_blocks, overlaps.disk_blocks, overlaps.external_blocks)
    return kvscout_native.Overlaps(
        overlaps.worker_ids, overlaps.dp_ranks, tiers, overlaps.predicted_blocks, overlaps.others
    )


class NativeScores:
    """See `Scores`; a column is made anew each time."""

    __slots__ = ("_core",)

    def __init__(self, core: kvscout_native.Scores) -> None:
        self._core = core

    def overlap(self, index: int) -> tuple[int, float]:
        return self._core.overlap(index)

    def slot(self, index: int) -> int:
        return self._core.slot(index)

    @property
    def device_blocks(self) -> Sequence[int]:
        return self._core.device_blocks

    @property
    def effective_blocks(self) -> Sequence[float]:
        return self._core.effective_blocks

    @property
    def cached_tokens(self) -> Sequence[float]:
        return self._core.cached_tokens

    @property
    def prefill_tokens(self) -> Sequence[float]:
        return self._core.prefill_tokens

    @property
    def decode_blocks(self) -> Sequence[int]:
        return self._core.decode_blocks

    @property
    def costs(self) -> NativeCosts:
        return NativeCosts(self._core.costs())

    def seconds(self, question: TimeCostInputs) -> NativeCosts:
        return NativeCosts(self._core.seconds(question))

    def response_times(self, question: TimeCostInputs, steps: StepTimes) -> Sequence[Times]:
        return self._core.response_times(question, *steps)


class NativeCosts(RankedCosts):
    """Costs that stay native unless somebody looks at more than a few."""

    __slots__ = ("_core",)

    def __init__(self, core: kvscout_native.Costs) -> None:
        self._core = core

    def least(self) -> Sequence[int]:
        return self._core.least()

    def draw(self, temperature: float, uniform: float) -> int:
        return self._core.draw(temperature, uniform)

    def __len__(self) -> int:
        return len(self._core)

    def __iter__(self) -> Iterator[float]:
        return iter(self._core.values)

    @overload
    def __getitem__(self, index: int) -> float: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, int):
            return self._core.at(index if index >= 0 else len(self._core) + index)
        return self._core.values[index]
