"""Periodic work of one process, in step: what recurs at the same interval is done in one wake-up."""

from __future__ import annotations

import asyncio
import math
import random

_PHASE_SECONDS = random.randrange(60_000) / 1000
"""Processes of one machine, which share its clock, are not to wake together."""


def until_tick(seconds: float) -> float:
    """Return the seconds until the next common moment of an interval, half an interval away at least."""
    now = asyncio.get_running_loop().time() - _PHASE_SECONDS
    return math.ceil(now / seconds + 0.5) * seconds - now


async def sleep_to_tick(seconds: float) -> None:
    """Sleep until the next common moment of an interval."""
    await asyncio.sleep(until_tick(seconds))
