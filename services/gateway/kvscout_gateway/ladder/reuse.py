"""How far back the blocks of a prompt were used last: a sample of all blocks, of bounded size.

The work is done by the extension or, where that is not built, by `reuse_reference`, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from kvscout_common.hashing import native_module

MAX_SAMPLES: Final = 16_384
"""Maximum number of samples per sampler: about 2 MB."""


class Reuse(NamedTuple):
    """Estimated blocks of a request that no worker holds, by what is known of them."""

    never: int = 0
    """Not used before, as far as is remembered."""
    other_name: int = 0
    """Not used before, but the same tokens were, with another cache salt or adapter."""
    split: int = 0
    """The workers' blocks would suffice as one cache; one worker's need not."""
    recent: int = 0
    """Used so recently that the smallest worker would still hold them if all requests had gone there."""
    expired: int = 0
    """Held by one cache of all the workers' blocks if that were a quarter larger."""
    expired_half: int = 0
    """By one larger by half."""
    expired_double: int = 0
    """By one twice as large."""
    expired_fourfold: int = 0
    """By one four times as large."""
    expired_beyond: int = 0
    """By none of these."""
    foreign: int = 0
    """Held by a worker, though in no earlier prompt: an engine's output or another router's. No part of the others."""


class ReuseSampler(Protocol):
    """A sample of the blocks that were used."""

    @property
    def weight(self) -> int:
        """Return the number of blocks that each sampled one stands for, a power of two."""

    def __len__(self) -> int:
        """Return the number of sampled blocks."""

    def observe(
        self, local: bytes, content: bytes, blocks: int, overlap: int, capacity: int, worker_capacity: int
    ) -> tuple[int, ...]:
        """Classify the blocks of a request, then use them from the last to the first.

        Args:
            local: Local hashes, little-endian u64.
            content: Those of the same tokens without salt and adapter; empty = they are the same.
            blocks: Number of leading blocks that count.
            overlap: Number of leading blocks that some worker holds.
            capacity: Blocks that all workers hold together; 0 = unknown.
            worker_capacity: Blocks that the smallest of them holds; 0 = unknown.

        Returns:
            The fields of `Reuse`, in blocks.

        Raises:
            ValueError: Hashes are no whole u64s, or there are contents for some blocks only.
        """


def sampler_type() -> Callable[[int], ReuseSampler]:
    """Return the type of samplers; it takes the largest number of samples."""
    native = native_module()
    if native is not None:
        made: Callable[[int], ReuseSampler] = native.ReuseSampler
        return made
    from kvscout_gateway.ladder import reuse_reference

    return reuse_reference.ReuseSampler
