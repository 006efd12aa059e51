"""The answer of `/v1/messages`, pure: shapes, events and their order are those of vLLM 0.32.

A stream begins with the first token. Its `message_start` knows the tokens of the prompt but nothing of the cache;
`message_delta` counts what was read from it or written to it out of `input_tokens`. There are no pings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvscout_common.errors import KvscoutError
from kvscout_mocker.answers.answers import Answer, CacheUse, reported
from kvscout_mocker.answers.event_stream import named_sse
from kvscout_mocker.config import PromptTokensDetails
from kvscout_mocker.engine.request import ChoiceDelta
from kvscout_mocker.requests.generation import Generation
from kvscout_mocker.server import Document, status_of
from kvscout_mocker.tokens.tokenizer import WordTokenizer
from kvscout_mocker.tokens.tool_calls import call_id

_UNREADABLE = "3 validation errors for ChatCompletionStreamResponse"
"""What vLLM's converter makes of an error within the chat completion's stream: nothing of it is passed on."""


class MessageAnswer(Answer):
    """`/v1/messages`.

    Args:
        generation: Validated request.
        answer_id: Its `id`.
        tokenizer: Tokens to text.
        details: Condition on which its usage reports cached tokens.
    """

    def __init__(
        self, generation: Generation, answer_id: str, tokenizer: WordTokenizer, details: PromptTokensDetails
    ) -> None:
        super().__init__(generation, tokenizer)
        self._id = answer_id
        self._details = details
        self._finish_reason: str | None = None

    def whole(self, deltas: Sequence[ChoiceDelta], cache: CacheUse) -> Document:
        """Return the message, without fields that are null."""
        [delta] = deltas
        self._finish_reason = delta.finish_reason
        text, call = self.counted(delta), self.generation.tool_call
        block: Document = {"type": "text", "text": text}
        if call is not None:
            # vLLM fails here where a limit cut the arguments off.
            arguments = self.arguments(text, first=True, finish_reason="stop")
            block = {"type": "tool_use", "id": call_id(), "name": call.name, "input": json.loads(arguments)}
        return self._message([block]) | {
            "stop_reason": self._stop_reason(),
            "usage": self._usage(reported(self._details, cache)),
        }

    def opening(self) -> list[bytes]:
        """Return the start of the message and of its only block."""
        call = self.generation.tool_call
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage(None)}
        block: Document = {"type": "text", "text": ""}
        if call is not None:
            block = {"type": "tool_use", "id": call_id(), "name": call.name, "input": {}}
        return [
            _event("message_start", {"message": message}),
            _event("content_block_start", {"index": 0, "content_block": block}),
        ]

    def delta(self, delta: ChoiceDelta) -> list[bytes]:
        """Return the event that carries tokens."""
        self._finish_reason = delta.finish_reason
        text = self.counted(delta)
        document: Document = {"type": "text_delta", "text": text}
        if self.generation.tool_call is not None:
            partial = self.arguments(text, first=delta.first == 0, finish_reason=delta.finish_reason)
            document = {"type": "input_json_delta", "partial_json": partial}
        return [_event("content_block_delta", {"index": 0, "delta": document})]

    def closing(self, cache: CacheUse) -> list[bytes]:
        """Return the end of the block, the usage and the end."""
        usage = self._usage(reported(self._details, cache))
        return [
            _event("content_block_stop", {"index": 0}),
            _event(
                "message_delta",
                {"delta": {"stop_reason": self._stop_reason(), "stop_sequence": None}, "usage": usage},
            ),
            _event("message_stop", {}),
        ]

    def failure(self, error: KvscoutError) -> list[bytes]:
        """Return an error that does not say which: the message ends without its `message_stop`."""
        return [_event("error", {"error": {"type": "internal_error", "message": _UNREADABLE}})]

    def _message(self, content: list[Document]) -> Document:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.generation.model,
        }

    def _stop_reason(self) -> str:
        if self._finish_reason == "length":
            return "max_tokens"
        return "end_turn" if self.generation.tool_call is None else "tool_use"

    def _usage(self, cache: CacheUse | None) -> Document:
        fresh, output = len(self.generation.prompt), sum(self.output_tokens)
        if cache is None:
            return {"input_tokens": fresh, "output_tokens": output}
        return {
            "input_tokens": fresh - cache.read - cache.written,
            "output_tokens": output,
            "cache_creation_input_tokens": cache.written,
            "cache_read_input_tokens": cache.read,
        }


def error_message(error: KvscoutError) -> Document:
    """Return an error in Anthropic's shape."""
    return {"type": "error", "error": {"type": status_of(error)[1], "message": str(error)}}


def _event(name: str, fields: Document) -> bytes:
    return named_sse(name, {"type": name} | fields)
