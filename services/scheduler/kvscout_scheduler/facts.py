"""What is known of a booking from its beginning, and what of its end: plain values, told to whoever observes a pool."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvscout_common.worker import WorkerRank
from kvscout_scheduler.request import RequestKey


class Choice(NamedTuple):
    """How a worker was chosen: what a repeated call is answered with."""

    policy: str
    overlap_blocks: int
    """Leading blocks of the prompt on its device, confirmed or predicted."""
    effective_overlap_blocks: float
    """Slower tiers weighted; 0 where prefix caches are ignored."""
    cost: float
    """In blocks for `kv`, else in the policy's own unit."""


class Facts(NamedTuple):
    """What does not change of a booking."""

    key: RequestKey
    attempt_id: int
    rank: WorkerRank
    isl_tokens: int
    """Prompt length in tokens."""
    uncached_tokens: int
    """Prompt tokens charged as prefill."""
    expected_output_tokens: int = 0
    """0 = unknown."""
    block_hashes: bytes = b""
    """Packed hashes of the blocks that it shares; kept for other replicas only."""
    choice: Choice | None = None
    """None for a plain reservation."""


class End(NamedTuple):
    """What is known of a booking when it is over."""

    freed: bool
    """Whether its caller said so; else lease, owner, worker or another replica ended it."""
    output_tokens: int = 0
    """0 = unknown."""
    decode_seconds: float = 0.0
    """Since its first token; 0 = there was none, as far as we were told."""

    @property
    def itl_seconds(self) -> float | None:
        """Mean time between two of its tokens; None = unknown."""
        gaps = self.output_tokens - 1
        return self.decode_seconds / gaps if gaps > 0 and self.decode_seconds > 0 else None


class Observer(Protocol):
    """Hears of every booking of a pool, those of other replicas included, in order and after it took effect."""

    def booked(self, facts: Facts, now: float) -> None:
        """A request is on a worker, whoever chose it.

        Args:
            facts: What was booked.
            now: On the scheduler's clock.
        """

    def prefill_completed(self, facts: Facts, ttft_seconds: float, now: float) -> None:
        """Its first token is out.

        Args:
            facts: What was booked.
            ttft_seconds: Since it was booked.
            now: On the scheduler's clock.
        """

    def ended(self, facts: Facts, end: End, now: float) -> None:
        """It is over.

        Args:
            facts: What was booked.
            end: How.
            now: On the scheduler's clock.
        """
