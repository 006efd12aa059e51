"""Stacks in both modes: services of their own, and gateway, indexer and scheduler in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import gateway_stack

SERVICES, ONE_PROCESS = "services", "one-process"


@pytest.fixture(scope="module", params=[SERVICES, ONE_PROCESS])
def each_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run what follows in each mode; fixtures with a stack of their own depend on it."""
    gateway_stack.in_one_process = request.param == ONE_PROCESS
    yield
    gateway_stack.in_one_process = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests marked `services_only` out of the second mode."""
    items[:] = [item for item in items if not (_in_one_process(item) and item.get_closest_marker("services_only"))]


def _in_one_process(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("each_mode") == ONE_PROCESS
