"""Which workers a proxy's subset names."""

from __future__ import annotations

import pytest

from kvscout_common.worker import WorkerSpec
from kvscout_gateway.fronts.endpoint_picker.addresses import reachable

SPECS = [
    WorkerSpec(worker_id=worker_id, model="m", block_size=16, http_endpoint=url)
    for worker_id, url in (
        ("a0", "http://10.0.0.1:8000"),
        ("a1", "http://10.0.0.1:8001"),
        ("b", "http://10.0.0.11:8000"),
        ("six", "http://[fd00::1]:8000"),
        ("named", "http://engine:8000"),
    )
]


@pytest.mark.parametrize(("subset", "worker_ids"), [
    (None, ["a0", "a1", "b", "six"]),
    (["10.0.0.1:8001", "10.9.9.9:80"], ["a1"]),
    (["10.0.0.1"], ["a0", "a1"]),
    (["10.0.0.1:8000", "10.0.0.11"], ["a0", "b"]),
    (["fd00::1"], ["six"]), (["[fd00:0::1]"], ["six"]), (["[fd00::1]:8000"], ["six"]), (["[fd00::1]:8001"], []),
    (["10.0.0.1:"], []), (["10.0.0"], []), (["engine"], []), (["engine:8000"], []), ([""], []), ([], []),
])  # fmt: skip
def test_an_entry_without_a_port_stands_for_all_ports_of_its_address(
    subset: list[str] | None, worker_ids: list[str]
) -> None:
    assert [spec.worker_id for spec in reachable(SPECS, subset)] == worker_ids
