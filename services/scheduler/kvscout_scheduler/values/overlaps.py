"""Overlaps of one prompt with the caches of many workers, in columns, as the indexer answers them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import gt
from typing import Any, Final, NamedTuple, Protocol

from kvscout_common.errors import InvalidArgument


class CommonOverlap(NamedTuple):
    """Overlap of every worker rank that has no row, in blocks, cumulative as the columns are."""

    device: int
    host: int
    disk: int
    external: int
    predicted: int


@dataclass(frozen=True, slots=True)
class Overlaps:
    """One row a worker rank, one column a quantity; ranks without overlap are left out, rows are in no order.

    Tiers are cumulative: `host_blocks` counts leading blocks held on host or device, and so on. An empty column
    equals the faster one before it; an empty `predicted_blocks` equals `device_blocks`, empty `dp_ranks` are all 0.
    """

    worker_ids: Sequence[str] = ()
    dp_ranks: Sequence[int] = ()
    device_blocks: Sequence[int] = ()
    host_blocks: Sequence[int] = ()
    disk_blocks: Sequence[int] = ()
    external_blocks: Sequence[int] = ()
    predicted_blocks: Sequence[int] = ()
    others: CommonOverlap | None = None
    """What each rank without a row has, such as a system prompt that all share; None = nothing."""

    @property
    def plain(self) -> Overlaps:
        """Return itself."""
        return self

    @property
    def rest(self) -> Overlaps:
        """Return what a rank without a row has, as if that were its only row."""
        if self.others is None:
            return _NOTHING
        device, host, disk, external, predicted = self.others
        return Overlaps(("",), (), (device,), (host,), (disk,), (external,), (predicted,))

    @property
    def longest_on_device(self) -> int:
        """Return the most leading blocks that any rank holds on its device."""
        return max((*self.device_blocks, *self.rest.device_blocks))

    def ranks(self) -> Iterator[tuple[str, int]]:
        """Return (worker_id, dp_rank) of each row."""
        return zip(self.worker_ids, self.dp_ranks or repeat(0), strict=False)

    def device(self) -> Sequence[int]:
        """Return leading blocks on the device of each row, confirmed or predicted, whichever reaches further."""
        if self.predicted_blocks:
            return list(map(max, self.device_blocks, self.predicted_blocks))
        return self.device_blocks

    @property
    def slower_tiers(self) -> bool:
        """Return whether anything but the device is known of."""
        others = self.others is not None and self.others.external > self.others.device
        return others or bool(self.host_blocks or self.disk_blocks or self.external_blocks)

    def by_tier(self) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]:
        """Return cumulative columns of device, host, disk and external storage, none below the faster one."""
        device = self.device()
        host = list(map(max, device, self.host_blocks)) if self.host_blocks else device
        disk = list(map(max, host, self.disk_blocks)) if self.disk_blocks else host
        external = list(map(max, disk, self.external_blocks)) if self.external_blocks else disk
        return device, host, disk, external

    def effective(self, host_weight: float, disk_weight: float) -> Sequence[float]:
        """Return weighted overlap of each row: device + host_weight·host_ext + disk_weight·(disk_ext + external_ext).

        Args:
            host_weight: What a block on the host is worth, in device blocks.
            disk_weight: What a block on disk or external storage is worth, in device blocks.
        """
        device, host, _, external = self.by_tier()
        return [
            d + host_weight * (h - d) + disk_weight * (e - h) for d, h, e in zip(device, host, external, strict=True)
        ]

    def validate(self, max_blocks: int) -> None:
        """Check that the columns fit together and stay within the prompt.

        Args:
            max_blocks: Complete blocks of the prompt.

        Raises:
            InvalidArgument: Naming the column.
        """
        self._validate(max_blocks, "overlaps")
        if self.others is not None:
            self.rest._validate(max_blocks, "overlaps.others")

    def _validate(self, max_blocks: int, field: str) -> None:
        rows = len(self.worker_ids)
        if len(self.device_blocks) != rows:
            raise _column(field, "device_blocks", f"has {len(self.device_blocks)} rows, worker_ids has {rows}")
        faster_name, faster = "device_blocks", self.device_blocks
        for name, column in (
            ("host_blocks", self.host_blocks),
            ("disk_blocks", self.disk_blocks),
            ("external_blocks", self.external_blocks),
        ):
            if column:
                self._check_above(field, name, column, faster_name, faster)
                faster_name, faster = name, column
        predicted = self.predicted_blocks
        if predicted:
            self._check_above(field, "predicted_blocks", predicted, "device_blocks", self.device_blocks)
        if self.dp_ranks and len(self.dp_ranks) != rows:
            raise _column(field, "dp_ranks", f"has {len(self.dp_ranks)} rows, worker_ids has {rows}")
        for name, column in ((faster_name, faster), ("predicted_blocks", predicted)):
            if column and max(column) > max_blocks:
                raise _column(field, name, f"{max(column)} blocks overlap, the prompt has {max_blocks}")
        if rows and min(self.device_blocks) < 0:
            raise _column(field, "device_blocks", "must not be negative")

    @staticmethod
    def _check_above(field: str, name: str, column: Sequence[int], faster_name: str, faster: Sequence[int]) -> None:
        if len(column) != len(faster):
            raise _column(field, name, f"has {len(column)} rows, {faster_name} has {len(faster)}")
        if any(map(gt, faster, column)):
            raise _column(field, name, f"is below {faster_name}, though it includes it")


_NOTHING: Final = Overlaps(("",), (), (0,))


def _column(field: str, name: str, message: str) -> InvalidArgument:
    return InvalidArgument(message, field=f"{field}.{name}")


class TierWeights(NamedTuple):
    """Worth of a cached block of each slower tier, in device blocks."""

    host: float = 0.75
    disk: float = 0.25
    """Also for external storage."""


DEFAULT_TIER_WEIGHTS = TierWeights()


class NativeColumns(Protocol):
    """Overlaps in the extension, which do not contradict each other."""

    @property
    def columns(self) -> tuple[Any, ...]:
        """Return the columns of `Overlaps`."""

    @property
    def others(self) -> tuple[int, int, int, int, int] | None:
        """Return the fields of `CommonOverlap`; None = there are only rows."""

    @property
    def longest_on_device(self) -> int:
        """See `Overlaps`."""

    def within(self, blocks: int) -> bool:
        """Return whether no row says more than a prompt has."""


class PackedOverlaps:
    """Overlaps that stay in the extension unless somebody looks at them.

    Args:
        native: The columns there.
    """

    __slots__ = ("_plain", "native")

    def __init__(self, native: NativeColumns) -> None:
        self.native = native
        self._plain: Overlaps | None = None

    @property
    def plain(self) -> Overlaps:
        """Return the same as Python columns."""
        if self._plain is None:
            others = self.native.others
            ids, ranks, device, host, disk, external, predicted = self.native.columns
            self._plain = Overlaps(
                ids, ranks, device, host, disk, external, predicted, CommonOverlap(*others) if others else None
            )
        return self._plain

    @property
    def longest_on_device(self) -> int:
        """See `Overlaps`."""
        return self.native.longest_on_device

    def validate(self, max_blocks: int) -> None:
        """See `Overlaps`."""
        if not self.native.within(max_blocks):
            self.plain.validate(max_blocks)


AnyOverlaps = Overlaps | PackedOverlaps

NO_OVERLAPS = Overlaps()
