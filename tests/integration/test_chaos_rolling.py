"""A short `make chaos-rolling`: every service replaced once; no client notices."""

from __future__ import annotations

import pytest
from chaos import rolling
from support.seeds import test_seed as seed


@pytest.mark.timeout(300)  # ending and starting processes takes most of it
async def test_a_rolling_upgrade_costs_no_request_of_clients_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "SETTLE_SECONDS", 1.0)
    assert await rolling.run(1, seed()) == []
