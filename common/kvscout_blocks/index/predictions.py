"""Blocks that a worker probably holds, until they expire: routed prompts, and history after a loss.

::

    heap   (expiry, -depth, ...)  soonest first, deeper blocks before their parents
    truth  holdings.predictions   node → (expiry, serial)

Refreshing a prediction moves its expiry without touching the heap: when the old entry surfaces it is
pushed again with the new time. So the heap has one live entry a prediction, told by its serial, and stale
ones only where predictions were cancelled. When these prevail a new heap is begun, and what is live of the old one
goes over to it little by little, as whatever concerns many predictions is done in slices.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count

from kvscout_blocks.index.block_index import SLICE
from kvscout_blocks.index.holdings import Holdings, Prediction
from kvscout_blocks.index.prefix_tree import Node, PrefixTree

_Entry = tuple[float, int, int, Holdings, Node]

_STALE_SLACK = 1024


class Predictions:
    """The predictions of all workers of one index.

    Args:
        tree: The index's tree; a prediction keeps its node alive and sets the worker's bit.
        max_blocks: (block, worker) pairs kept; more are pruned.
        prune_ratio: Share of `max_blocks` that pruning leaves.
    """

    def __init__(self, tree: PrefixTree, *, max_blocks: int, prune_ratio: float) -> None:
        self._tree = tree
        self._max_blocks = max_blocks
        self._keep = int(max_blocks * prune_ratio)
        self._heap: list[_Entry] = []
        self._old: list[_Entry] = []
        """The heap before it, as far as it did not go over yet."""
        self._pruning = False
        """There were more than may be, and still are more than pruning leaves."""
        self._serial = count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, holdings: Holdings, nodes: Iterable[Node], expiry: float) -> int:
        """Predicts nodes for a worker or refreshes them; how many were not predicted before."""
        added = 0
        for node in nodes:
            before = holdings.predictions.get(node)
            if before is not None:
                holdings.predictions[node] = Prediction(max(before.expiry, expiry), before.serial)
                continue
            serial = next(self._serial)
            holdings.predictions[node] = Prediction(expiry, serial)
            self._tree.acquire(node)
            self._tree.set_predicted(node, holdings.bit, True)
            heapq.heappush(self._heap, (expiry, -node.depth, serial, holdings, node))
            added += 1
        self._size += added
        self._prune(added + SLICE)
        return added

    def cancel(self, holdings: Holdings, node: Node) -> None:
        """Ends a prediction, if there is one, because an event told the truth about its block."""
        if holdings.predictions.pop(node, None) is None:
            return
        self._tree.set_predicted(node, holdings.bit, False)
        self._tree.release(node)
        self._size -= 1
        if not self._old and len(self._heap) > 2 * self._size + _STALE_SLACK:
            self._heap, self._old = [], self._heap

    def forget(self, holdings: Holdings) -> None:
        """Stops counting those of a worker that is no longer visible; draining it frees their nodes."""
        self._size -= len(holdings.predictions)

    def expire(self, now: float, budget: int) -> bool:
        """Ends predictions whose time has come, at most so many; whether there may be more."""
        while budget > 0 and (heap := self._soonest()) and heap[0][0] <= now:
            self._pop(heap)
            budget -= 1
        for _ in range(min(budget, len(self._old))):
            entry = heapq.heappop(self._old)
            if _is_live(entry):
                heapq.heappush(self._heap, entry)
        self._prune(budget)
        return budget <= 0 or self._pruning or bool(self._old)

    def _prune(self, budget: int) -> None:
        """Above the maximum ends those that end soonest, until the share that pruning leaves, but at most so many."""
        self._pruning = self._size > self._max_blocks or (self._pruning and self._size > self._keep)
        while self._pruning and budget > 0 and (heap := self._soonest()):
            self._pop(heap)
            budget -= 1
            self._pruning = self._size > self._keep

    def _soonest(self) -> list[_Entry]:
        """The heap whose top comes first."""
        if not self._heap or not self._old:
            return self._heap or self._old
        return self._old if self._old[0][:3] < self._heap[0][:3] else self._heap

    def _pop(self, heap: list[_Entry]) -> None:
        """Handles the entry on top: ends its prediction, or pushes it again if that was refreshed."""
        entry = heapq.heappop(heap)
        if not _is_live(entry):
            return
        expiry, depth, serial, holdings, node = entry
        refreshed = holdings.predictions[node].expiry
        if refreshed > expiry:
            heapq.heappush(self._heap, (refreshed, depth, serial, holdings, node))
        else:
            self.cancel(holdings, node)


def _is_live(entry: _Entry) -> bool:
    """Whether an entry of the heap still stands for a prediction."""
    _, _, serial, holdings, node = entry
    prediction = holdings.predictions.get(node)
    return holdings.visible and prediction is not None and prediction.serial == serial
