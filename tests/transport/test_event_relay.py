"""A stream of events on its way, in whatever chunks it arrives."""

import json
from typing import Any

import pytest
from support.http_peers import DONE, USAGE, WHOLE, event, tokens

from kvscout.v1 import gateway_pb2
from kvscout_client import FinishReason, decode
from kvscout_common.hashing import native_available
from kvscout_common.http.chunk_documents import MAX_DOCUMENT_BYTES
from kvscout_common.http.dialect import Dialect, Usage
from kvscout_common.http.event_relay import EventRelay
from kvscout_common.http.http import MAX_EVENT_BYTES, MAX_WITHHELD_BYTES, Form, StreamReport
from kvscout_gateway.values.dialects import OPENAI

ROLE = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})


def relay(form: Form = Form.MESSAGES, max_tokens: int | None = None, dialect: Dialect = OPENAI) -> EventRelay:
    return EventRelay(form, dialect, max_tokens, StreamReport())


def fed(relay: EventRelay, data: bytes, size: int = 1 << 30) -> list[bytes]:
    """What is passed on of a whole stream that comes in chunks of this size."""
    passed = []
    for at in range(0, len(data), size):
        if not relay.over:
            passed.append(relay.feed(data[at : at + size], 1.0 + at))
    passed.append(relay.end(9.0))
    return [part for part in passed if part]


def merged(messages: list[bytes]) -> gateway_pb2.GenerateResponse:
    """All of the output."""
    whole = gateway_pb2.GenerateResponse()
    for message in map(gateway_pb2.GenerateResponse.FromString, messages):
        text = whole.text + message.text
        whole.MergeFrom(message)
        whole.text = text
    return whole


@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
@pytest.mark.parametrize("form", list(Form))
def test_a_stream_is_the_same_in_pieces_of_any_size(size: int, form: Form) -> None:
    sent = b": ping\n\n" + ROLE + tokens(1, text="a") + b": ping\n\n" + tokens(2, 3, finish="stop", text="b")
    running = relay(form)
    got = fed(running, sent + USAGE + DONE, size)
    report = running.report
    assert (report.events, report.outputs, report.tokens, report.finish, report.done) == (4, 2, 3, "stop", True)
    assert report.usage == Usage(9, 4, 3)
    assert not running.failure
    if form is Form.MESSAGES:
        usage = gateway_pb2.Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=4)
        assert merged(got) == gateway_pb2.GenerateResponse(
            token_ids=[1, 2, 3],
            text="ab",
            finish_reason=gateway_pb2.FINISH_REASON_STOP,
            engine_finish_reason="stop",
            usage=usage,
        )
    else:
        assert b"".join(got) == sent + (USAGE if form is Form.BYTES else b"") + DONE


def test_what_arrives_at_once_is_one_message() -> None:
    assert len(fed(relay(), WHOLE)) == 1


def test_engines_that_end_lines_with_crlf_or_leave_the_space_out_are_understood() -> None:
    running = relay()
    got = fed(running, b'data:{"choices": [{"token_ids": [5]}]}\r\n\r\ndata:[DONE]\r\n\r\n')
    assert (list(merged(got).token_ids), running.report.done) == ([5], True)


def test_cached_tokens_that_are_not_reported_are_unknown_not_zero() -> None:
    usage = merged(fed(relay(), event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}))).usage
    assert (usage.prompt_tokens, usage.HasField("cached_tokens")) == (3, False)


def test_nothing_is_passed_on_before_something_is_said() -> None:
    running = relay(Form.BYTES)
    assert running.feed(b": ping\n\n" + ROLE, 1.0) == b""
    assert running.feed(tokens(1), 2.0) == b": ping\n\n" + ROLE + tokens(1)
    assert running.report.first_output_at == 2.0


def test_of_a_stream_that_says_nothing_little_is_kept() -> None:
    running, comment = relay(Form.BYTES), b":%s\n" % (b"x" * 1000)
    passed = b"".join(running.feed(comment, 1.0) for _ in range(100))
    assert 0 < len(comment) * 100 - len(passed) <= MAX_WITHHELD_BYTES + len(comment)


def test_an_error_that_is_null_is_none() -> None:
    running = relay()
    assert merged(fed(running, event({"error": None, "choices": [{"token_ids": [1]}]}))).token_ids == [1]
    assert not running.report.error


def test_an_error_comes_after_the_output_before_it() -> None:
    running = relay()
    got = fed(running, tokens(1) + event({"error": {"message": "gone"}}) + tokens(2))
    assert list(merged(got).token_ids) == [1]
    assert json.loads(running.report.error) == {"message": "gone"}


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(
    ("after", "finish"),
    [
        (tokens(4, 5), "length"),
        (tokens(4, 5, finish="stop"), "length"),
        (tokens(text="x") * 4, "length"),
        (tokens(finish="stop") + tokens(4), "stop"),
    ],
)
def test_output_past_the_end_is_left_out(size: int, after: bytes, finish: str) -> None:
    running = relay(max_tokens=3)
    got = merged(fed(running, tokens(1, text="a") + tokens(2, 3, text="b") + after + WHOLE, size))
    assert (list(got.token_ids), got.text.rstrip("x"), got.engine_finish_reason) == ([1, 2, 3], "ab", finish)
    assert len(got.text) <= 2 + 3
    assert running.report.overrun


def test_text_that_was_held_back_comes_with_the_end() -> None:
    running = relay(max_tokens=1)
    got = merged(fed(running, tokens(1, text="a") + tokens(finish="length", text="b") + DONE))
    assert (got.text, got.engine_finish_reason, running.report.overrun) == ("ab", "length", False)


def test_as_many_as_were_asked_for_are_no_overrun() -> None:
    running = relay(max_tokens=3)
    assert list(merged(fed(running, WHOLE)).token_ids) == [1, 2, 3]
    assert not running.report.overrun


@pytest.mark.parametrize(
    "payload",
    [
        b"data: {\n",
        b"data: 7\n",
        b"data: []\n",
        b'data: {"choices": [7]}\n',
        b'data: {"choices": {"a": 1}}\n',
        b'data: {"choices": [{"token_ids": ["x"]}]}\n',
        b'data: {"choices": [{"token_ids": [-1]}]}\n',
        b'data: {"choices": [{"token_ids": [true]}]}\n',
        b'data: {"choices": [{"token_ids": [4294967296]}]}\n',
        b'data: {"choices": [{"token_ids": 5}]}\n',
        b'data: {"choices": [{"text": 5}]}\n',
        b'data: {"usage": {"completion_tokens": 1}}\n',
        b'data: {"usage": 5}\n',
        b"data: " + b"[" * 100_000 + b"\n",
        b"data: \xff\n",
    ],
)
def test_nonsense_ends_pieces_and_passes_as_bytes(payload: bytes) -> None:
    running = relay()
    fed(running, payload)
    assert "not a completion chunk" in running.failure
    running = relay(Form.BYTES)
    assert b"".join(fed(running, payload + DONE)) == payload + DONE


def test_lone_surrogates_become_question_marks() -> None:
    got = merged(
        fed(relay(), b'data: {"choices": [{"text": "a\\ud800b\\ud83d\\ude00", "finish_reason": "\\udc00"}]}\n')
    )
    assert (got.text, got.engine_finish_reason) == ("a?b\U0001f600", "?")


@pytest.mark.parametrize(
    ("word", "shown", "read"),
    [
        ("stop", gateway_pb2.FINISH_REASON_STOP, FinishReason.STOP),
        ("length", gateway_pb2.FINISH_REASON_LENGTH, FinishReason.LENGTH),
        ("abort", gateway_pb2.FINISH_REASON_ABORT, FinishReason.ABORT),
        ("content_filter", gateway_pb2.FINISH_REASON_OTHER, FinishReason.OTHER),
        ("STOP", gateway_pb2.FINISH_REASON_OTHER, FinishReason.OTHER),
    ],
)
def test_a_reason_that_has_no_name_here_is_none_that_has_one(word: str, shown: int, read: FinishReason) -> None:
    message = merged(fed(relay(), tokens(1, finish=word) + DONE))
    assert (message.finish_reason, message.engine_finish_reason) == (shown, word)
    chunk = decode.chunk(message)
    assert (chunk.finish_reason, chunk.engine_finish_reason) == (read, word)


def test_an_engines_word_is_passed_on_up_to_a_length() -> None:
    assert len(merged(fed(relay(), tokens(1, finish="x" * 10_000) + DONE)).engine_finish_reason) == 64


def test_only_the_event_that_is_nothing_but_usage_is_left_out() -> None:
    usage: Any = {"prompt_tokens": 3, "completion_tokens": 1}
    both = event({"choices": [{"text": "a"}], "usage": usage})
    alone = event({"choices": [], "usage": usage})
    assert b"".join(fed(relay(Form.WITHOUT_USAGE), both + alone + both + DONE)) == both + both + DONE


def test_an_event_without_end_is_not_kept() -> None:
    running = relay(Form.BYTES)
    piece = b"data: " + b"x" * (1 << 20)
    for _ in range(MAX_EVENT_BYTES // len(piece) + 1):
        running.feed(piece, 1.0)
    assert "over 64 MiB" in running.failure
    assert not running._line


def test_a_document_that_is_too_long_is_passed_on_and_not_read() -> None:
    long = event({"choices": [{"text": "x" * MAX_DOCUMENT_BYTES}]})
    running = relay(Form.BYTES)
    assert b"".join(fed(running, long + DONE)) == long + DONE
    assert (running.report.events, running.report.outputs, running.report.done) == (1, 0, True)
    running = relay()
    fed(running, long + DONE)
    assert "more than 4 MiB" in running.failure


@pytest.mark.skipif(not native_available(), reason="the extension is not built")
def test_the_extension_reads_documents_up_to_the_same_length() -> None:
    import kvscout_native
    from kvscout_common.http.native_http_client import native_dialect

    around = len(event({"choices": [{"text": ""}]})) - len(b"data: \n\n")
    for length, outputs in ((MAX_DOCUMENT_BYTES, 1), (MAX_DOCUMENT_BYTES + 1, 0)):
        document = event({"choices": [{"text": "x" * (length - around)}]})
        twin, running = kvscout_native.EventRelay(Form.BYTES.value, native_dialect(OPENAI)), relay(Form.BYTES)
        assert twin.feed(document + DONE, 1.0) == b"".join(fed(running, document + DONE)) == document + DONE
        assert [running.report.outputs, StreamReport(**twin.report).outputs] == [outputs, outputs]
