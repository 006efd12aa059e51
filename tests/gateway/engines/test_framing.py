"""The stream of completion chunks, in whatever pieces it arrives."""

import json
from array import array
from typing import Any

import pytest

from kvscout_gateway.engines.failure import Fault
from kvscout_gateway.engines.framing import MAX_EVENT_BYTES, Chunk, CompletionStream


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def tokens(*ids: int, finish: str | None = None, text: str = "") -> bytes:
    return event({"choices": [{"token_ids": list(ids), "text": text, "finish_reason": finish}]})


USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    }
)
WHOLE = tokens(1, text="a") + b": ping\n\n" + tokens(2, 3, finish="stop", text="b") + USAGE + b"data: [DONE]\n\n"


def collect(stream: CompletionStream, pieces: list[bytes]) -> Chunk:
    got = Chunk(token_ids=array("I"))
    for piece in pieces:
        if stream.done:
            break
        chunk = stream.feed(piece)
        if chunk is not None:
            assert got.token_ids is not None
            got.token_ids.extend(chunk.token_ids or ())
            got.text += chunk.text
            got.finish_reason = chunk.finish_reason or got.finish_reason
            if chunk.prompt_tokens is not None:
                got.prompt_tokens, got.completion_tokens = chunk.prompt_tokens, chunk.completion_tokens
                got.cached_tokens = chunk.cached_tokens
    return got


@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
def test_a_stream_is_the_same_in_pieces_of_any_size(size: int) -> None:
    stream = CompletionStream()
    got = collect(stream, [WHOLE[at : at + size] for at in range(0, len(WHOLE), size)])
    assert got == Chunk(array("I", [1, 2, 3]), "ab", "stop", 9, 3, 4)
    assert stream.done
    assert stream.failure is None


def test_what_arrives_at_once_is_one_chunk() -> None:
    assert CompletionStream().feed(WHOLE) == Chunk(array("I", [1, 2, 3]), "ab", "stop", 9, 3, 4)


def test_engines_that_end_lines_with_crlf_or_leave_the_space_out_are_understood() -> None:
    stream = CompletionStream()
    assert stream.feed(b'data:{"choices": [{"token_ids": [5]}]}\r\n\r\ndata:[DONE]\r\n\r\n') == Chunk(array("I", [5]))
    assert stream.done


def test_cached_tokens_that_are_not_reported_are_unknown_not_zero() -> None:
    chunk = CompletionStream().feed(event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}))
    assert chunk == Chunk(prompt_tokens=3, completion_tokens=1, cached_tokens=None)


def test_an_error_comes_after_the_output_before_it() -> None:
    stream = CompletionStream()
    chunk = stream.feed(tokens(1) + event({"error": {"message": "gone"}}) + tokens(2))
    assert chunk == Chunk(array("I", [1]))
    assert str(stream.failure) == "the engine reports: gone"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        ({"error": {"message": "long", "type": "BadRequestError", "code": 400}}, Fault.REQUEST),
        ({"error": {"message": "long", "type": "BadRequestError", "code": "422"}}, Fault.REQUEST),
        ({"error": {"message": "long", "type": "BadRequestError", "code": None}}, Fault.REQUEST),
        ({"object": "error", "message": "long", "type": "BadRequestError", "code": 400}, Fault.REQUEST),
        ({"error": {"message": "long", "code": 404}}, Fault.REFUSED),
        ({"error": {"message": "long", "code": 429}}, Fault.OVERLOAD),
        ({"error": {"message": "long", "code": 503}}, Fault.REFUSED),
        ({"error": {"message": "long", "code": 7}}, Fault.REFUSED),
        ({"error": {"message": "long", "code": [400]}}, Fault.REFUSED),
        ({"error": "long"}, Fault.REFUSED),
    ],
)
def test_an_error_in_a_stream_tells_whose_fault_it_is(error: Any, fault: Fault) -> None:
    stream = CompletionStream()
    assert stream.feed(event(error)) is None
    assert stream.failure is not None
    assert (stream.failure.fault, str(stream.failure)) == (fault, "the engine reports: long")


def test_an_error_that_is_null_is_none() -> None:
    stream = CompletionStream()
    assert stream.feed(event({"error": None, "choices": [{"token_ids": [1]}]})) == Chunk(array("I", [1]))
    assert stream.failure is None


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
    stream, sent = CompletionStream(max_tokens=3), tokens(1, text="a") + tokens(2, 3, text="b") + after + WHOLE
    got = collect(stream, [sent[at : at + size] for at in range(0, len(sent), size)])
    assert (got.token_ids, got.text.rstrip("x"), got.finish_reason) == (array("I", [1, 2, 3]), "ab", finish)
    assert len(got.text) <= 2 + 3
    assert stream.done
    assert stream.overrun


def test_text_that_was_held_back_comes_with_the_end() -> None:
    stream = CompletionStream(max_tokens=1)
    got = collect(stream, [tokens(1, text="a") + tokens(finish="length", text="b") + b"data: [DONE]\n\n"])
    assert (got.text, got.finish_reason, stream.overrun) == ("ab", "length", False)


def test_as_many_as_were_asked_for_are_no_overrun() -> None:
    stream = CompletionStream(max_tokens=3)
    assert collect(stream, [WHOLE]) == Chunk(array("I", [1, 2, 3]), "ab", "stop", 9, 3, 4)
    assert not stream.overrun


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
        b'data: {"choices": [{"token_ids": 5}]}\n',
        b'data: {"choices": [{"text": 5}]}\n',
        b'data: {"usage": {"completion_tokens": 1}}\n',
        b'data: {"usage": 5}\n',
        b"data: " + b"[" * 100_000 + b"\n",
        b"data: \xff\n",
    ],
)
def test_nonsense_is_a_failure_of_the_engine(payload: bytes) -> None:
    stream = CompletionStream()
    stream.feed(payload)
    assert "no completion chunk" in str(stream.failure)


def test_a_stream_that_ends_early_has_failed_and_one_that_is_done_has_not() -> None:
    stream = CompletionStream()
    stream.feed(tokens(1))
    stream.end()
    assert "broke off" in str(stream.failure)
    stream = CompletionStream()
    stream.feed(WHOLE)
    stream.end()
    assert stream.failure is None


def test_an_event_without_end_is_not_kept() -> None:
    stream = CompletionStream()
    piece = b"data: " + b"x" * (1 << 20)
    for _ in range(MAX_EVENT_BYTES // len(piece) + 1):
        stream.feed(piece)
    assert "over 64 MiB" in str(stream.failure)
    assert not stream._parts
