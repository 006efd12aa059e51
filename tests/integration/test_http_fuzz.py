"""Some seconds of the hostile HTTP requests that `make fuzz` makes for hours. `KVSCOUT_TEST_SEED` reruns a seed."""

from __future__ import annotations

import os
import random

import pytest
from support.http_fuzz import fuzz_http

SEED = os.environ.get("KVSCOUT_TEST_SEED", str(random.SystemRandom().randrange(2**32)))
SECONDS = float(os.environ.get("KVSCOUT_FUZZ_SECONDS", "8"))


@pytest.mark.timeout(SECONDS + 120)
async def test_whatever_a_hostile_tenant_sends_over_http_others_are_served_and_untouched() -> None:
    print(f"KVSCOUT_TEST_SEED={SEED}")
    fuzz = await fuzz_http(SECONDS, SEED)
    assert sum(fuzz.statuses.values()) > 100
