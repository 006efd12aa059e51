"""Blocks that a worker probably holds, until they expire: routed prompts, and history after a loss.

::

    heap   (expiry, -depth, ...)  soonest first, deeper blocks before their parents
    truth  holdings.predictions   node → (expiry, serial)

Refreshing a prediction moves its expiry without touching the heap: when the old entry surfaces it is
pushed again with the new time. So the heap has one live entry a prediction, told by its serial, and stale
ones only where predictions were cancelled; it is rebuilt when these prevail.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count

from kvscout_blocks.holdings import Holdings, Prediction
from kvscout_blocks.prefix_tree import Node, PrefixTree

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
        if self._size > self._max_blocks:
            while self._size > self._keep and self._heap:
                self._pop()
        return added

    def cancel(self, holdings: Holdings, node: Node) -> None:
        """Ends a prediction, if there is one, because an event told the truth about its block."""
        if holdings.predictions.pop(node, None) is None:
            return
        self._tree.set_predicted(node, holdings.bit, False)
        self._tree.release(node)
        self._size -= 1
        if len(self._heap) > 2 * self._size + _STALE_SLACK:
            self._heap = [entry for entry in self._heap if _is_live(entry)]
            heapq.heapify(self._heap)

    def forget(self, holdings: Holdings) -> None:
        """Stops counting those of a worker that is no longer visible; draining it frees their nodes."""
        self._size -= len(holdings.predictions)

    def expire(self, now: float) -> None:
        """Ends all predictions whose time has come."""
        while self._heap and self._heap[0][0] <= now:
            self._pop()

    def _pop(self) -> None:
        """Handles the entry on top: ends its prediction, or pushes it again if that was refreshed."""
        entry = heapq.heappop(self._heap)
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
