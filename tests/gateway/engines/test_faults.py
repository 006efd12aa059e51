"""Whose fault it is that an engine did not run a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvscout_common.errors import InternalError
from kvscout_common.http.http import FailureKind, HttpFailed
from kvscout_common.transport.statuses import status_code
from kvscout_gateway.engines.faults import RULES, EngineFailed, Fault, refused, reported, transport_failure
from kvscout_gateway.fronts.refusals import refusal_of


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        ({"message": "long", "type": "BadRequestError", "code": 400}, Fault.REQUEST),
        ({"message": "long", "type": "BadRequestError", "code": "422"}, Fault.REQUEST),
        ({"message": "long", "type": "BadRequestError", "code": None}, Fault.REQUEST),
        ({"object": "error", "message": "long", "type": "BadRequestError", "code": 400}, Fault.REQUEST),
        ({"message": "long", "code": 404}, Fault.REFUSED),
        ({"message": "long", "code": 429}, Fault.OVERLOAD),
        ({"message": "long", "code": 503}, Fault.REFUSED),
        ({"message": "long", "code": 7}, Fault.REFUSED),
        ({"message": "long", "code": [400]}, Fault.REFUSED),
        ("long", Fault.REFUSED),
    ],
)
def test_an_error_in_a_stream_tells_whose_fault_it_is(error: Any, fault: Fault) -> None:
    failed = reported(error)
    assert (failed.fault, failed.message) == (fault, "the engine reports: long")


def test_a_refusal_keeps_what_the_engine_answered() -> None:
    headers, body = [("retry-after", "7"), ("X-Own", "1")], json.dumps({"error": {"message": "busy"}}).encode()
    failed = refused(429, headers, body)
    assert failed.answer == (429, headers, body)
    assert (failed.fault, failed.retry_after_seconds, failed.message) == (
        Fault.OVERLOAD,
        7,
        "engine answered 429: busy",
    )


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b'{"error": 7}', b"[" * 100_000, b"x" * 100_000])
def test_the_text_of_a_refusal_may_be_anything(body: bytes) -> None:
    assert len(str(refused(500, [("Retry-After", "soon")], body))) < 1_000


@pytest.mark.parametrize("kind", FailureKind)
def test_what_is_not_heard_is_the_workers_fault_but_for_want_of_our_own(kind: FailureKind) -> None:
    failed = transport_failure("http://engine", HttpFailed("gone", kind))
    assert (failed.fault is Fault.GATEWAY) == (kind is FailureKind.RESOURCES)
    assert str(failed) == "http://engine: gone"


def test_every_fault_has_a_row_and_every_front_a_status_for_it() -> None:
    rows = {
        fault: (
            rule.payer.value,
            rule.retried,
            rule.ejection.value,
            status_code(rule.error).name,
            refusal_of(EngineFailed("failed", fault=fault).error()).status,
        )
        for fault, rule in RULES.items()
    }
    assert rows == {
        Fault.REQUEST: ("client", False, "never", "INVALID_ARGUMENT", 400),
        Fault.OVERLOAD: ("nobody", True, "backoff", "RESOURCE_EXHAUSTED", 429),
        Fault.REFUSED: ("worker", True, "counts if others run it", "UNAVAILABLE", 503),
        Fault.WORKER: ("worker", True, "counts", "UNAVAILABLE", 503),
        Fault.TIME: ("nobody", False, "never", "DEADLINE_EXCEEDED", 504),
        Fault.GATEWAY: ("gateway", False, "never", "RESOURCE_EXHAUSTED", 429),
        Fault.BALANCER: ("nobody", False, "never", "UNAVAILABLE", 503),
    }
    assert set(rows) == set(Fault)


@pytest.mark.parametrize("fault", Fault)
def test_what_is_tried_elsewhere_ends_the_request_once_its_client_has_output(fault: Fault) -> None:
    failed = EngineFailed("failed", fault=fault)
    assert (failed.final_error(passed=False) is None) == RULES[fault].retried
    ended = failed.final_error(passed=True)
    assert isinstance(ended, InternalError if RULES[fault].retried else RULES[fault].error)
