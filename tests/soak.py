"""`make soak`: five million events at the bound of an index, which must stay as large as it was.

`SOAK_EVENTS` and `SOAK_SEED` change the run. Prints a line a sample; exits non-zero if after the warm-up the
memory of the process (RSS) or the index's own figures move by more than they may.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable

import psutil
from index_churn import Churn, Load, Sample, spread

from kvscout_blocks.index import IndexStats
from kvscout_blocks.native_index import make_index
from kvscout_common.hashing import backend_name

EVENTS = int(os.environ.get("SOAK_EVENTS", "5000000"))
SEED = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(2**32)))
SAMPLES = 50
WARM_UP_SAMPLES = 20
"""Until every worker's ghosts are at their limit, and every table has its size."""
LOAD = Load(engines=8, capacity=4096, max_blocks=32_000)
MOST_RSS_SPREAD = 0.02
MOST_COUNT_SPREAD = 0.03
"""At the bound a 64th of the blocks goes at once, and what a block takes depends on how prompts branch."""

COUNTS: dict[str, Callable[[IndexStats], int]] = {
    "entries": lambda stats: stats.memberships + stats.orphans,
    "ghosts": lambda stats: stats.ghosts,
    "bytes": lambda stats: stats.bytes,
}


def main() -> int:
    """Runs the churn; 0 if everything stayed flat."""
    index = make_index(16, max_blocks=LOAD.max_blocks)
    churn = Churn(index, LOAD, SEED)
    process = psutil.Process()
    print(f"SOAK_SEED={SEED} SOAK_EVENTS={EVENTS}, {type(index).__name__} ({backend_name()}), {LOAD}", flush=True)
    started = time.monotonic()
    samples: list[Sample] = []
    for sample in churn.run(EVENTS, SAMPLES, lambda: process.memory_info().rss):
        samples.append(sample)
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
    spreads = {
        name: (spread([of(sample.stats) for sample in steady]), MOST_COUNT_SPREAD) for name, of in COUNTS.items()
    }
    spreads["RSS"] = spread([sample.measured for sample in steady]), MOST_RSS_SPREAD
    for name, (found, most) in spreads.items():
        print(f"{name} after the warm-up: {found:.2%} (at most {most:.0%})")
    return 0 if all(found <= most for found, most in spreads.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
