"""Random operations: every implementation equals the brute-force model, and the others, after every step.

`KVSCOUT_INDEX_SEQUENCES` sets how many sequences run, `KVSCOUT_INDEX_STEPS` their mean length, and
`KVSCOUT_INDEX_SEED` reruns one; both numbers are in the failure's message.
"""

from __future__ import annotations

import os
import random

import pytest
from support.index_scenarios import IndexFactory
from support.index_world import run_world

from kvscout_blocks.index.native import NativeIndex
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common.hashing import native_available

SEQUENCES = int(os.environ.get("KVSCOUT_INDEX_SEQUENCES", "400"))
PARTS = 4
"""Of the sequences, which tests that run side by side share."""
MEAN_STEPS = int(os.environ.get("KVSCOUT_INDEX_STEPS", "30"))
ONE_SEED = os.environ.get("KVSCOUT_INDEX_SEED")

FACTORIES: dict[str, IndexFactory] = {"reference": ReferenceIndex}
WHICH = "reference, for the extension is not built"
if native_available():
    FACTORIES["native"] = NativeIndex
    WHICH = "native and reference"


@pytest.mark.slow
@pytest.mark.timeout(0 if "KVSCOUT_INDEX_SEQUENCES" in os.environ else 300)
@pytest.mark.parametrize("part", range(1 if ONE_SEED else PARTS))
@pytest.mark.parametrize("factories", [pytest.param(FACTORIES, id=WHICH)])
def test_random_operations_agree_with_the_model(factories: dict[str, IndexFactory], part: int) -> None:
    base = int(ONE_SEED) if ONE_SEED else random.SystemRandom().randrange(2**32)
    sequences = 1 if ONE_SEED else SEQUENCES // PARTS
    steps = sum(run_world(base + n, factories, mean_steps=MEAN_STEPS) for n in range(sequences))
    print(f"KVSCOUT_INDEX_SEED={base} ff.: {sequences} sequences, {steps} steps")
