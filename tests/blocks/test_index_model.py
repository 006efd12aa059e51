"""Random operations: every implementation equals the brute-force model, and the others, after every step.

`KVSCOUT_INDEX_SEQUENCES` sets how many sequences run, `KVSCOUT_INDEX_STEPS` their mean length; the failure's message
says with which values one is run again.
"""

from __future__ import annotations

import os

import pytest
from support.index_scenarios import IndexFactory
from support.index_world import run_world
from support.seeds import test_seed

from kvscout_blocks.index.native import NativeIndex
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common.hashing import native_available

SEQUENCES = int(os.environ.get("KVSCOUT_INDEX_SEQUENCES", "400"))
PARTS = 4
"""Of the sequences, which tests that run side by side share."""
MEAN_STEPS = int(os.environ.get("KVSCOUT_INDEX_STEPS", "30"))

FACTORIES: dict[str, IndexFactory] = {"reference": ReferenceIndex}
WHICH = "reference, for the extension is not built"
if native_available():
    FACTORIES["native"] = NativeIndex
    WHICH = "native and reference"


@pytest.mark.slow
@pytest.mark.timeout(0 if "KVSCOUT_INDEX_SEQUENCES" in os.environ else 300)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("factories", [pytest.param(FACTORIES, id=WHICH)])
def test_random_operations_agree_with_the_model(factories: dict[str, IndexFactory], part: int) -> None:
    seeds = range(test_seed() + part, test_seed() + SEQUENCES, PARTS)
    steps = sum(run_world(seed, factories, mean_steps=MEAN_STEPS) for seed in seeds)
    print(f"{len(seeds)} sequences, {steps} steps")
