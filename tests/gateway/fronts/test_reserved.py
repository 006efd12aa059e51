"""What only operators may say is found in a body wherever engines look for it, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest

from kvscout_gateway.fronts.reserved import RESERVED_FIELDS, changes_of, is_reserved_header, reserved_in

TRANSFER = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 1, "remote_block_ids": [1]}


@pytest.mark.parametrize("field", sorted(RESERVED_FIELDS))
@pytest.mark.parametrize("value", ["x", 7, ["a", "b"], {"remote_host": "h"}, None])
def test_a_reserved_field_goes_whatever_its_value(field: str, value: Any) -> None:
    assert changes_of({"model": "m", field: value}, max_priority=None) == {field: None}


def test_what_is_nested_where_engines_look_goes_too() -> None:
    inner = {"kv_transfer_params": TRANSFER, "seed": 1}
    assert changes_of({"vllm_xargs": inner}, max_priority=None) == {"vllm_xargs": {"seed": 1}}
    assert changes_of({"sampling_params": {"extra_args": inner, "n": 2}}, max_priority=None) == {
        "sampling_params": {"extra_args": {"seed": 1}, "n": 2}
    }
    # A batch has a list of them.
    assert changes_of({"sampling_params": [{"extra_args": inner}, {"n": 2}]}, max_priority=None) == {
        "sampling_params": [{"extra_args": {"seed": 1}}, {"n": 2}]
    }


def test_objects_within_one_another_have_an_end() -> None:
    deep: Any = {"rid": "x"}
    for _ in range(900):
        deep = {"extra_body": deep}
    assert "rid" not in str(changes_of({"extra_body": deep}, max_priority=None))


def test_what_is_not_reserved_stays() -> None:
    fields = {
        "model": "m",
        "messages": [{"role": "user", "content": "rid", "kv_transfer_params": 1}],
        "metadata": {"rid": "mine"},
        "vllm_xargs": {"kv": [1, {"a": []}]},
        "cache_salt": "s",
    }
    assert changes_of(fields, max_priority=0) == {}
    assert reserved_in(fields) == []
    assert reserved_in({**fields, "priority": 5, "rid": 1, "vllm_xargs": {"rid": 1}}) == ["rid", "vllm_xargs"]


@pytest.mark.parametrize(
    ("asked", "bound", "given"),
    [(9, 5, 5), (-9, 5, -5), (3, 5, 3), (9, 0, None), (-9, 0, None), ("9", 5, None), (9.5, 5, None), (True, 5, None)],
)
def test_a_priority_is_bounded_above_and_below(asked: Any, bound: int, given: int | None) -> None:
    assert changes_of({"priority": asked}, max_priority=bound) == {"priority": given}
    assert changes_of({"priority": asked}, max_priority=None) == {}


@pytest.mark.parametrize(
    "name",
    ["x-prefiller-host-port", "x-encoder-hosts-ports", "x-smg-routing-key", "x-smg-target-worker", "x-kvscout-tenant",
     "x-data-parallel-rank", "x-data-parallel-host-port", "x-gateway-destination-endpoint", "x-kvscout-pick",
     "x-gateway-destination-endpoint-subset", "x-kv-cache-source-host-port"],
)  # fmt: skip
def test_headers_that_send_a_request_somewhere_are_reserved(name: str) -> None:
    assert is_reserved_header(name)


def test_other_headers_are_not() -> None:
    for name in ("traceparent", "x-request-id", "authorization", "x-my", "content-type", "x-session"):
        assert not is_reserved_header(name)
