"""Requests and answers of each dialect, as engines write them: whole, streamed, failing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvscout_gateway.values.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES, ApiDialect
from support.openai_stack import CHAT as CHAT_BODY
from support.openai_stack import DONE, MODEL, delta, event


def named(kind: str, **fields: Any) -> bytes:
    """Return an event with a name."""
    return b"event: %s\n" % kind.encode() + event({"type": kind, **fields})


@dataclass(frozen=True)
class Sample:
    """One dialect: a request, and what an engine answers."""

    api: ApiDialect
    body: dict[str, Any]
    whole: dict[str, Any]
    preamble: tuple[bytes, ...]
    """Events before the first output."""
    outputs: tuple[bytes, ...]
    end: tuple[bytes, ...]
    failure: bytes
    """An error in a stream, for which another worker is tried."""

    def __str__(self) -> str:
        return self.api.name

    @property
    def streamed(self) -> bytes:
        """Return the whole stream."""
        return b"".join((*self.preamble, *self.outputs, *self.end))

    @property
    def failing(self) -> bytes:
        """Return a stream that fails after its first output."""
        return b"".join((*self.preamble, self.outputs[0], self.failure))

    def answer(self, *, stream: bool) -> bytes:
        """Return an answer."""
        return self.streamed if stream else json.dumps(self.whole).encode()


_OPENAI_USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
_USAGE = event({"id": "1", "choices": [], "usage": _OPENAI_USAGE})
_RESPONSES_USAGE = {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}
_MESSAGES_USAGE = {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 2}
_ERROR = {"type": "server_error", "message": "out of luck", "code": 500}


def _text(text: str) -> bytes:
    return event({"id": "1", "choices": [{"index": 0, "text": text, "finish_reason": None}]})


SAMPLES = (
    Sample(
        COMPLETIONS,
        {"model": MODEL, "prompt": "hello"},
        {"id": "1", "choices": [{"index": 0, "text": "ab", "finish_reason": "stop"}], "usage": _OPENAI_USAGE},
        (),
        (_text("a"), _text("b")),
        (event({"id": "1", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}), _USAGE, DONE),
        event({"error": _ERROR}),
    ),
    Sample(
        CHAT,
        CHAT_BODY,
        {"id": "1", "choices": [{"index": 0, "message": {"content": "ab"}}], "usage": _OPENAI_USAGE},
        (event({"id": "1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),),
        (delta("a"), delta("b")),
        (delta("", "stop"), _USAGE, DONE),
        event({"error": _ERROR}),
    ),
    Sample(
        MESSAGES,
        {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": "ab"}],
            "stop_reason": "end_turn",
            "usage": _MESSAGES_USAGE,
        },
        (
            named("message_start", message={"id": "msg_1", "usage": {"input_tokens": 7, "output_tokens": 0}}),
            named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        ),
        tuple(named("content_block_delta", index=0, delta={"type": "text_delta", "text": text}) for text in "ab"),
        (
            named("content_block_stop", index=0),
            named("message_delta", delta={"stop_reason": "end_turn"}, usage=_MESSAGES_USAGE),
            named("message_stop"),
        ),
        named("error", error={"type": "api_error", "message": "out of luck"}),
    ),
    Sample(
        RESPONSES,
        {"model": MODEL, "input": "hello"},
        {"id": "resp_1", "object": "response", "status": "completed", "error": None, "usage": _RESPONSES_USAGE},
        (
            named("response.created", response={"id": "resp_1", "status": "in_progress", "usage": None}),
            named("response.output_item.added", item={"type": "message", "content": []}),
        ),
        tuple(named("response.output_text.delta", delta=text, output_index=0) for text in "ab"),
        (named("response.completed", response={"id": "resp_1", "status": "completed", "usage": _RESPONSES_USAGE}),),
        named(
            "response.failed", response={"id": "resp_1", "error": {"code": "server_error", "message": "out of luck"}}
        ),
    ),
)
BY_NAME = {sample.api.name: sample for sample in SAMPLES}


def error_of(sample: Sample, document: dict[str, Any]) -> tuple[str, str]:
    """Return the type and the message of an error, which has to be in the dialect's shape, exactly."""
    error: dict[str, Any] = document["error"]
    if sample.api is MESSAGES:
        assert document.keys() == {"type", "error"}
        assert document["type"] == "error"
        assert error.keys() == {"type", "message"}
    else:
        assert document.keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
    return error["type"], error["message"]


def last_error(sample: Sample, stream: bytes) -> dict[str, Any]:
    """Return the error at the end of a stream, which has to be an event of the dialect."""
    *_, name, data = (b"\n" + stream.rstrip(b"\n")).split(b"\n")
    document: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    if sample.api.path in ("/v1/messages", "/v1/responses"):
        assert name == b"event: error"
        assert document["type"] == "error"
    return document
