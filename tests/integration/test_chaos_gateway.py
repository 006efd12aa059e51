"""A short `make chaos-gateway`: a few faults; requests go on, and nothing stays behind."""

from __future__ import annotations

import pytest
from chaos.gateway import run
from support.seeds import test_seed as seed


@pytest.mark.timeout(240)  # starting and restarting processes takes most of it
async def test_requests_survive_faults_and_leave_nothing_behind() -> None:
    assert await run(4.0, seed()) == []
