"""A short `make chaos-flood`: each flood for a second; no honest request fails, no stream breaks."""

from __future__ import annotations

import pytest
from chaos.flood import run
from chaos.floods import KINDS


@pytest.mark.timeout(240)  # a busy machine may need seconds for each of the floods
async def test_no_honest_request_fails_in_a_flood_from_another_process() -> None:
    assert await run(1.0, KINDS) == []
