"""A short `make chaos-serve`: each kind of fault that is over quickly; all agree exactly, and no request is lost."""

from __future__ import annotations

import pytest
from chaos.serve import run
from support.seeds import test_seed as seed


@pytest.mark.timeout(180)  # on a busy machine, starting processes takes most of it
async def test_several_processes_agree_exactly_after_faults_and_lose_no_request() -> None:
    assert await run(3.0, seed(), faults=("stop", "cut from the gateway", "NATS killed")) == []
