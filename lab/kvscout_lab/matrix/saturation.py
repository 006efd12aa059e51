"""Search the rate at which `kv` saturates in each setup of the matrix, and print it as `rates.py` has it."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase

from kvscout_lab.matrix.run import experiment_of
from kvscout_lab.matrix.setups import TRACE, Setup, setups


def main(pattern: str = "*") -> None:
    """Search the setups whose names match a pattern."""
    wanted = [
        setup
        for setup in setups()
        if setup.loads and not setup.rates_of and setup.workload != TRACE and fnmatchcase(setup.name, pattern)
    ]
    with ProcessPoolExecutor(2) as pool:
        for setup, rate in zip(wanted, pool.map(_saturated, wanted), strict=True):
            print(f'    "{setup.name}": {rate:.3g},', flush=True)


def _saturated(setup: Setup) -> float:
    return experiment_of(setup, 0).saturation()


if __name__ == "__main__":
    main(*sys.argv[1:])
