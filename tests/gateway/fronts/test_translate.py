"""Messages of the gateway as plain values and back: numbers as they were typed, tokens as they came."""

from __future__ import annotations

import json
import random
import struct
from array import array
from typing import Any

import pytest
from support.cpu_cost import cpu_seconds

from kvscout.v1 import gateway_pb2
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import MmItem
from kvscout_gateway.fronts.grpc.translate import (
    engine_parameters,
    generate_request,
    pack_tokens,
    route_request,
)
from kvscout_gateway.values.output import Output

FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def asked(**options: float) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(sampling_options=gateway_pb2.SamplingOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FLOATS)
def test_sampling_numbers_reach_the_engine_as_the_caller_wrote_them(name: str) -> None:
    for typed in ("0.7", "0.1", "0.95", "0.3", "1.0", "0.123456", "0.9999999", "1e-07"):
        assert json.dumps(engine_parameters(asked(**{name: float(typed)}))) == json.dumps({name: float(typed)})


def test_what_was_no_short_number_stays_the_same_number() -> None:
    rng = random.Random(5)
    for _ in range(2_000):
        (value,) = struct.unpack("<f", struct.pack("<I", rng.randrange(1, 0x7F7FFFFF)))
        passed = engine_parameters(asked(repetition_penalty=value))["repetition_penalty"]
        assert struct.pack("<f", passed) == struct.pack("<f", value)


@pytest.mark.parametrize("kind", [gateway_pb2.GenerateRequest, gateway_pb2.RouteRequest])
def test_tokens_are_packed_as_they_came_whatever_else_the_message_has(
    kind: type[gateway_pb2.GenerateRequest],
) -> None:
    rng = random.Random(7)
    for count in (0, 1, 2, 1_000):
        token_ids = [rng.randrange(1 << 32) for _ in range(count)]
        request = kind(model="m", tenant="t", token_ids=token_ids, pinned_worker_id="w", required_labels={"a": "b"})
        # A field of a later release, behind all others.
        request.MergeFromString(bytes([0xFA, 0x3F, 3]) + b"new")
        before = request.SerializeToString()
        assert pack_tokens(request, 1_000) == array("I", token_ids).tobytes()
        assert request.SerializeToString() == before


def test_packing_a_prompt_makes_no_object_of_each_token() -> None:
    request = gateway_pb2.GenerateRequest(token_ids=range(1_000_000))
    one_by_one = cpu_seconds(lambda: array("I", request.token_ids))
    assert cpu_seconds(lambda: pack_tokens(request, 1_000_000)) < one_by_one / 2


def test_a_prompt_above_the_limit_is_refused_by_the_field_that_has_it() -> None:
    with pytest.raises(InvalidArgument, match="11 input tokens") as refused:
        generate_request(gateway_pb2.GenerateRequest(model="m", token_ids=range(11)), 10)
    assert refused.value.field == "token_ids"
    with pytest.raises(InvalidArgument, match="16 input tokens") as refused:
        route_request(gateway_pb2.RouteRequest(model="m", block_hashes=[1, 2, 3, 4], block_size=4), 10)
    assert refused.value.field == "block_hashes"


def test_multimodal_items_are_part_of_what_is_placed() -> None:
    request = gateway_pb2.GenerateRequest(model="m", token_ids=[1], engine_fields="{}")
    request.mm_items.add(id="cat", offset=3, length=10)
    assert generate_request(request, 10).prompt.mm_items == (MmItem("cat", 3, 10),)


def test_the_gateways_own_fields_win_over_none_of_the_callers() -> None:
    request = asked(temperature=0.5)
    request.engine_fields = '{"guided_regex": "a+", "nested": {"n": 2}}'
    assert engine_parameters(request) == {"guided_regex": "a+", "nested": {"n": 2}, "temperature": 0.5}
    for hidden in ('{"kv_transfer_params": {}}', '{"rid": "a"}', '{"priority": 1}', '{"vllm_xargs": {"rid": 1}}'):
        request.engine_fields = hidden
        with pytest.raises(InvalidArgument, match="cannot be set there"):
            engine_parameters(request)
    request.engine_fields = '{"temperature": 1}'
    with pytest.raises(InvalidArgument, match="temperature cannot be set there"):
        engine_parameters(request)


def test_a_priority_above_what_the_token_allows_counts_as_what_it_allows() -> None:
    route = gateway_pb2.RouteRequest(model="m", token_ids=[1], priority=9)
    generate = gateway_pb2.GenerateRequest(model="m", token_ids=[1], priority=9)
    for bound, given in ((None, 9), (20, 9), (5, 5), (0, 0)):
        assert route_request(route, 100, max_priority=bound).priority == given
        assert generate_request(generate, 100, max_priority=bound).priority == given
    route.priority = -3
    assert route_request(route, 100, max_priority=0).priority == -3


@pytest.mark.parametrize(
    ("text", "words"),
    [("[" * 99_999, "within one another"), ('{"a":[' + "[]," * 200_000 + "0]}", "values"), (" " * 2**21, "characters")],
    ids=["deep", "many", "long"],
)
def test_fields_of_the_engine_with_too_much_in_them_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as raised:
        engine_parameters(gateway_pb2.GenerateRequest(engine_fields=text))
    assert raised.value.field == "engine_fields"


def test_what_a_caller_of_route_says_of_an_output_is_passed_on() -> None:
    route = gateway_pb2.RouteRequest(
        model="m",
        token_ids=[1],
        expected_output_tokens=7,
        max_output_tokens=9,
        output_class="c" * 64,
        estimate_prefill_complete=True,
    )
    assert route_request(route, 10).output == Output(7, 9, "c" * 64, unseen=True)
    assert route_request(gateway_pb2.RouteRequest(model="m", token_ids=[1]), 10).output == Output()
    route.output_class = "c" * 65
    with pytest.raises(InvalidArgument, match="output_class: must not be longer than 64 characters"):
        route_request(route, 10)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({"max_tokens": 9}, 0),
        ({"max_tokens": 9, "ignore_eos": True}, 9),
        ({"max_tokens": 9, "min_tokens": 9}, 9),
        ({"max_tokens": 9, "min_tokens": 8}, 0),
        ({"max_tokens": 9, "ignore_eos": True, "stop": ["a"]}, 0),
        ({"max_tokens": 9, "ignore_eos": True, "stop_token_ids": [1]}, 0),
    ],
)
def test_generate_expects_an_output_only_where_nothing_else_can_end_it(stop: dict[str, Any], expected: int) -> None:
    conditions = gateway_pb2.StopConditions(**stop)
    request = generate_request(gateway_pb2.GenerateRequest(model="m", token_ids=[1], stop_conditions=conditions), 10)
    assert request.output == Output(expected, 9, "generate")
