"""A short `make chaos-flood`: no honest request fails, no stream breaks, and none waits for much work."""

from __future__ import annotations

import pytest
from chaos.flood import run
from chaos.floods import KINDS
from support import gateway_stack

SECONDS = 0.5
"""Of each flood."""


@pytest.mark.timeout(240)  # a busy machine may need seconds for each of the floods
@pytest.mark.usefixtures("each_mode")
async def test_no_honest_request_fails_or_waits_long_in_a_flood_from_another_process() -> None:
    # Both modes have one transport: each has every other kind.
    assert await run(SECONDS, KINDS[gateway_stack.in_one_process :: 2]) == []
