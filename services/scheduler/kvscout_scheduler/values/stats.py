"""Counters of the scheduler: plain integers since start, for whoever exports them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvscout_common.observability.latencies import Latencies

WAIT_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds, in seconds."""


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start."""

    decisions: Counter[str] = field(default_factory=Counter)
    """Workers picked, booked or not, by policy."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Selections that failed, by the error's class."""
    bookings: int = 0
    freed: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """Bookings that ended without a Free, by reason."""
    revisions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bookings by the revision that the weights said, and the one that took them."""
    over_target: int = 0
    """Requests placed although no worker kept their targets."""
    queued: int = 0
    """Requests that had to wait."""
    queue_waits: Latencies = field(default_factory=lambda: Latencies(WAIT_BUCKETS))
    """Times that booked requests had waited."""
