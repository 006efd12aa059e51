"""`make soak`: five million events at the bound of an index, which must stay as large as it was, and as good.

The engines hold twice the bound; they are a process of their own, so that what is measured is the index, in a heap
like the indexer's. Four regimes, each in a process of its own, share the events. `SOAK_EVENTS`, `SOAK_SEED` and
`SOAK_REGIME` change the run. Prints a line a sample; exits non-zero if after the warm-up the memory of the process
(RSS) or the index's own figures move by more than they may, if queries could match little of what it holds, or if
it knew of too little of what the engines had of the prompts that came.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import psutil
from support.index_churn import Churn, Load, Request, Sample, requests, spread

from kvscout_blocks.index.backend import make_index
from kvscout_blocks.index.block_index import IndexStats
from kvscout_common.hashing import backend_name
from kvscout_common.process.heap import keep_mmap_threshold

EVENTS = int(os.environ.get("SOAK_EVENTS", "5000000"))
SEED = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(2**32)))
SAMPLES = 17
WARM_UP_SAMPLES = 5
"""Until every table has its size."""
_ENGINES = Load(engines=8, capacity=16_384, max_blocks=64_000)
REGIMES = {
    "emptied": (replace(_ENGINES, requests_a_clear=4_000), 0.95),
    "sessions": (_ENGINES, 0.95),
    "many-sessions": (replace(_ENGINES, live_sessions=200), 0.75),
    "long-lived-prefixes": (replace(_ENGINES, prefixes=110), 0.8),
}
"""What the engines do, and the least share of their overlaps that the index must find. `emptied`: each loses its cache
now and then. The last two use about as many blocks again and again as the index may keep."""
REGIME = os.environ.get("SOAK_REGIME", "")
LOAD, LEAST_FOUND = REGIMES[REGIME or "sessions"]
MOST_RSS_SPREAD = 0.02
MOST_OBJECT_SPREAD = 0.01
LEAST_MATCHABLE = 0.95

COUNTS: dict[str, tuple[Callable[[IndexStats], int], float]] = {
    # At the bound a 64th of the blocks goes at once.
    "entries": (lambda stats: stats.memberships + stats.orphans, 0.04),
    "ghosts": (lambda stats: stats.ghosts, 0.05),
    # Tables grow by a half, and what a block takes depends on how prompts branch.
    "bytes": (lambda stats: stats.bytes, 0.08),
}
"""Figures of the index, and how much each may move."""


def matchable_share(stats: IndexStats) -> float:
    """How much of what is held is neither hidden nor an orphan."""
    return (stats.memberships - stats.hidden) / (stats.memberships + stats.orphans)


def serve(requests_to: Connection, seed: int) -> None:
    """The process of the engines, until nobody reads any more."""
    with suppress(BrokenPipeError):
        for request in requests(LOAD, seed):
            requests_to.send(request)


def engines() -> Iterator[Request]:
    """The engines' requests, from their process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    context.Process(target=serve, args=(there, SEED), daemon=True).start()
    there.close()
    while True:
        yield here.recv()


def main() -> int:
    """Runs all regimes, or the one that the environment names; 0 if everything stayed flat."""
    if REGIME:
        return run()
    environment = {**os.environ, "SOAK_SEED": str(SEED), "SOAK_EVENTS": str(EVENTS // len(REGIMES))}
    command = [sys.executable, __file__]
    runs = [
        subprocess.run(command, env={**environment, "SOAK_REGIME": name}, check=False).returncode for name in REGIMES
    ]
    return max(runs, key=abs)


def run() -> int:
    """Runs the churn of one regime."""
    keep_mmap_threshold()
    index = make_index(16, max_blocks=LOAD.max_blocks)
    churn = Churn(index, LOAD, engines())
    process = psutil.Process()
    print(f"SOAK_REGIME={REGIME} SOAK_SEED={SEED} SOAK_EVENTS={EVENTS}, {type(index).__name__} ({backend_name()})")
    print(LOAD, flush=True)
    started = time.monotonic()
    samples: list[Sample] = []
    objects: list[int] = []
    for sample in churn.run(EVENTS, SAMPLES, lambda: process.memory_info().rss):
        samples.append(sample)
        gc.collect()
        objects.append(len(gc.get_objects()))
        stats = sample.stats
        print(
            f"{sample.events:>9} events  RSS {sample.measured / 2**20:7.2f} MiB  index {stats.bytes / 2**20:6.2f} MiB"
            f"  blocks {stats.blocks}  memberships {stats.memberships}  hidden {stats.hidden}  orphans {stats.orphans}"
            f"  ghosts {stats.ghosts}  evicted {stats.evicted}",
            flush=True,
        )
    index.check_invariants()
    events = samples[-1].events
    print(f"{events / churn.apply_seconds:,.0f} events/s in the index, {time.monotonic() - started:.0f} s in all")
    steady = samples[WARM_UP_SAMPLES:]
    spreads = {name: (spread([of(sample.stats) for sample in steady]), most) for name, (of, most) in COUNTS.items()}
    spreads["objects"] = spread(objects[WARM_UP_SAMPLES:]), MOST_OBJECT_SPREAD
    spreads["RSS"] = spread([sample.measured for sample in steady]), MOST_RSS_SPREAD
    for name, (moved, most) in spreads.items():
        print(f"{name} after the warm-up: {moved:.2%} (at most {most:.0%})")
    matchable = min(matchable_share(sample.stats) for sample in steady)
    print(f"queries can match {matchable:.2%} of what is held (at least {LEAST_MATCHABLE:.0%})")
    found = sum(sample.found for sample in steady) / sum(sample.cached for sample in steady)
    print(f"{REGIME}: {found:.1%} of the true overlap (at least {LEAST_FOUND:.0%})", flush=True)
    flat = all(moved <= most for moved, most in spreads.values())
    return 0 if flat and matchable >= LEAST_MATCHABLE and found >= LEAST_FOUND else 1


if __name__ == "__main__":
    sys.exit(main())
