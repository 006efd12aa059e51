"""The answer of `/v1/responses`, pure: shapes, events and their order are those of vLLM 0.32.

A stream begins before the engine does, its usage comes with `response.completed`, also where a limit cut the answer
off, and always counts cached tokens. An error in the engine breaks it off.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from kvscout_common.errors import KvscoutError
from kvscout_mocker.answers.answers import Answer, CacheUse
from kvscout_mocker.answers.event_stream import named_sse
from kvscout_mocker.engine.request import ChoiceDelta
from kvscout_mocker.requests.responses import ResponseRequest
from kvscout_mocker.server import Document
from kvscout_mocker.tokens.tokenizer import WordTokenizer
from kvscout_mocker.tokens.tool_calls import ToolCall, call_id

_ECHOED: Document = {
    "instructions": None,
    "metadata": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": None,
    "text": None,
    "user": None,
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "background": False,
    "service_tier": "auto",
    "truncation": "disabled",
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Fields of a request that its response repeats, and their defaults."""


class ResponseAnswer(Answer):
    """`/v1/responses`.

    Args:
        request: Validated request.
        created: Unix time in seconds.
        tokenizer: Tokens to text.
        completed: Called with the response when it is complete, before its last event is out.
    """

    def __init__(
        self,
        request: ResponseRequest,
        created: int,
        tokenizer: WordTokenizer,
        completed: Callable[[Document], None],
    ) -> None:
        super().__init__(request.generation, tokenizer)
        self._request = request
        self._created = created
        self._events = 0
        self._text: list[str] = []
        self._finish_reason: str | None = None
        call = self.generation.tool_call
        self._item = {"id": f"{'msg' if call is None else 'fc'}_{uuid.uuid4().hex}"}
        self._call_id = call_id()
        self._completed = completed

    def response(self, status: str, output: list[Document], usage: Document | None) -> Document:
        """Return the response in one of its states."""
        body = self._request.body
        echoed = {key: body.get(key) if body.get(key) is not None else default for key, default in _ECHOED.items()}
        if not echoed["tools"] and echoed["tool_choice"] == "auto":
            echoed["tool_choice"] = "none"
        return {
            "id": self._request.response_id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.generation.model,
            "object": "response",
            "output": output,
            "max_output_tokens": self.generation.max_tokens,
            "status": status,
            "top_logprobs": None,
            "usage": usage,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
            **echoed,
        }

    def whole(self, deltas: Sequence[ChoiceDelta], cache: CacheUse) -> Document:
        """Return the response."""
        [delta] = deltas
        self._take(delta)
        return self._finished(cache)

    def greeting(self) -> list[bytes]:
        """Return the start: it says nothing of the engine."""
        response = self.response("in_progress", [], None)
        return [
            self._event("response.created", {"response": response}),
            self._event("response.in_progress", {"response": response}),
        ]

    def opening(self) -> list[bytes]:
        """Return the start of the only item."""
        call = self.generation.tool_call
        if call is not None:
            item = self._call(call, "", "in_progress")
            return [self._event("response.output_item.added", {"item": item, "output_index": 0})]
        item = self._message([], "in_progress")
        part = _text_part("") | {"logprobs": []}
        return [
            self._event("response.output_item.added", {"item": item, "output_index": 0}),
            self._event("response.content_part.added", self._place(part=part)),
        ]

    def delta(self, delta: ChoiceDelta) -> list[bytes]:
        """Return the event that carries tokens."""
        text = self._take(delta)
        if self.generation.tool_call is not None:
            place = {"item_id": self._item["id"], "output_index": 0}
            return [self._event("response.function_call_arguments.delta", {"delta": text} | place)]
        return [self._event("response.output_text.delta", self._place(delta=text, logprobs=[]))]

    def closing(self, cache: CacheUse) -> list[bytes]:
        """Return the end of the item and the whole response."""
        response = self._finished(cache)
        [item] = response["output"]
        text, call = "".join(self._text), self.generation.tool_call
        if call is not None:
            done = {"arguments": text, "name": call.name, "item_id": self._item["id"], "output_index": 0}
            ended = [self._event("response.function_call_arguments.done", done)]
        else:
            ended = [
                self._event("response.output_text.done", self._place(text=text, logprobs=[])),
                self._event("response.content_part.done", self._place(part=_text_part(text))),
            ]
        return [
            *ended,
            self._event("response.output_item.done", {"item": item, "output_index": 0}),
            self._event("response.completed", {"response": response}),
        ]

    def failure(self, error: KvscoutError) -> list[bytes] | None:
        """Break off: vLLM's own reader refuses the error that it would send."""
        return None

    def _take(self, delta: ChoiceDelta) -> str:
        self._finish_reason = delta.finish_reason
        text = self.counted(delta)
        if self.generation.tool_call is not None:
            text = self.arguments(text, first=delta.first == 0, finish_reason=delta.finish_reason)
        self._text.append(text)
        return text

    def _finished(self, cache: CacheUse) -> Document:
        text, call = "".join(self._text), self.generation.tool_call
        output = self._message([_text_part(text)], "completed") if call is None else self._call(call, text, "completed")
        prompt, generated = len(self.generation.prompt), sum(self.output_tokens)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": cache.read,
                "cache_write_tokens": cache.written,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": generated,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": prompt + generated,
        }
        status = "incomplete" if self._finish_reason == "length" else "completed"
        response = self.response(status, [output], usage)
        self._completed(response)
        return response

    def _message(self, content: list[Document], status: str) -> Document:
        return {
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        } | self._item

    def _call(self, call: ToolCall, arguments: str, status: str) -> Document:
        namespace, name = self._request.namespaced.get(call.name, (None, call.name))
        return {
            "arguments": arguments,
            "call_id": self._call_id,
            "name": name,
            "type": "function_call",
            "namespace": namespace,
            "status": status,
        } | self._item

    def _place(self, **fields: object) -> Document:
        return {"content_index": 0, "item_id": self._item["id"], "output_index": 0} | fields

    def _event(self, name: str, fields: Document) -> bytes:
        numbered = fields | {"sequence_number": self._events, "type": name}
        self._events += 1
        return named_sse(name, numbered)


def _text_part(text: str) -> Document:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
