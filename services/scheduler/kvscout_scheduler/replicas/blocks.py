"""Block hashes that replicas have already, and that are not sent again: they are most of a claim."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol
from zlib import crc32

from kvscout_scheduler.values.reservation import HASH_BYTES, RequestKey

KEPT_SECONDS: Final = 10.0
MAX_KEPT_BYTES: Final = 64 * 1024 * 1024


class KnownBlocks(NamedTuple):
    """Fingerprint of block hashes that a message leaves out."""

    blocks: int
    crc: int
    """CRC-32 of the packed hashes."""

    def fit(self, block_hashes: bytes) -> bool:
        """Return whether packed hashes are these."""
        return len(block_hashes) == HASH_BYTES * self.blocks and crc32(block_hashes) == self.crc


class UnknownBlocks(Exception):
    """A claim leaves out hashes that are not here."""


class FindBlocks(Protocol):
    """Finds hashes that were received before."""

    def __call__(self, key: RequestKey, attempt_id: int, known: KnownBlocks) -> bytes:
        """Return packed hashes.

        Raises:
            UnknownBlocks: They were not received.
        """


def known_blocks(block_hashes: bytes) -> KnownBlocks:
    """Return the fingerprint of hashes."""
    return KnownBlocks(len(block_hashes) // HASH_BYTES, crc32(block_hashes))


class RecentBlocks:
    """Hashes of claims that were given up lately: a takeover of the request may be received after that.

    Bounded in time and bytes; the oldest go first.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[RequestKey, int], tuple[float, bytes]] = {}
        self._bytes = 0

    def keep(self, key: RequestKey, attempt_id: int, block_hashes: bytes, now: float) -> None:
        """Keep hashes for a while."""
        if not block_hashes:
            return
        self._drop((key, attempt_id))
        self._kept[key, attempt_id] = (now, block_hashes)
        self._bytes += len(block_hashes)
        while self._bytes > MAX_KEPT_BYTES:
            self._drop(next(iter(self._kept)))

    def get(self, key: RequestKey, attempt_id: int) -> bytes:
        """Return hashes that are kept; empty = none."""
        return self._kept.get((key, attempt_id), (0.0, b""))[1]

    def expire(self, now: float) -> None:
        """Forget what is old."""
        while self._kept:
            name, (since, _) = next(iter(self._kept.items()))
            if since + KEPT_SECONDS > now:
                break
            self._drop(name)

    def _drop(self, name: tuple[RequestKey, int]) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._bytes -= len(kept[1])
