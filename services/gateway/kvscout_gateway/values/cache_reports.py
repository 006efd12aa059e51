"""Cached tokens as engines report them, request by request, against what their events announced. Pure; soft state.

An engine may empty its cache without an event: vLLM's sleep mode, `/reset_prefix_cache` without a later request, a
cache that is replaced in place. From then on it computes prompts that its events announced as cached. The same
happens to single requests for other reasons: their blocks were evicted while they waited, or the request was
preempted. So a rank becomes *suspect* by a count: each request that misses adds 1, each that does not takes 1 away,
never below 0, and at `SUSPECT` the rank is suspect. That is Page's CUSUM test of "1 in 10 misses" against "9 in 10
miss", whose steps are ±ln 9: while at most 1 in 10 requests misses by itself, there are on average at least 9**6 =
531,441 checked requests between two false alarms. A rank whose predictions were never right is not judged: it has
another fault (`doctor`).

A suspect rank is only reported to the indexers. They decide, by the events of that rank
(`kvscout_indexer.index.cache_evidence`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvscout_common.worker import WorkerRank

Key: TypeAlias = tuple[str, WorkerRank]
"""Tenant and worker rank."""

SUSPECT = 6
"""Misses in excess of hits."""
PROVEN = 10
"""Requests whose prediction was right before misses count."""
FEW_BLOCKS = 2
"""A miss lacks as many blocks at least."""
MISSED_PART = 0.25
"""And this part of what was predicted."""
LATEST = 20
"""Reports that are remembered of each rank: as many without a surprise end a fence."""
SURPRISES = 3
"""Reports of more than was predicted, among the latest, that show a fence to be wrong."""
MAX_BLOCKS = 8192
"""Block hashes of one miss that are remembered: 64 KiB."""
HASH_BYTES = 8


class Miss(NamedTuple):
    """A request that found less than its worker's events announced."""

    block_hashes: bytes
    """Local hashes of the announced blocks, little-endian u64s."""
    cached_blocks: int
    """Leading blocks that were there."""
    block_size: int
    eagle: bool


@dataclass(slots=True)
class RankReports:
    """Reports of one worker rank."""

    right: int = 0
    """Requests whose prediction was right, since it was last suspected in vain."""
    excess: int = 0
    """Misses in excess of hits."""
    misses: deque[Miss] = field(default_factory=lambda: deque(maxlen=SUSPECT))
    """The last ones since `excess` was 0."""
    intact_at: float = 0.0
    """When the last request before these was sent whose prediction was right, in seconds."""
    right_at: float = 0.0
    """When the last request was sent whose prediction was right, in seconds."""
    latest: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=LATEST))
    """When the last requests were sent, and whether more was cached than predicted."""

    @property
    def is_suspect(self) -> bool:
        """Return whether the engine seems to have emptied its cache."""
        return self.excess >= SUSPECT

    def forgive(self) -> None:
        """Begin anew: the events do not confirm the suspicion."""
        self.right = self.excess = 0
        self.misses.clear()

    def since(self, sent_after: float) -> tuple[int, int]:
        """Return how many of the latest requests were sent after a time, and how many found more than predicted."""
        later = [surprise for sent_at, surprise in self.latest if sent_at >= sent_after]
        return len(later), sum(later)


class CacheReports:
    """Reports by worker rank, of those whose predictions can be compared."""

    def __init__(self) -> None:
        self._ranks: dict[Key, RankReports] = {}

    def get(self, key: Key) -> RankReports | None:
        """Return the reports of a rank; None = nothing could be compared yet."""
        return self._ranks.get(key)

    def forget(self, key: Key) -> None:
        """Drop those of a rank that is gone."""
        self._ranks.pop(key, None)

    def add(self, key: Key, *, predicted: Miss, confirmed: bool, reported_blocks: int, sent_at: float) -> None:
        """Compare what an engine reported of one request.

        Args:
            key: Whose.
            predicted: As a miss would be remembered: the blocks that it could have had cached.
            confirmed: The rank's events announced all of them; else only that it has no more is compared.
            reported_blocks: Leading blocks that it had cached, as it says.
            sent_at: When the request was sent, in seconds.
        """
        reports = self._ranks.get(key)
        if reports is None:
            reports = self._ranks[key] = RankReports()
        blocks = len(predicted.block_hashes) // HASH_BYTES
        reports.latest.append((sent_at, reported_blocks > blocks))
        if not confirmed or not blocks:
            return
        missed = blocks - reported_blocks
        if missed <= 0:
            reports.right, reports.right_at = min(reports.right + 1, PROVEN), sent_at
            reports.excess = max(0, reports.excess - 1)
            if not reports.excess:
                reports.misses.clear()
        elif missed >= max(FEW_BLOCKS, MISSED_PART * blocks) and reports.right >= PROVEN:
            if not reports.excess:
                reports.intact_at = reports.right_at
            reports.excess = min(reports.excess + 1, SUSPECT)
            reports.misses.append(predicted._replace(cached_blocks=reported_blocks))
