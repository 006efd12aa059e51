"""A few seconds of what `make fuzz` does for hours. `KVSCOUT_TEST_SEED` reruns a seed."""

from __future__ import annotations

import os
import random

import pytest
from decoder_fuzz import Decoder, decoders, fuzz

SEED = int(os.environ.get("KVSCOUT_TEST_SEED", random.SystemRandom().randrange(2**32)))
CASES = int(os.environ.get("KVSCOUT_FUZZ_CASES", "3000"))


@pytest.mark.parametrize("decoder", [pytest.param(decoder, id=name) for name, decoder in decoders().items()])
def test_damaged_bytes_are_read_or_refused_and_twins_agree(decoder: Decoder) -> None:
    print(f"KVSCOUT_TEST_SEED={SEED}")
    fuzz(decoder, random.Random(SEED), CASES)
