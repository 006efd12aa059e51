"""How long messages are under way, and how late what they say is known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latencies:
    """In milliseconds."""

    route_ms: float = 2.0
    """From a request's arrival at its gateway until the worker has it."""
    report_ms: float = 1.0
    """From a token at the worker until the scheduler is told of it."""
    event_ms: float = 10.0
    """From a step's plan until the index knows what it stored and removed."""
    sync_ms: float = 20.0
    """From a change at one replica of the scheduler until the others know of it."""
    transfer_ms: float = 2.0
    """What each transfer of blocks from a prefill to a decode worker takes."""
    transfer_us_per_token: float = 5.0
    """What each of its tokens adds."""
