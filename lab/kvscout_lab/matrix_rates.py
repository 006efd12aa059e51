"""Flows a second at which `kv` saturates in each setup of the matrix, looked for once with one seed.

`python -m kvscout_lab.matrix_rates [PATTERN]` looks again, and prints them. Those of `shared-prompt`
and of Mooncake's conversations are of longer runs, by `kvscout replay --load`: in a short one nothing saturates that
decodes.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvscout_lab.matrix import Setup

SATURATED: Final[dict[str, float]] = {
    "conversations/4w": 2.93,
    "conversations/4w-300k": 2.41,
    "conversations/4w-1200k": 3.06,
    "conversations/8w": 6.68,
    "conversations/8w-300k": 5.04,
    "conversations/8w-1200k": 7.13,
    "conversations/16w": 12.5,
    "agents/4w": 11.9,
    "agents/4w-300k": 9.18,
    "agents/4w-1200k": 12.7,
    "agents/8w": 28.9,
    "agents/8w-300k": 21.4,
    "agents/8w-1200k": 28.9,
    "agents/16w": 62,
    "shared-prompt/4w": 34.1,
    "shared-prompt/8w": 77.7,
    "shared-prompt/16w": 159,
    "trace/4w": 4.76,
    "trace/4w-300k": 4.17,
    "trace/4w-1200k": 5.66,
    "trace/8w": 10.7,
    "trace/8w-300k": 8.98,
    "trace/8w-1200k": 12.1,
    "trace/16w": 24.3,
    "documents/4w": 107,
    "long-agents/8w": 1.74,
    "lora/conversations-8": 7.95,
    "lora/agents-8": 17.2,
    "mixed/conversations-half-are-faster": 6.54,
    "mixed/conversations-one-decodes-3x-slower": 6.4,
    "mixed/conversations-one-is-slow": 4.83,
    "apart/conversations-3+6": 2.79,
    "apart/conversations-3+6-slow-decoders": 2.73,
    "mixed/agents-half-are-faster": 35.9,
    "mixed/agents-one-decodes-3x-slower": 28.3,
    "mixed/agents-one-is-slow": 20.5,
    "apart/agents-3+6": 8.37,
    "apart/agents-3+6-slow-decoders": 8.55,
    "engines/conversations-8b-bf16-h100": 8.77,
    "engines/agents-8b-bf16-h100": 26.8,
    "engines/long-agents-8b-bf16-h100": 0.941,
    "engines/conversations-70b-fp8-tp4-h100": 6.93,
    "engines/agents-70b-fp8-tp4-h100": 26.9,
    "engines/long-agents-70b-fp8-tp4-h100": 1.05,
    "engines/conversations-70b-bf16-tp8-h100": 8.88,
    "engines/agents-70b-bf16-tp8-h100": 33.8,
    "engines/long-agents-70b-bf16-tp8-h100": 3.98,
    "engines/conversations-235b-moe-fp8-tp8-h100": 50.9,
    "engines/agents-235b-moe-fp8-tp8-h100": 73,
    "engines/long-agents-235b-moe-fp8-tp8-h100": 2.3,
    "together/conversations-8b-bf16-h100": 9.98,
    "together/conversations-70b-fp8-tp4-h100": 7.88,
    "together/agents-8b-bf16-h100": 28.2,
    "together/agents-70b-fp8-tp4-h100": 23.3,
}


def main(pattern: str = "*") -> None:
    """Looks where `kv` saturates, and prints it."""
    from concurrent.futures import ProcessPoolExecutor

    from kvscout_lab.matrix import TRACE, setups

    wanted = [
        setup
        for setup in setups()
        if setup.loads and not setup.rates_of and setup.workload != TRACE and fnmatchcase(setup.name, pattern)
    ]
    with ProcessPoolExecutor(2) as pool:
        for setup, rate in zip(wanted, pool.map(_saturated, wanted), strict=True):
            print(f'    "{setup.name}": {rate:.3g},', flush=True)


def _saturated(setup: Setup) -> float:
    from kvscout_lab.matrix_run import bench_of

    return bench_of(setup, 0).saturation()


if __name__ == "__main__":
    main(*sys.argv[1:])
