"""Rows of dialects: usage in whole answers, and rows of APIs that are unlike completions."""

from __future__ import annotations

from typing import Any

import pytest
from support.decoder_fuzz import passed_on
from support.http_peers import event

from kvscout_common.hashing import native_available
from kvscout_common.http.dialect import Dialect, Usage
from kvscout_common.http.event_relay import EventRelay
from kvscout_common.http.http import Form, StreamReport
from kvscout_gateway.engines.usage import output_tokens_of
from kvscout_gateway.values.dialects import ANTHROPIC, API_DIALECTS, OPENAI, SGLANG, ErrorShape, errors_of
from kvscout_gateway.values.dialects import OPENAI_RESPONSES as RESPONSES


@pytest.mark.parametrize(
    ("dialect", "account", "usage"),
    [
        (OPENAI, {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(9, 4)),
        (OPENAI, {"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9, None)),
        (OPENAI, {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": "4"}}, Usage(9, None)),
        (OPENAI, {"prompt_tokens": "9"}, None),
        (OPENAI, {}, None),
        (SGLANG, {"prompt_tokens": 9, "cached_tokens": 0}, Usage(9, 0)),
        (SGLANG, {"prompt_tokens": 9}, Usage(9, None)),
        (SGLANG, {"prompt_tokens": 9, "completion_tokens": 7}, Usage(9, None, 7)),
        (OPENAI, {"prompt_tokens": 9, "completion_tokens": 7}, Usage(9, None, 7)),
        (OPENAI, {"prompt_tokens": 9, "completion_tokens": -1}, Usage(9, None)),
        (OPENAI, {"prompt_tokens": 9, "completion_tokens": 10**30}, Usage(9, None)),
        (ANTHROPIC, {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 7}, Usage(9, 4, 7)),
        (ANTHROPIC, {"input_tokens": 9, "output_tokens": 7}, Usage(9, None, 7)),
        (ANTHROPIC, {"input_tokens": 5, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 4}, Usage(9, 0)),
        (RESPONSES, {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, Usage(9, 4)),
    ],
)
def test_what_is_not_said_is_unknown_not_zero(dialect: Dialect, account: dict[str, Any], usage: Usage | None) -> None:
    assert dialect.usage({"meta_info" if dialect is SGLANG else "usage": account}) == usage


def test_a_whole_answer_has_it_in_a_field_of_its_own() -> None:
    assert SGLANG.usage({"meta_info": [], "usage": {"prompt_tokens": 2}}) is None


def test_the_output_of_an_unknown_api_is_the_first_count_that_is_one() -> None:
    assert output_tokens_of({"completion_tokens": 0, "output_tokens": 3}) == 3
    assert output_tokens_of({"completion_tokens": True}) == 0


def named(kind: str, **fields: Any) -> bytes:
    """Return an event with a name, as newer APIs write it."""
    return b"event: %s\n" % kind.encode() + event({"type": kind, **fields})


PREAMBLE = {
    ANTHROPIC: named("message_start", message={"usage": {"input_tokens": 5, "cache_read_input_tokens": 4}})
    + named("ping")
    + named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    RESPONSES: named(
        "response.created", response={"id": "resp_1", "status": "in_progress", "usage": None, "error": None}
    )
    + named("response.in_progress", response={"id": "resp_2"}),
}
OUTPUT = {
    ANTHROPIC: named("content_block_delta", delta={"type": "text_delta", "text": "a"})
    + named("content_block_delta", delta={"type": "thinking_delta", "thinking": "b"}),
    RESPONSES: named("response.output_text.delta", delta="a") + named("response.reasoning_text.delta", delta="b"),
}
END = {
    ANTHROPIC: named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 7})
    + named("message_stop"),
    RESPONSES: named(
        "response.completed",
        response={"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 7}},
    ),
}
FAILURE = {
    ANTHROPIC: named("error", error={"type": "overloaded_error"}),
    RESPONSES: named("error", code="server_error", message="overloaded_error"),
}


def relays(dialect: Dialect) -> list[Any]:
    """Return the relays of both languages."""
    found: list[Any] = [EventRelay(Form.BYTES, dialect, None, StreamReport())]
    if native_available():
        import kvscout_native
        from kvscout_common.http.native_http_client import native_dialect

        found.append(kvscout_native.EventRelay(Form.BYTES.value, native_dialect(dialect)))
    return found


@pytest.mark.parametrize("dialect", [ANTHROPIC, RESPONSES], ids=["anthropic", "responses"])
def test_a_stream_with_named_events_is_read_by_its_row_alone(dialect: Dialect) -> None:
    for relay in relays(dialect):
        preamble, output, end = PREAMBLE[dialect], OUTPUT[dialect], END[dialect]
        passed, _, failed, report = passed_on(relay, [preamble, output, end])
        assert (passed, failed) == ([b"", preamble + output, end, b""], False)
        assert (report["outputs"], report["done"], report["error"]) == (2, True, b"")
        assert (report["prompt_tokens"], report["cached_tokens"], report["output_tokens"]) == (9, 4, 7)
        assert report["answer_id"] == ("resp_1" if dialect is RESPONSES else "")


@pytest.mark.parametrize("dialect", [ANTHROPIC, RESPONSES], ids=["anthropic", "responses"])
def test_an_error_before_any_output_is_kept_for_another_worker(dialect: Dialect) -> None:
    for relay in relays(dialect):
        passed, over, _, report = passed_on(relay, [PREAMBLE[dialect], FAILURE[dialect]])
        assert (b"".join(passed), over) == (b"", True)
        assert "overloaded_error" in report["error"]


@pytest.mark.parametrize(("answer_id", "known"), [("r" * 256, True), ("r" * 257, False), (7, False), (None, False)])
def test_a_name_is_a_short_text_or_none(answer_id: Any, known: bool) -> None:
    for relay in relays(RESPONSES):
        first = named("response.created", response={"id": answer_id}) + OUTPUT[RESPONSES]
        *_, report = passed_on(relay, [first])
        assert report["answer_id"] == (answer_id if known else "")


@pytest.mark.parametrize(
    "call",
    [
        (
            ANTHROPIC,
            named("content_block_start", content_block={"type": "tool_use", "id": "t", "name": "look", "input": {}}),
        ),
        (ANTHROPIC, named("content_block_delta", delta={"type": "input_json_delta", "partial_json": "{"})),
        (
            RESPONSES,
            named("response.output_item.added", item={"type": "function_call", "name": "look", "arguments": ""}),
        ),
        (RESPONSES, named("response.function_call_arguments.delta", delta="{")),
    ],
)
def test_the_call_of_a_tool_is_output(call: tuple[Dialect, bytes]) -> None:
    dialect, first = call
    for relay in relays(dialect):
        passed, *_, report = passed_on(relay, [PREAMBLE[dialect], first])
        assert (passed[:2], report["outputs"]) == ([b"", PREAMBLE[dialect] + first], 1)


def test_every_dialect_says_what_its_path_its_limits_and_its_errors_are() -> None:
    for path, api in API_DIALECTS.items():
        assert path == api.path
        assert api.limits
        assert errors_of(path) is errors_of(f"{path}/below") is api.errors
        assert any(api.prefill.get(limit) == 1 for limit in api.limits)
        assert not api.count_path or errors_of(api.count_path) is api.errors
    assert errors_of("/v1/messages_of_others") is errors_of("/v1/embeddings") is ErrorShape.OPENAI
