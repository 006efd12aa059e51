"""`reuse` in plain Python: the definition that the extension is tested against.

The samples are SHARDS's (Waldspurger et al., FAST 2015): a block is sampled where the hash of its content begins with
enough zero bits. So each use of a sampled block is seen, and a distance among samples, times the weight, is one among
all blocks. The weight doubles where samples become too many, in memory or for a request.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from typing import Final

MEAN_SAMPLES: Final = 64
"""Sampled blocks of a request, on average: above it the weight doubles."""
AVERAGED: Final = 16
"""Requests over which that average is taken."""
MIN_REACH: Final = 1 << 20
"""Blocks that are remembered at least before the least recently used is dropped."""
REACH_CAPACITIES: Final = 4
"""The same in capacities."""
SPREAD: Final = 0x9E37_79B9_7F4A_7C15
_U64: Final = (1 << 64) - 1
_KINDS: Final = 10


class ReuseSampler:
    """See `reuse.ReuseSampler`."""

    def __init__(self, max_samples: int) -> None:
        """Sample nothing yet; at most so many blocks, at least one."""
        self._max_samples = max(1, max_samples)
        self._doublings = 0
        self._mean = 0
        """Samples of a request, a moving average times `AVERAGED`."""
        self._samples: OrderedDict[int, int] = OrderedDict()
        """Content of each sampled block, the most recently used one last."""

    @property
    def weight(self) -> int:
        """See `reuse.ReuseSampler`."""
        return 1 << self._doublings

    def __len__(self) -> int:
        return len(self._samples)

    def observe(
        self, local: bytes, content: bytes, blocks: int, overlap: int, capacity: int, worker_capacity: int
    ) -> tuple[int, ...]:
        """See `reuse.ReuseSampler`."""
        used = [one for one in _chain(local, content, blocks) if self._is_sampled(one[2])]
        contents = Counter(self._samples.values())
        found = [0] * _KINDS
        for position, identity, plain in used:
            if identity in self._samples:
                if position >= overlap:
                    found[_kind_of(self._distance(identity), capacity, worker_capacity)] += self.weight
            elif position < overlap:
                found[9] += self.weight
            else:
                found[1 if plain in contents else 0] += self.weight
        for _, identity, plain in reversed(used):
            self._touch(identity, plain, capacity)
        self._mean += len(used) - self._mean // AVERAGED
        if self._mean > MEAN_SAMPLES * AVERAGED:
            self._mean //= 2
            self._double()
        return tuple(found)

    def _is_sampled(self, content: int) -> bool:
        return content >> (64 - self._doublings) == 0

    def _distance(self, identity: int) -> int:
        """Return how many other blocks were used since this one was."""
        return (len(self._samples) - 1 - list(self._samples).index(identity)) * self.weight

    def _touch(self, identity: int, content: int, capacity: int) -> None:
        while self._is_sampled(content) and identity not in self._samples and len(self._samples) == self._max_samples:
            if self._max_samples * self.weight >= max(REACH_CAPACITIES * capacity, MIN_REACH):
                self._samples.popitem(last=False)
            else:
                self._double()
        if self._is_sampled(content):
            self._samples[identity] = content
            self._samples.move_to_end(identity)

    def _double(self) -> None:
        self._doublings += 1
        kept = ((identity, content) for identity, content in self._samples.items() if self._is_sampled(content))
        self._samples = OrderedDict(kept)


def _chain(local: bytes, content: bytes, blocks: int) -> list[tuple[int, int, int]]:
    """Return position, identity and content of the blocks of a prompt."""
    if len(local) % 8 or len(content) % 8:
        raise ValueError("packed hashes are whole u64s")
    if content and len(content) != len(local):
        raise ValueError("each block has a content, or none has")
    hashes = struct.unpack(f"<{len(local) // 8}Q", local)
    plains = struct.unpack(f"<{len(content) // 8}Q", content) or hashes
    chain, identity, plain = [], 0, 0
    for position in range(min(blocks, len(hashes))):
        identity, plain = _extended(identity, hashes[position]), _extended(plain, plains[position])
        chain.append((position, identity, plain))
    return chain


def _extended(parent: int, local: int) -> int:
    mixed = (parent ^ local) * SPREAD & _U64
    return mixed ^ mixed >> 32


def _kind_of(distance: int, capacity: int, worker_capacity: int) -> int:
    """Return the place in `Reuse` of a block that was used before and that no worker holds."""
    if distance < worker_capacity:
        return 3
    if not capacity or distance < capacity:
        return 2
    edges = (1.25, 1.5, 2.0, 4.0)
    return 4 + next((place for place, edge in enumerate(edges) if distance < edge * capacity), len(edges))
