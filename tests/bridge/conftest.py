"""Each way through NATS."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["nats-core", "jetstream"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each way through NATS."""
    chosen: str = request.param
    return chosen
