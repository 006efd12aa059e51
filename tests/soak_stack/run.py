"""`make soak-stack`: the whole stack under mixed load, for minutes or hours, must not grow, leak or disagree.

Windows of load, in which clients of every kind ask while workers, adapters and tenants come and go and processes are
restarted; after each everything must come to rest, at zero, with replicas alike and indexes the engines' truth, and is
measured. MINUTES is for how long (3), SEED repeats what is drawn. Prints a line a window, then what each figure of each
process did after the warm-up, the first third; exits with 1 and names what grew.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random, SystemRandom

from soak_stack.churn import Churn
from soak_stack.figures import Window, growths, table
from soak_stack.load import BUSY_PAUSE_SECONDS, Load
from soak_stack.rest import settled
from soak_stack.world import World

MINUTES = float(os.environ.get("MINUTES", "3"))
SEED = int(os.environ.get("SEED", SystemRandom().randrange(2**32)))
WINDOWS_AT_LEAST = 9
WINDOW_SECONDS = 60.0
"""Of long runs; short ones have as many windows as are needed to tell growth from noise."""
IDLE_SECONDS = 5.5
"""After which nobody holds a connection that is not in use."""
WARM_UP = 1 / 3
"""Share of the windows that do not count."""
SHOWN = ("allocations", "descriptors", "series")
NEXT_SHOWN = 10
"""Figures that came next to growing too much."""


async def run(
    seconds: float,
    seed: int,
    *,
    windows_at_least: int = WINDOWS_AT_LEAST,
    pause_seconds: float = BUSY_PAUSE_SECONDS,
    judged: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """One run.

    Args:
        seconds: How long windows are together, what comes to rest between them left aside.
        seed: Of everything that is drawn.
        windows_at_least: How many there are.
        pause_seconds: At most, between two requests of a client.
        judged: Names of figures; empty = all.
        say: Is told how it goes.

    Returns:
        What is wrong.
    """
    rng = Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvscout-soak-") as folder:
        world = World(Path(folder))
        load, churn = Load(world, rng, pause_seconds), Churn(world, rng)
        try:
            await world.start()
            windows: list[Window] = []
            number = max(windows_at_least, round(seconds / WINDOW_SECONDS))
            began = time.monotonic()
            for window in range(number):
                await load.during(churn.for_seconds(seconds / number))
                ended = time.monotonic()
                if wrong := await settled(world, window) + _defects(world, churn):
                    return wrong
                say(f"at rest after {time.monotonic() - ended:.1f} s")
                await asyncio.sleep(IDLE_SECONDS)
                windows.append(Window((time.monotonic() - began) / 60, await world.figures()))
                for line in list(table(windows, "RSS"))[-1 if window else 0 :]:
                    say(line)
            counts = sorted((load.counts + churn.counts).items())
            say(", ".join(f"{count} {what}" for what, count in counts))
            # Engines are not ours: an idle one's libzmq keeps what it has of subscribers that are gone, as vLLM's does.
            young = churn.replaced | world.engines.keys()
            return _grown(windows, young, judged, say)
        finally:
            await world.close()


def _defects(world: World, churn: Churn) -> list[str]:
    """What any process called an error."""
    for member in world.members.values():
        member.require_alive()
    found = [f"{name}: {one}" for name, member in world.members.items() for one in member.defects()]
    return churn.defects + found


def _grown(
    windows: Sequence[Window], young: frozenset[str], judged: Sequence[str], say: Callable[[str], None]
) -> list[str]:
    """What grew by more than it may; tells of the rest what came next to it."""
    for what in SHOWN:
        for line in table(windows, what):
            say(line)
    steady = windows[round(len(windows) * WARM_UP) :]
    found = [each for each in growths(steady, young) if not judged or each.what in judged]
    found.sort(key=lambda each: each.grown / each.most, reverse=True)
    for each in found[:NEXT_SHOWN]:
        say(str(each))
    return [f"grew: {each}" for each in found if each.too_much]


async def main() -> int:
    """One run; 0 if nothing grew."""
    print(f"SEED={SEED} MINUTES={MINUTES:g}", flush=True)
    wrong = await run(MINUTES * 60, SEED, say=lambda line: print(f"  {line}", flush=True))
    for line in wrong:
        print(f"  WRONG {line}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
