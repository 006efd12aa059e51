"""Some seconds of the hostile calls that `make fuzz` makes for hours. `KVSCOUT_TEST_SEED` reruns a seed."""

from __future__ import annotations

import os

import pytest
from support.rpc_fuzz import fuzz_rpcs
from support.seeds import test_seed

SEED = str(test_seed())
SECONDS = float(os.environ.get("KVSCOUT_FUZZ_SECONDS", "12"))


@pytest.mark.timeout(SECONDS + 120)
async def test_whatever_a_hostile_tenant_sends_services_live_and_serve_and_others_are_untouched() -> None:
    fuzz = await fuzz_rpcs(SECONDS, SEED)
    assert sum(fuzz.codes.values()) > 100
