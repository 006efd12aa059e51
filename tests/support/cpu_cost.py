"""What work costs, in CPU time of this process: for tests that it grows no faster than its input."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

TIMES: Final = 4
"""How much larger the second of two inputs is."""
NOISE_SECONDS: Final = 0.02
RETRIES: Final = 3
ROUNDS: Final = 15


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of one run, collections of garbage aside: those are of all that the tests have made."""
    gc.disable()
    try:
        began = time.process_time()
        work()
        return time.process_time() - began
    finally:
        gc.enable()


def assert_in_proportion(work: Callable[[T], object], small: T, large: T, what: str = "") -> None:
    """Run the work on an input and on one `TIMES` as large: twice the proportion is allowed, not `TIMES` times."""

    def cost(one: T) -> float:
        return cpu_seconds(lambda: work(one))

    first, second = cost(small), cost(large)
    for _ in range(RETRIES):  # others run on this machine, too
        if second <= 2 * TIMES * first + NOISE_SECONDS:
            return
        first, second = max(first, cost(small)), min(second, cost(large))
    assert second <= 2 * TIMES * first + NOISE_SECONDS, f"{what}: {first:.4f} s, then {second:.4f} s"


def cpu_ratio(small: Callable[[], object], large: Callable[[], object]) -> float:
    """Return the CPU time of `large` divided by that of `small`: the least of some runs of each, in turns."""
    runs = [(cpu_seconds(small), cpu_seconds(large)) for _ in range(ROUNDS)]
    return min(second for _, second in runs) / min(first for first, _ in runs)
