"""A short `make chaos-flood`, in both modes: no honest request fails, no stream breaks, and none waits for much work."""

from __future__ import annotations

import pytest
from chaos.flood import run
from chaos.floods import KINDS

SECONDS = 0.5
"""Of each flood."""


@pytest.mark.timeout(240)  # a busy machine may need seconds for each of the floods
@pytest.mark.usefixtures("each_mode")
async def test_no_honest_request_fails_or_waits_long_in_a_flood_from_another_process() -> None:
    assert await run(SECONDS, KINDS) == []
