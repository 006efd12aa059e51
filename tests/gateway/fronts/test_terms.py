"""Terms of requests: what headers, bodies and messages say of priority, fairness, deadline and targets."""

from __future__ import annotations

import time
from math import inf
from random import Random
from typing import Any

import pytest
from support.seeds import test_seed

from kvscout_common.errors import DeadlineExceeded, InvalidArgument
from kvscout_common.identity.identity import ANONYMOUS, AccessRole, Identity
from kvscout_common.registry.registry import Registry
from kvscout_common.worker import EngineKind, WorkerSpec
from kvscout_gateway.fronts.headers import to_engine
from kvscout_gateway.fronts.objectives import Objective
from kvscout_gateway.fronts.reserved import is_reserved_header
from kvscout_gateway.fronts.terms import (
    DEADLINE_HEADER,
    FAIRNESS_HEADERS,
    HEADERS,
    ITL_HEADERS,
    OBJECTIVE_HEADERS,
    PRIORITY_HEADER,
    TTFT_HEADERS,
    Terms,
)
from kvscout_gateway.members.catalog import Catalog
from kvscout_gateway.values.prompt import Prompt
from kvscout_gateway.values.request import Request

OBJECTIVES = {"batch": Objective(-10), "chat": Objective(7, 0.5, 0.02)}


def terms(*engines: EngineKind) -> Terms:
    registry = Registry(time.monotonic)
    catalog = Catalog(registry)
    for number, engine in enumerate(engines):
        registry.register(WorkerSpec(worker_id=f"w{number}", model="m", block_size=16, engine=engine))
    return Terms(catalog, OBJECTIVES)


def applied(
    *headers: tuple[str, str], identity: Identity = ANONYMOUS, made: Terms | None = None, own: int = 0, **call: Any
) -> Request:
    request = Request("m", "default", Prompt(1), priority=own)
    return (made or terms()).apply(request, headers, identity, **call)


def test_a_request_without_any_is_the_same_one() -> None:
    plain = Request("m", "default", Prompt(1))
    assert terms().apply(plain, [("content-type", "application/json")], ANONYMOUS, {"model": "m"}) is plain
    assert (plain.priority, plain.caller, plain.deadline) == (0, "", inf)


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ((), -3),
        ((EngineKind.VLLM,), -3),
        ((EngineKind.SGLANG, EngineKind.SGLANG), 3),
        ((EngineKind.VLLM, EngineKind.SGLANG), -3),
    ],
)
def test_the_priority_of_a_body_is_meant_as_its_engine_means_it(engines: tuple[EngineKind, ...], expected: int) -> None:
    assert applied(made=terms(*engines), fields={"priority": 3}).priority == expected


@pytest.mark.parametrize("value", [None, "3", 3.5, True, [3]])
def test_a_priority_of_a_body_that_is_no_number_is_none(value: object) -> None:
    assert applied(fields={"priority": value}).priority == 0


def test_a_header_goes_before_an_objective_and_that_before_the_body_and_the_message() -> None:
    header, objective = (PRIORITY_HEADER, "3"), (OBJECTIVE_HEADERS[0], "chat")
    body = {"priority": 1}
    assert applied(header, objective, fields=body, own=9).priority == 3
    assert applied(objective, fields=body, own=9).priority == 7
    assert applied((OBJECTIVE_HEADERS[1], "unknown"), fields=body, own=9).priority == -1
    assert applied(own=9).priority == 9
    assert applied(objective="batch").priority == -10


def test_a_token_bounds_the_priority_whoever_says_it_and_names_the_caller() -> None:
    bound = Identity(AccessRole.CLIENT, "default", "search", max_priority=5)
    for call in ({"own": 9}, {"objective": "chat"}, {"fields": {"priority": -9}}):
        assert applied(identity=bound, **call).priority == 5
    assert applied((PRIORITY_HEADER, "9"), identity=bound).priority == 5
    assert applied((PRIORITY_HEADER, "-9"), identity=bound).priority == -9
    assert applied(identity=bound).caller == "search"
    assert applied((PRIORITY_HEADER, "9"), identity=bound).caller == "search"


@pytest.mark.parametrize("name", FAIRNESS_HEADERS)
def test_a_fairness_id_comes_by_either_header_or_in_the_message(name: str) -> None:
    assert applied((name.title(), " a ")).fairness_id == "a"
    message = Request("m", "default", Prompt(1), fairness_id="own")
    assert terms().apply(message, [(name, "other")], ANONYMOUS).fairness_id == "own"


def test_the_nearer_deadline_counts() -> None:
    before = time.monotonic()
    header = (DEADLINE_HEADER, "3000000")
    assert applied(header).deadline >= before + 3000
    assert applied(header, seconds_left=5000.0).deadline < before + 4000
    assert applied(header, seconds_left=1000.0).deadline < before + 2000
    assert applied(seconds_left=1000.0).deadline >= before + 1000
    with pytest.raises(DeadlineExceeded):
        applied(seconds_left=0.0).seconds_left()


def test_targets_come_by_header_or_objective_and_the_tighter_counts() -> None:
    by_header = [(TTFT_HEADERS[1], "300"), (ITL_HEADERS[0], "40.5")]
    tight = applied(*by_header, objective="chat")
    assert (tight.ttft_target_seconds, tight.itl_target_seconds) == (0.3, 0.02)
    loose = applied(*by_header)
    assert (loose.ttft_target_seconds, loose.itl_target_seconds) == (0.3, 0.0405)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((PRIORITY_HEADER, value) for value in ("x", "1.5", "2147483648", "9" * 5000, "١")),
        *((DEADLINE_HEADER, value) for value in ("0", "-5", "soon", "nan", "inf", "604800001")),
        *((TTFT_HEADERS[0], value) for value in ("0", "-1", "nan")),
        (FAIRNESS_HEADERS[1], "x" * 257),
    ],
)
def test_a_header_that_is_not_what_it_should_be_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        applied((name, value))
    assert refused.value.field == name


def test_random_headers_are_read_or_refused_by_name() -> None:
    rng = Random(test_seed())
    for _ in range(3000):
        headers = [
            (name, "".join(rng.choices("0123456789.-+einf \x00é", k=rng.randrange(1, 8))))
            for name in rng.sample(sorted(HEADERS), rng.randrange(1, 4))
        ]
        field, request = "", None
        try:
            request = applied(*headers)
        except InvalidArgument as refused:
            field = refused.field or "none"
        assert field in {"", *HEADERS}
        if request is not None:
            assert abs(request.priority) < 2**31
            assert request.deadline > 0
            assert request.ttft_target_seconds > 0


def test_engines_get_none_of_the_headers_of_gateways() -> None:
    sent = [(name, "1") for name in sorted(HEADERS)]
    kept = [name for name, _ in to_engine(sent, (), with_key=False) if name in HEADERS]
    assert (
        kept == [name for name in sorted(HEADERS) if not is_reserved_header(name)] == ["x-slo-tpot-ms", "x-slo-ttft-ms"]
    )
