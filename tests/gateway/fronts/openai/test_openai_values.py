"""Headers on their way, errors in OpenAI's shape, sessions, keys and thresholds: all without a connection."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvscout.v1 import types_pb2
from kvscout_common.errors import (
    AlreadyExists,
    Draining,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    KvscoutError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from kvscout_common.identity.identity import AccessRole, Identity, TokenTable, _digest
from kvscout_gateway.engines.faults import EngineFailed, refused
from kvscout_gateway.fronts import headers as proxied
from kvscout_gateway.fronts.access import caller_of
from kvscout_gateway.fronts.body import JsonBody
from kvscout_gateway.fronts.openai.thresholds import change_of, shown
from kvscout_gateway.fronts.refusals import event_of, refusal_of

TOKENS = TokenTable(
    {
        _digest("admin"): Identity(AccessRole.ADMIN, "*"),
        _digest("client"): Identity(AccessRole.CLIENT, "team"),
        _digest("viewer"): Identity(AccessRole.VIEWER, "team"),
    }
)


def behind(answer: tuple[int, Any, bytes]) -> KvscoutError:
    """An exchange's error with an engine's answer behind it."""
    error = Unavailable("engine answered", retry_after_seconds=1.0)
    error.__cause__ = refused(*answer)
    return error


def test_hop_by_hop_headers_keys_and_ranks_do_not_reach_the_engine() -> None:
    client = [
        ("Host", "h"), ("Content-Length", "5"), ("Connection", "close, X-Hop"), ("X-Hop", "1"), ("TE", "trailers"),
        ("Authorization", "Bearer k"), ("X-Api-Key", "k"), ("X-Data-Parallel-Rank", "7"), ("Accept-Encoding", "br"),
        ("X-Kvscout-Tenant", "t"), ("Cookie", "c"), ("Content-Type", "text/x"), ("traceparent", "00-1"), ("X-My", "ä"),
    ]  # fmt: skip
    own = [("Content-Type", "application/json"), ("X-Request-Id", "r")]
    assert proxied.to_engine(client, own, with_key=False) == [
        *own,
        ("Accept-Encoding", "identity"),
        ("traceparent", "00-1"),
        ("X-My", "ä"),
    ]


def test_the_clients_key_is_the_engines_where_the_gateway_has_none() -> None:
    client = [("authorization", "Bearer k")]
    assert ("authorization", "Bearer k") in proxied.to_engine(client, [], with_key=True)
    assert ("authorization", "Bearer k") not in proxied.to_engine(
        client, [("Authorization", "Bearer e")], with_key=True
    )


def test_what_frames_an_answer_is_not_passed_on() -> None:
    engine = [("Content-Type", "x"), ("Transfer-Encoding", "chunked"), ("Server", "uvicorn"), ("X-Request-Id", "r")]
    assert proxied.to_client(engine) == [("Content-Type", "x"), ("X-Request-Id", "r")]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidArgument("bad", field="model"), 400, "invalid_request_error"),
        (Unauthenticated("who"), 401, "authentication_error"),
        (PermissionDenied("no"), 403, "permission_error"),
        (NotFound("no such"), 404, "invalid_request_error"),
        # Libraries of clients send again what is answered with 409.
        (AlreadyExists("taken"), 400, "invalid_request_error"),
        (FailedPrecondition("not here"), 400, "invalid_request_error"),
        (ResourceExhausted("busy", retry_after_seconds=2.2), 429, "rate_limit_error"),
        (InternalError("oh"), 500, "server_error"),
        (Unavailable("away"), 503, "service_unavailable_error"),
        (Draining("leaving"), 503, "service_unavailable_error"),
        (KvscoutError("odd"), 500, "server_error"),
    ],
)
def test_errors_have_openais_shape(error: KvscoutError, status: int, kind: str) -> None:
    refusal = refusal_of(error)
    document = json.loads(refusal.body)["error"]
    assert (refusal.status, document["type"], document["param"]) == (status, kind, error.field)
    assert document["message"] == str(error)
    retry = dict(refusal.headers).get("Retry-After")
    assert retry == ("3" if status == 429 else "1" if status == 503 else None)


def test_an_unexpected_error_says_nothing_of_itself() -> None:
    refusal = refusal_of(ZeroDivisionError("secret"))
    assert (refusal.status, b"secret" in refusal.body) == (500, False)


def test_what_an_engine_says_of_a_request_is_passed_on_in_its_own_words() -> None:
    body = b'{"error": {"message": "too long", "x": 1}}'
    headers = [("Content-Type", "application/json"), ("Retry-After", "9"), ("Server", "uvicorn")]
    refusal = refusal_of(behind((400, headers, body)))
    assert tuple(refusal) == (400, headers[:2], body)
    assert json.loads(event_of(refusal).removeprefix(b"\n\ndata: ")) == json.loads(body)


@pytest.mark.parametrize("status", [302, 401, 403, 407])
def test_what_an_engine_says_of_our_key_is_not_told_to_clients(status: int) -> None:
    assert refusal_of(behind((status, [], b"key"))).status == 503


def test_an_event_of_an_error_is_one_whatever_the_engine_said() -> None:
    error = Unavailable("x")
    error.__cause__ = EngineFailed("y", answer=(500, [], b"<html>"))
    event = event_of(refusal_of(error))
    assert "error" in json.loads(event.strip().removeprefix(b"data: "))
    assert event.endswith(b"\n\n")


def test_a_key_is_a_tenant_and_a_role() -> None:
    assert caller_of([("Authorization", "Bearer client")], TOKENS).tenant == "team"
    assert caller_of([("X-Api-Key", "client")], TOKENS).tenant == "team"
    admin = caller_of([("authorization", "bearer admin"), ("X-Kvscout-Tenant", "other")], TOKENS)
    assert (admin.tenant, admin.is_admin) == ("other", True)
    assert caller_of([("authorization", "Bearer admin")], TOKENS).tenant == "default"
    assert caller_of([], None).tenant == "default"
    viewer = caller_of([("Authorization", "Bearer viewer")], TOKENS)
    viewer.require("ListWorkers")
    with pytest.raises(PermissionDenied):
        viewer.require("Generate")


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ([], Unauthenticated),
        ([("Authorization", "Bearer wrong")], Unauthenticated),
        ([("Authorization", "Basic client")], Unauthenticated),
        ([("X-Api-Key", "wrong")], Unauthenticated),
        ([("X-Api-Key", "client"), ("X-Kvscout-Tenant", "other")], PermissionDenied),
        ([("X-Api-Key", "admin"), ("X-Kvscout-Tenant", "*")], InvalidArgument),
        ([("X-Api-Key", "admin"), ("X-Kvscout-Tenant", "a\x01")], InvalidArgument),
    ],
)
def test_who_has_no_key_for_it_is_refused(headers: list[tuple[str, str]], error: type[KvscoutError]) -> None:
    with pytest.raises(error):
        caller_of(headers, TOKENS)


def test_thresholds_are_set_cleared_and_read() -> None:
    read = change_of(JsonBody(b'{"model": "m"}'), "t")
    assert read == types_pb2.GetBusyThresholdsRequest(model="m", tenant="t")
    body = b'{"model": "m", "active_decode_blocks_threshold": 0.85, "active_prefill_tokens_threshold": null}'
    assert change_of(JsonBody(body), "t") == types_pb2.SetBusyThresholdsRequest(
        model="m", tenant="t", active_decode_blocks_threshold=0.85, clear=["active_prefill_tokens_threshold"]
    )
    assert shown(types_pb2.BusyThresholds(model="m", active_prefill_tokens_threshold=1000)) == {
        "model": "m",
        "active_decode_blocks_threshold": None,
        "active_prefill_tokens_threshold": 1000,
    }


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "model"),
        ({"model": 1}, "model"),
        ({"model": "m", "active_decode_blocks_threshold": "0.5"}, "active_decode_blocks_threshold"),
        ({"model": "m", "active_decode_blocks_threshold": True}, "active_decode_blocks_threshold"),
        ({"model": "m", "active_prefill_tokens_threshold": 1.5}, "active_prefill_tokens_threshold"),
        ({"model": "m", "active_prefill_tokens_threshold": -1}, "active_prefill_tokens_threshold"),
        ({"model": "m", "active_prefill_tokens_threshold": 1 << 64}, "active_prefill_tokens_threshold"),
    ],
)
def test_thresholds_that_are_none_are_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        change_of(JsonBody(json.dumps(body).encode()), "t")


def test_any_text_can_be_the_value_of_a_header() -> None:
    assert proxied.as_value("indexer a:1: sl\u00f6w\r\nSet-Cookie: x\x00y\t z") == "indexer a:1: sl?w Set-Cookie: x y z"
    assert len(proxied.as_value("\u20ac" * 5_000)) == proxied.MAX_VALUE
