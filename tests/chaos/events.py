"""`make chaos-events`: engines, bridges, NATS and indexers fail at random; afterwards the index is the engines' truth.

For each transport: a minute (CHAOS_SECONDS) of load in which 5 % of the batches are lost and 2 % repeated (but those of
custom engines, whose publisher is in the same process) while processes are killed, stopped and restarted; then faults
end, and every indexer must hold exactly what each engine's cache holds, copy by copy, and predict its cached tokens.
CHAOS_SEED repeats the choice of faults, CHAOS_TRANSPORTS ("direct,nats-core") runs some only.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random, SystemRandom

import aiohttp

from chaos.engines import BLOCK_SIZE, MODEL, Engine
from chaos.members import kill_all
from chaos.worlds import World

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("CHAOS_SEED", SystemRandom().randrange(2**32)))
TRANSPORTS = os.environ.get(
    "CHAOS_TRANSPORTS", "direct,peers,grpc,nats-core,jetstream,custom-nats-core,custom-jetstream"
).split(",")
QUIET_SECONDS = 60.0
"""Longest wait for the truth after the faults: replays back off up to 13 s, leases take 10."""
PREDICTIONS = 20


async def strike(world: World, http: aiohttp.ClientSession, rng: Random) -> str:
    """One fault; returns what it was, when it is over."""
    kinds = ["engine restart", "engine kill", "engine stop", "indexer kill", "indexer stop"]
    kinds += ["bridge kill", "bridge stop"] if world.bridges else []
    kinds += ["nats kill", "nats stop"] if world.nats is not None else []
    kind, away = rng.choice(kinds), rng.uniform(0.1, 2.0)
    engine, indexer = rng.choice(world.engines), rng.choice(world.indexers)
    if kind == "engine restart":
        await engine.fault(http, restart=True)
        await asyncio.sleep(0.2)
        await engine.alive(http)
        return f"{kind} {engine.worker_id}"
    if kind == "nats kill":
        assert world.nats is not None
        await world.nats.kill()
        await asyncio.sleep(away)
        await world.nats.start()
        return f"{kind}, {away:.1f} s"
    if kind == "nats stop":
        assert world.nats is not None
        world.nats.pause()
        await asyncio.sleep(away)
        world.nats.resume()
        return f"{kind}, {away:.1f} s"
    member = {"engine": engine.member, "indexer": indexer.member}.get(kind.split()[0])
    if member is None:
        member = rng.choice(world.bridges)
    if kind.endswith("stop"):
        await member.pause(away)
    else:
        await member.kill()
        await asyncio.sleep(away)
        await member.start()
    return f"{kind} {member.name}, {away:.1f} s"


async def differences(world: World, truths: dict[str, dict[int, int]]) -> list[str]:
    """Where an indexer and an engine disagree."""
    found = []
    for indexer in world.indexers:
        for engine in world.engines:
            truth, copies = truths[engine.worker_id], await indexer.copies(engine.worker_id)
            if copies is None:
                found.append(f"{indexer.member.name} cannot tell of {engine.worker_id}")
            elif copies != truth:
                missing = sum(copies.get(block, 0) < number for block, number in truth.items())
                extra = sum(truth.get(block, 0) < number for block, number in copies.items())
                found.append(
                    f"{indexer.member.name} on {engine.worker_id}: of {len(truth)} blocks {missing} are missing, "
                    f"{extra} are too many"
                )
    return found


async def mispredicted(world: World, engine: Engine, http: aiohttp.ClientSession) -> int:
    """Of some prompts, those whose cached tokens an indexer predicts wrong."""
    wrong = 0
    for _ in range(PREDICTIONS):
        prompt = engine.prompt()
        overlaps = [await indexer.overlap(engine.worker_id, prompt, MODEL) for indexer in world.indexers]
        predicted = {min(overlap, (len(prompt) - 1) // BLOCK_SIZE) * BLOCK_SIZE for overlap in overlaps}
        cached = await engine.complete(http, prompt, max_tokens=1)
        wrong += predicted != {cached}
        # What this request stored must be there before the next prediction.
        truths = {engine.worker_id: await engine.truth(http)}
        await agreement(world, truths, only=engine)
    return wrong


async def agreement(world: World, truths: dict[str, dict[int, int]], *, only: Engine | None = None) -> list[str]:
    """Waits until every indexer agrees with the engines; what is left at the deadline."""
    deadline = time.monotonic() + QUIET_SECONDS
    engines = world.engines if only is None else [only]
    everyone, world.engines = world.engines, engines
    try:
        while (left := await differences(world, truths)) and time.monotonic() < deadline:
            await asyncio.sleep(0.02 if only else 0.5)
    finally:
        world.engines = everyone
    return left


async def run(transport: str, folder: Path, rng: Random) -> list[str]:
    """A minute of one transport; what is wrong afterwards."""
    world = World(transport, folder, rng.randrange(2**31))
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http:
            await world.start()
            load = [asyncio.create_task(engine.keep_busy(http)) for engine in world.engines]
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                print(f"  {SECONDS - (end - time.monotonic()):5.1f} s  {await strike(world, http, rng)}", flush=True)
                await asyncio.sleep(rng.uniform(0.0, 2.0))
            for member in world.members:
                member.require_alive()
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
            for engine in world.engines:
                await engine.fault(http, drop_events=0, duplicate_events=0)
                # A batch that arrives: what was lost before it shows as a gap.
                await engine.complete(http, [engine.port] * BLOCK_SIZE, max_tokens=1)
            truths = {engine.worker_id: await engine.truth(http) for engine in world.engines}
            quiet = time.monotonic()
            wrong = await agreement(world, truths)
            print(f"  agreed after {time.monotonic() - quiet:.1f} s" if not wrong else "  no agreement", flush=True)
            if not wrong:
                for engine in world.engines:
                    if number := await mispredicted(world, engine, http):
                        wrong.append(f"{number} of {PREDICTIONS} prompts of {engine.worker_id} are predicted wrong")
            for indexer in world.indexers if wrong else ():
                print(f"{indexer.member.name}:\n{await indexer.status()}", flush=True)
            answered, failed = (sum(getattr(e, name) for e in world.engines) for name in ("answered", "failed"))
            print(f"  {answered} requests answered, {failed} failed, {sum(map(len, truths.values()))} blocks compared")
            for indexer in world.indexers:
                await indexer.close()
            return wrong
    finally:
        await kill_all(world.members)
        if world.nats is not None:
            await world.nats.kill()


async def main() -> int:
    """Every transport; 0 if all agreed."""
    print(f"CHAOS_SEED={SEED} CHAOS_SECONDS={SECONDS:g} CHAOS_TRANSPORTS={','.join(TRANSPORTS)}", flush=True)
    failures = []
    for number, transport in enumerate(TRANSPORTS):
        print(f"{transport}:", flush=True)
        with tempfile.TemporaryDirectory(prefix="kvscout-chaos-") as folder:
            wrong = await run(transport, Path(folder), Random(SEED + number))
        for line in wrong:
            print(f"  WRONG {line}", flush=True)
        failures += wrong
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
