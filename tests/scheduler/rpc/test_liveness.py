"""Whether somebody is heard of: told once, and not of a pause of our own."""

from __future__ import annotations

import asyncio
import time

from support.processes import eventually

from kvscout_scheduler.rpc.liveness import STEPS, LivenessTimer


async def test_silence_is_told_once_and_what_is_heard_puts_it_off() -> None:
    told: list[float] = []
    liveness = LivenessTimer(0.05, told.append)
    for _ in range(2 * STEPS):
        liveness.beat()
        await asyncio.sleep(0.01)
    assert told == []
    await eventually(lambda: bool(told))
    await asyncio.sleep(0.1)
    assert told == [0.05]
    assert liveness.silent_seconds == 0.05


async def test_a_process_that_was_stopped_has_time_to_read_what_came_meanwhile() -> None:
    told: list[float] = []
    liveness = LivenessTimer(0.05, told.append)
    time.sleep(0.5)  # noqa: ASYNC251 - nothing of this process runs
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert liveness.silent_seconds < 0.05, "it has looked once or twice"
    liveness.stop()
    assert told == []


async def test_who_may_be_silent_for_ever_is_never_looked_for() -> None:
    told: list[float] = []
    liveness = LivenessTimer(0.0, told.append)
    await asyncio.sleep(0.01)
    liveness.stop()
    assert (told, liveness.silent_seconds) == ([], 0.0)
