"""Parts of a stack that are broken under load, one after the other, and what doctor says of each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from cli.test_up import kvscout, output, up

GIVEN_UP_AFTER_SECONDS = 40.0
MENDED_WITHIN_SECONDS = 40.0


class Damage(NamedTuple):
    """Something to break, and what doctor is to say of it first."""

    what: str
    words: tuple[str, ...]
    """Of `kvscout break`; empty: the process `name` is stopped by a signal."""
    name: str
    findings: frozenset[str]
    """Ids, of which one must come first."""


DAMAGES = (
    Damage("an engine hangs", ("--hang",), "mocker-0", frozenset({"engine-suspected", "engine-unreachable"})),
    Damage("an engine is slow", ("--slow",), "mocker-1", frozenset({"worker-slow"})),
    Damage("an engine's events end", ("--mute-events",), "mocker-2", frozenset({"events-silent"})),
    Damage("the indexer hangs", (), "indexer", frozenset({"service-unreachable"})),
    Damage("the scheduler hangs", (), "scheduler", frozenset({"service-unreachable"})),
)


class Named(NamedTuple):
    """What doctor said of a damage."""

    damage: Damage
    seconds: float
    """Until one of its findings came first, with the run of doctor itself."""
    sentence: str
    """Doctor's first."""
    right: bool


class FirstHour:
    """A stack under load that is broken and mended."""

    def __init__(self, state_dir: Path, state: dict[str, Any]) -> None:
        self._state_dir = ("--state-dir", str(state_dir))
        self._state = state

    async def findings(self) -> list[dict[str, Any]]:
        """Return what doctor finds, in its order."""
        done = await kvscout("doctor", "--json", "--gateway", self._state["gateway"])
        found: list[dict[str, Any]] = json.loads(await output(done))["findings"]
        return found

    async def damage(self, damage: Damage) -> None:
        """Break a part."""
        await self._change(damage, damage.words, signal.SIGSTOP)

    async def mend(self, damage: Damage) -> None:
        """Mend it, and wait until nothing is wrong."""
        await self._change(damage, ("--mend",), signal.SIGCONT)
        await self.until(lambda found: not found, MENDED_WITHIN_SECONDS)

    async def until(
        self, holds: Callable[[list[dict[str, Any]]], bool], seconds: float
    ) -> tuple[float, list[dict[str, Any]]]:
        """Return when doctor's findings were so, or its last ones after that time."""
        began = time.monotonic()
        while not holds(found := await self.findings()) and time.monotonic() < began + seconds:
            await asyncio.sleep(0.2)
        return time.monotonic() - began, found

    async def _change(self, damage: Damage, words: tuple[str, ...], number: signal.Signals) -> None:
        if not damage.words:
            os.kill(self._state["processes"][damage.name], number)
            return
        done = await kvscout("break", damage.name, *words, *self._state_dir)
        assert done.returncode == 0, await output(done)


async def break_each(damages: Sequence[Damage], report: Callable[[Named], object]) -> None:
    """Break and mend parts of a stack under load, one after the other.

    Args:
        damages: What to break.
        report: Called with what doctor said of each.
    """
    with TemporaryDirectory(prefix="kvscout-") as name:
        async with up(Path(name)) as (_, state):
            hour = FirstHour(Path(name), state)
            load = await kvscout("load", "--rate", "3", "--duration", "600", "--gateway", state["gateway"], wait=False)
            try:
                await hour.until(lambda found: not found, MENDED_WITHIN_SECONDS)
                for damage in damages:
                    await hour.damage(damage)
                    wanted = damage.findings

                    def is_named(found: list[dict[str, Any]], wanted: frozenset[str] = wanted) -> bool:
                        return bool(found) and found[0]["id"] in wanted

                    seconds, found = await hour.until(is_named, GIVEN_UP_AFTER_SECONDS)
                    sentence = found[0]["what"] if found else "nothing is wrong"
                    report(Named(damage, seconds, sentence, is_named(found)))
                    await hour.mend(damage)
            finally:
                load.kill()
                await load.wait()
