"""What a gateway believes of the caches where it has no events: what it routed itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvscout_lab.simulation.index import leading


class RoutedPrefixes:
    """Nodes of the prompts that one gateway sent to each worker.

    Args:
        workers: Number of workers.
        capacity: Nodes of a worker, of which the least recently used go, last blocks first, as in an engine; 0 = none
            ever goes: an unbounded tree.
    """

    def __init__(self, workers: int, capacity: int) -> None:
        self._capacity = capacity
        self._everyone = (1 << workers) - 1
        self._holders: dict[int, int] = {}
        self._used: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(workers)]
        """The least recently used first; empty in an unbounded tree."""

    def routed(self, worker: int, nodes: Iterable[int]) -> None:
        """Take a prompt that goes to a worker."""
        holders, bit, used = self._holders, 1 << worker, self._used[worker]
        nodes = list(nodes)
        for node in nodes:
            holders[node] = holders.get(node, 0) | bit
        if not self._capacity:
            return
        for node in reversed(nodes):
            used[node] = None
            used.move_to_end(node)
        while len(used) > self._capacity:
            node, _ = used.popitem(last=False)
            left = holders[node] & ~bit
            if left:
                holders[node] = left
            else:
                del holders[node]

    def overlaps(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return leading nodes that each worker is believed to hold; workers without any are left out."""
        return leading(nodes, self._holders, self._everyone)

    def clear(self) -> None:
        """Forget everything: the gateway begins anew."""
        self._holders.clear()
        for used in self._used:
            used.clear()
