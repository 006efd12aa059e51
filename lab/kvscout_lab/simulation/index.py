"""The index of the workers' caches as routers see it: events arrive late."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from random import Random


class LateIndex:
    """Nodes that each worker holds, by events that arrive late.

    One bit a worker and node: a prompt's holders are an intersection as long as it lasts.

    Args:
        workers: Number of workers.
        delay: From an event until it counts, in the simulation's time.
        lost: Share of what `publish` takes that never counts.
        seed: Seed of the losses.
    """

    def __init__(self, workers: int, delay: int, lost: float = 0.0, seed: int = 0) -> None:
        self._delay = delay
        self._lost = lost
        self._draw = Random(f"lost events {seed}").random
        self._everyone = (1 << workers) - 1
        self._holders: dict[int, int] = {}
        self._late: deque[tuple[int, int, Sequence[int]]] = deque()

    def publish(self, worker: int, events: Sequence[int], now: int) -> None:
        """Take a worker's events, in order; a removed node is negated. Calls come in order of time."""
        if self._lost and self._draw() < self._lost:
            return
        self._late.append((now + self._delay, 1 << worker, events))

    def overlaps(self, nodes: Iterable[int], now: int) -> dict[int, int]:
        """Return leading nodes that each worker holds, as far as is known; workers without any are left out."""
        self._apply(now)
        return leading(nodes, self._holders, self._everyone)

    def _apply(self, now: int) -> None:
        late, holders = self._late, self._holders
        while late and late[0][0] <= now:
            _, bit, events = late.popleft()
            for event in events:
                if event > 0:
                    holders[event] = holders.get(event, 0) | bit
                elif left := holders.get(-event, 0) & ~bit:
                    holders[-event] = left
                else:
                    holders.pop(-event, None)


def leading(nodes: Iterable[int], holders: Mapping[int, int], everyone: int) -> dict[int, int]:
    """Return leading nodes of each worker; workers without any are left out.

    Args:
        nodes: Of a prompt.
        holders: A set of workers by node, one bit each.
        everyone: The bits of all.
    """
    found: dict[int, int] = {}
    alive, depth = everyone, 0
    for node in nodes:
        left = alive & holders.get(node, 0)
        if left != alive:
            if depth:
                _note(found, alive & ~left, depth)
            alive = left
            if not alive:
                return found
        depth += 1
    if depth:
        _note(found, alive, depth)
    return found


def _note(found: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        lowest = bits & -bits
        found[lowest.bit_length() - 1] = depth
        bits ^= lowest
