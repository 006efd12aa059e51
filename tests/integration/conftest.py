"""Stacks in both modes: services of their own, and gateway, indexer and scheduler in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import gateway_stack


@pytest.fixture(scope="module", params=["services", "one-process"])
def each_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run what follows in each mode; fixtures with a stack of their own depend on it."""
    gateway_stack.in_one_process = request.param == "one-process"
    yield
    gateway_stack.in_one_process = False
