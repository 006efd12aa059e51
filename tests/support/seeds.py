"""The seed of all random tests of a run: `KVSCOUT_TEST_SEED`, or one drawn anew.

tests/conftest.py puts it into the report of every test that fails. A test that goes through many seeds counts on from
this one, and names the one that failed.
"""

from __future__ import annotations

import os
import random
from typing import Final

VARIABLE: Final = "KVSCOUT_TEST_SEED"
GIVEN: Final = bool(os.environ.get(VARIABLE))
_SEED: Final = int(os.environ.get(VARIABLE) or random.SystemRandom().randrange(2**32))


def test_seed() -> int:
    """Return the seed of this run."""
    return _SEED


test_seed.__test__ = False  # type: ignore[attr-defined]  # a name pytest would collect
