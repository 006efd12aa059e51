"""The slots of the reference index's tree: whose content sits in each, and which of them queries see.

Dropping a content takes its slot's bit out of `live`, which empties the worker for all readers at once; the slot is
drained in slices, then used again. A load fills a slot whose bit is not in `live` before it takes the other's place.
"""

from __future__ import annotations

from collections import deque

from kvscout_blocks.index.holdings import Holdings
from kvscout_blocks.index.predictions import Predictions
from kvscout_blocks.index.prefix_tree import PrefixTree
from kvscout_common.worker import WorkerRank


class Slots:
    """The slots of one tree.

    Args:
        tree: Whose masks have a bit for each slot.
        predictions: Of all workers.
    """

    def __init__(self, tree: PrefixTree, predictions: Predictions) -> None:
        self._tree = tree
        self._predictions = predictions
        self._owners: list[WorkerRank | None] = []
        """Slot → worker; None where the slot is free or drained."""
        self._free: list[int] = []
        self.live = 0
        """Slots that queries see."""
        self.dropped: deque[Holdings] = deque()
        """What is to be drained, the oldest first."""

    def owner(self, slot: int) -> WorkerRank | None:
        """Whose content a slot has."""
        return self._owners[slot]

    def take(self, worker: WorkerRank | None) -> Holdings:
        """Empty holdings of a worker; of None, such as no query sees."""
        if self._free:
            slot = self._free.pop()
            self._owners[slot] = worker
        else:
            slot = len(self._owners)
            self._owners.append(worker)
        holdings = Holdings(self._tree, slot)
        if worker is not None:
            self.live |= holdings.bit
        return holdings

    def show(self, holdings: Holdings, worker: WorkerRank) -> None:
        """Makes what no query saw a worker's."""
        self._owners[holdings.slot] = worker
        self.live |= holdings.bit

    def drop(self, holdings: Holdings) -> None:
        """Hides a content at once, and has it drained."""
        self.live &= ~holdings.bit
        self._owners[holdings.slot] = None
        self._predictions.forget(holdings)
        holdings.visible = False
        holdings.cuts.clear()
        self.dropped.append(holdings)

    def drain(self, budget: int) -> int:
        """Frees content that was dropped, at most `budget` blocks; how many it freed."""
        left = budget
        while self.dropped and left > 0:
            holdings = self.dropped[0]
            left -= holdings.drain(left)
            if holdings.drained:
                self.dropped.popleft()
                self._free.append(holdings.slot)
        return budget - left
