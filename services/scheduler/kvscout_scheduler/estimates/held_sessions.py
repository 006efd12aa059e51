"""What a worker's cache holds of each session, in the order in which it is evicted; pure.

Engines evict what was not used for longest. Each booking adds the tokens that were not cached, and those of its output,
to its session, which then goes last; beyond the cache's size the first ones lose theirs. Tokens that sessions share
count for the one that brought them.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvscout_common.worker import WorkerRank

if TYPE_CHECKING:
    from kvscout_scheduler.estimates.sessions import Sessions

NEXT_TOKENS: Final = 16_384
"""Tokens that are evicted next, about."""
LOOKED_AT: Final = 16
"""Sessions that are looked at for them."""


class HeldSessions:
    """Sessions in the cache of one worker."""

    __slots__ = ("_tokens", "_total")

    def __init__(self) -> None:
        self._tokens: OrderedDict[int, int] = OrderedDict()
        """By session, the first to be evicted first; 0 = all of whom no session is known."""
        self._total = 0

    def add(self, session_id: int, tokens: int, capacity: int) -> None:
        """Add tokens of a session, which has used what it has there.

        Args:
            session_id: 0 = unknown.
            tokens: New ones.
            capacity: Tokens that the cache holds; 0 = unknown.
        """
        held = self._tokens
        held[session_id] = held.get(session_id, 0) + tokens
        held.move_to_end(session_id)
        self._total += tokens
        while self._total > capacity:
            first, over = next(iter(held)), self._total - capacity
            if held[first] > over:
                held[first] -= over
                self._total = capacity
            else:
                self._total -= held.pop(first)

    def reuse(self, rank: WorkerRank, sessions: Sessions, now: float) -> float:
        """Return the chance that a token which is evicted next would be used again before others would be evicted.

        Args:
            rank: The worker.
            sessions: What is known of them.
            now: On the scheduler's clock.
        """
        used, left = 0.0, NEXT_TOKENS
        for session_id, held in islice(self._tokens.items(), LOOKED_AT):
            soon = sessions.soon(session_id, rank, now)
            if soon is None:
                continue
            tokens = min(held, left)
            used += tokens * soon
            left -= tokens
            if not left:
                break
        return used / (NEXT_TOKENS - left) if left < NEXT_TOKENS else 0.0
