"""`make chaos-gateway`: workers, helpers, gateways and Envoy killed and stopped at random under load of all fronts.

At any moment at most one engine, one helper, and one of the gateways and Envoy are away, so that every request has a
live worker: none may fail that had not yet been answered in part, unless what it came through was struck itself. When
the faults end, what is booked and held must be nothing within the owner timeout, no process may keep descriptors, tasks
or calls, and none may have ended by itself or called anything an error. CHAOS_SEED repeats the choice of faults.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from chaos.fronts import Front
from chaos.gateway_world import ENVOY_NAME, GATEWAYS, ROLES, World
from chaos.members import kill_all

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("CHAOS_SEED", SystemRandom().randrange(2**32)))
OWNER_SECONDS = 10.0
SETTLE_SECONDS = OWNER_SECONDS + 20.0
"""The owner timeout, and what a busy machine adds."""
IDLE_SECONDS = 5.0
"""After which idle connections are closed."""
SPARE = 8
"""More than before is a leak."""


async def run(seconds: float, seed: int) -> list[str]:
    """One run; what is wrong afterwards."""
    rng = Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvscout-chaos-") as folder:
        world = World(Path(folder), rng)
        seeds = itertools.count(rng.randrange(2**31))
        try:
            await world.start()
            await _load(world, seeds, asyncio.sleep(2.0))
            await asyncio.sleep(IDLE_SECONDS)
            before = await world.held()
            strikes = (
                world.strike_for(list(ROLES), seconds),
                world.strike_for(["indexer", "scheduler"], seconds),
                world.strike_for([*GATEWAYS, ENVOY_NAME], seconds),
            )
            await _load(world, seeds, asyncio.gather(*strikes))
            for member in world.members:
                member.require_alive()
            wrong = [f"failed with nothing said: {failure}" for failure in world.offences()]
            wrong += await _settled(world)
            wrong += world.defects
            wrong += [f"{member.name}: {one}" for member in world.services.values() for one in member.defects()]
            await asyncio.sleep(IDLE_SECONDS)
            after = await world.held()
            wrong += [
                f"{what}: {after[what]}, {before.get(what, 0)} before"
                for what in after
                if after[what] > before.get(what, 0) + SPARE
            ]
            for name, counts in sorted(world.endings.items()):
                print(f"  {name}: {dict(counts)}")
            partly = sum(failure.begun for failure in world.failures)
            print(f"  failed: {partly} in part answered, {len(world.failures) - partly} not")
            print("  held: " + ", ".join(f"{what} {before.get(what, 0)} → {after[what]}" for what in sorted(after)))
            return wrong
        finally:
            await kill_all(world.members)


async def _load(world: World, seeds: itertools.count[int], meanwhile: Any) -> None:
    """Clients ask while something else happens, and leave what they ask then."""
    fronts: list[Front] = world.fronts()
    asking = [asyncio.create_task(world.ask(front, next(seeds))) for front in fronts]
    try:
        await meanwhile
    finally:
        for task in asking:
            task.cancel()
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.gather(*(front.close() for front in fronts))
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome


async def _settled(world: World) -> list[str]:
    began = time.monotonic()
    while left := await world.left():
        if time.monotonic() - began > SETTLE_SECONDS:
            return left
        await asyncio.sleep(0.2)
    print(f"  nothing left after {time.monotonic() - began:.1f} s", flush=True)
    return []


async def main() -> int:
    """One run; 0 if nothing is wrong."""
    print(f"CHAOS_SEED={SEED} CHAOS_SECONDS={SECONDS:g}", flush=True)
    wrong = await run(SECONDS, SEED)
    for line in wrong:
        print(f"  WRONG {line}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
