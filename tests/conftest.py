"""What carries the calls of the tests themselves: the same as those of the services that they start."""

import os

import pytest

from kvscout_common.transport import Transport, choose, default_transport
from kvscout_common.variables import PREFIX

choose(Transport(os.environ.get(f"{PREFIX}rpc_transport", default_transport())))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that may take minutes come first, or all others would be through when the last of them begins."""

    def longest(item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        return mark.args[0] if mark is not None else 0.0

    items.sort(key=longest, reverse=True)
