"""Some seconds of the hostile HTTP requests that `make fuzz` makes for hours. `KVSCOUT_TEST_SEED` reruns a seed."""

from __future__ import annotations

import os

import pytest
from support.http_fuzz import fuzz_http
from support.seeds import test_seed

SEED = str(test_seed())
SECONDS = float(os.environ.get("KVSCOUT_FUZZ_SECONDS", "8"))


@pytest.mark.timeout(SECONDS + 120)
async def test_whatever_a_hostile_tenant_sends_over_http_others_are_served_and_untouched() -> None:
    fuzz = await fuzz_http(SECONDS, SEED)
    assert sum(fuzz.statuses.values()) > 100
