"""Work on a whole rank of the reference index, in slices: demotions, cuts and loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_blocks.index import state_dump
from kvscout_blocks.index.block_index import SLICE
from kvscout_blocks.index.holdings import Holdings
from kvscout_blocks.index.slices import at_once
from kvscout_common.errors import KvscoutError

if TYPE_CHECKING:
    from kvscout_blocks.index.reference import ReferenceIndex


class ReferenceDemotion:
    """A `slices.Work`: `BlockIndex.demotion`."""

    detached = False

    def __init__(self, holdings: Holdings | None, demote: Callable[[Holdings, int], int]) -> None:
        self.added = 0
        """Blocks that are predicted and were not before."""
        self._holdings = holdings
        self._demote = demote

    def step(self) -> bool:
        """See `Work.step`."""
        if self._holdings is None or not self._holdings.visible or self._holdings.demoting_until is None:
            return False
        self.added += self._demote(self._holdings, SLICE)
        return True


class ReferenceCut:
    """See `index.Cut`."""

    detached = False

    def __init__(self, head: WorkerDump, holdings: Holdings) -> None:
        self._holdings = holdings
        self._slices = state_dump.dump_holdings(holdings, head)
        self._dump: WorkerDump | None = None
        holdings.cuts.append(self)

    def step(self) -> bool:
        """See `Work.step`."""
        if self not in self._holdings.cuts:
            return False
        try:
            next(self._slices)
        except StopIteration as end:
            self._dump = end.value
            self._holdings.cuts.remove(self)
            return False
        return True

    def dump(self) -> WorkerDump | None:
        """See `Cut.dump`."""
        at_once(self)
        return self._dump


class ReferenceLoading:
    """See `index.Loading`."""

    detached = False

    def __init__(self, index: ReferenceIndex, dump: WorkerDump) -> None:
        self._index = index
        self._dump = dump
        self._filled: list[Holdings] = []
        self._slices = index.fill(dump, self._filled)
        self._content: object = None

    def step(self) -> bool:
        """See `Work.step`."""
        try:
            next(self._slices)
        except StopIteration as end:
            self._content = end.value or self._content
            return False
        except KvscoutError:
            self.abandon()
            raise
        return True

    def commit(self) -> bool:
        """See `Loading.commit`."""
        done = bool(self._filled) and self._index.replace(self._dump, self._filled[0], self._content)
        if done:
            self._filled.clear()
        self.abandon()
        return done

    def abandon(self) -> None:
        """See `Loading.abandon`."""
        self._slices.close()
        while self._filled:
            self._index.drop(self._filled.pop())
