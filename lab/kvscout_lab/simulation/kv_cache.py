"""The KV blocks of one worker: what requests reference, and what is still there of earlier ones.

::

    capacity = private (tails, unshared)  +  referenced nodes  +  idle nodes (least recently used first)  +  free

A *node* is a block as a whole prefix: a number from 1 up that stands for its tokens and all before them. What nobody
references stays until room is needed; a request's blocks leave from its last one on, as in vLLM.

With an offload tier, what is evicted goes there, least recently used first again, and is copied back when a prompt
wants it.

Invariant: private + len(referenced) + len(idle) ≤ capacity, and no node is both referenced and idle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class KvCache:
    """See the module.

    Args:
        capacity: Blocks.
        offload_capacity: Blocks of the offload tier; 0 = there is none.
    """

    def __init__(self, capacity: int, offload_capacity: int = 0) -> None:
        self.capacity = capacity
        self.offload_capacity = offload_capacity
        self.private = 0
        """Blocks that only their request knows."""
        self.references: dict[int, int] = {}
        """Requests by node."""
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.offloaded: OrderedDict[int, None] = OrderedDict()
        """In the offload tier, the least recently used first; some are on the device as well."""
        self._events: list[int] = []
        self._tier_events: list[int] = []

    @property
    def used(self) -> int:
        """Return blocks that requests hold."""
        return self.private + len(self.references)

    def hit(self, nodes: Sequence[int]) -> int:
        """Return the number of leading nodes that are cached."""
        references, idle = self.references, self.idle
        for count, node in enumerate(nodes):
            if node not in references and node not in idle:
                return count
        return len(nodes)

    def offload_hit(self, nodes: Sequence[int]) -> int:
        """Return the number of leading nodes that the offload tier has; they count as used now."""
        for count, node in enumerate(nodes):
            if node not in self.offloaded:
                return count
            self.offloaded.move_to_end(node)
        return len(nodes)

    def fits(self, hit: Sequence[int], blocks: int) -> bool:
        """Return whether a request could have `blocks` blocks beside those that it hits."""
        idle = self.idle
        revived = sum(1 for node in hit if node in idle)
        return self.used + revived + blocks <= self.capacity

    def acquire(self, hit: Iterable[int], blocks: int) -> None:
        """Assign the nodes that a request hits, and private blocks; `fits` has said that there is room."""
        references, idle = self.references, self.idle
        for node in hit:
            if node in idle:
                del idle[node]
                references[node] = 1
            else:
                references[node] += 1
        self.private += blocks
        excess = self.used + len(idle) - self.capacity
        for _ in range(excess):
            node, _ = idle.popitem(last=False)
            self._events.append(-node)
            if self.offload_capacity:
                self._offload(node)

    def _offload(self, node: int) -> None:
        self.offloaded[node] = None
        self.offloaded.move_to_end(node)
        if len(self.offloaded) > self.offload_capacity:
            oldest, _ = self.offloaded.popitem(last=False)
            if oldest not in self.references and oldest not in self.idle:
                self._tier_events.append(-oldest)

    def grow(self) -> bool:
        """Assign one more private block to a request; False = there is no room."""
        if self.used >= self.capacity:
            return False
        self.acquire((), 1)
        return True

    def register(self, node: int) -> bool:
        """Make a private block known as a node; False = there is a copy already, this one stays private."""
        if node in self.references or node in self.idle:
            return False
        self.private -= 1
        self.references[node] = 1
        self._events.append(node)
        if self.offload_capacity and node not in self.offloaded:
            self._tier_events.append(node)
        return True

    def release(self, nodes: Sequence[int], private: int) -> None:
        """Take back what a request held."""
        references, idle = self.references, self.idle
        for node in reversed(nodes):
            if references[node] == 1:
                del references[node]
                idle[node] = None
            else:
                references[node] -= 1
        self.private -= private

    def take_events(self) -> list[int]:
        """Return the events since the last call, in order: a stored node as it is, a removed one negated."""
        events = self._events
        if events:
            self._events = []
        return events

    def take_tier_events(self) -> list[int]:
        """Return the same of device and offload tier together; without one there are none."""
        events = self._tier_events
        if events:
            self._tier_events = []
        return events

    def check_invariants(self) -> None:
        """Raise AssertionError if the structure contradicts itself."""
        assert self.private >= 0, "private blocks are not negative"
        assert len(self.offloaded) <= self.offload_capacity, "offloaded blocks fit"
        assert self.used + len(self.idle) <= self.capacity, "blocks fit"
        assert not self.idle.keys() & self.references.keys(), "nothing is referenced and idle"
        assert all(count > 0 for count in self.references.values()), "references are counted"
