"""How the turns of a workload are written in each API, and what their streams say, pure.

In the agents' APIs a session is a conversation: its prompts are words, all answers but the last one call a tool, and
what a later turn adds is that tool's result. All have a limit, which agents set to a constant.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from typing import Any, Final

from kvscout_client import GenerateChunk, Usage
from kvscout_lab.workloads.workload import Turn

MAX_BOUND: Final = 4_096
"""`max_tokens` of requests that have no limit in the workload: without one a completion ends after 16 tokens."""
_WORD: Final = re.compile(r"w(\d+)")
_TOOL: Final = "read_file"
_DESCRIPTION: Final = "Reads a file."
_PARAMETERS: Final = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


class Api(ABC):
    """One API, for one session."""

    path: str
    """Below the URL of OpenAI's API."""

    @abstractmethod
    def body(self, turn: Turn, model: str, prompt: array[int], *, last: bool) -> dict[str, Any]:
        """Return the request body of a turn.

        Args:
            turn: The turn.
            model: Model of the request.
            prompt: Its tokens, what was said before included.
            last: It is the last one of its session.
        """

    @abstractmethod
    def chunk(self, document: dict[str, Any]) -> GenerateChunk:
        """Return an event of a stream, or a whole answer, as a chunk.

        Raises:
            ValueError: It is an error.
        """

    def answered(self, tokens: array[int]) -> None:  # noqa: B027 - only conversations remember
        """Take note of the answer to the last body."""


class Completions(Api):
    """Token ids in, token ids out."""

    path = "completions"

    def body(self, turn: Turn, model: str, prompt: array[int], *, last: bool) -> dict[str, Any]:
        """Return the request body of a turn."""
        body = {"model": model, "prompt": prompt.tolist(), "return_token_ids": True, **_extra(turn)}
        body["max_tokens"] = _bound(turn)
        if turn.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def chunk(self, document: dict[str, Any]) -> GenerateChunk:
        """Return an event of a stream, or a whole answer, as a chunk."""
        _check(document)
        tokens = [token for choice in document["choices"] for token in choice["token_ids"]]
        usage = document.get("usage")
        if usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            usage = Usage(usage["prompt_tokens"], usage["completion_tokens"], cached)
        return GenerateChunk(token_ids=tuple(tokens), usage=usage or None)


class Conversation(Api):
    """What agents' APIs have in common: the messages so far, streamed."""

    def __init__(self) -> None:
        self._items: list[dict[str, Any]] = []
        self._tokens = 0
        """Tokens of the prompt and answer that the items have."""
        self._calls = False
        self._number = 0

    def body(self, turn: Turn, model: str, prompt: array[int], *, last: bool) -> dict[str, Any]:
        """Return the request body of a turn."""
        new = _words(prompt[self._tokens :])
        self._items.append(self._result(new) if self._calls else {"role": "user", "content": new})
        self._tokens, self._calls = len(prompt), not last
        return {"model": model, "stream": True, **_extra(turn), **self._fields(_bound(turn))}

    def answered(self, tokens: array[int]) -> None:
        """Take note of the answer to the last body."""
        self._tokens += len(tokens)
        self._number += 1
        said = "".join(f" w{token}" for token in tokens)
        self._items.append(self._call(said) if self._calls else {"role": "assistant", "content": said})

    @abstractmethod
    def _fields(self, bound: int) -> dict[str, Any]:
        """The conversation, its tool, and whether the answer has to call it."""

    @abstractmethod
    def _call(self, said: str) -> dict[str, Any]:
        """A call of the tool."""

    @abstractmethod
    def _result(self, text: str) -> dict[str, Any]:
        """Its result."""


class Chats(Conversation):
    """OpenAI's chat completions without tools: users ask, and the model answers."""

    path = "chat/completions"

    def chunk(self, document: dict[str, Any]) -> GenerateChunk:
        """Return an event of a stream as a chunk."""
        _check(document)
        tokens = _tokens_of("".join(choice["delta"].get("content") or "" for choice in document["choices"]))
        usage = document.get("usage")
        if not usage:
            return GenerateChunk(token_ids=tokens)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return GenerateChunk(token_ids=tokens, usage=Usage(usage["prompt_tokens"], usage["completion_tokens"], cached))

    def _fields(self, bound: int) -> dict[str, Any]:
        return {"max_tokens": bound, "messages": self._items, "stream_options": {"include_usage": True}}

    def _call(self, said: str) -> dict[str, Any]:
        return {"role": "assistant", "content": said}

    def _result(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}


class Messages(Conversation):
    """Anthropic's."""

    path = "messages"

    def chunk(self, document: dict[str, Any]) -> GenerateChunk:
        """Return an event of a stream as a chunk."""
        _check(document)
        delta = document.get("delta", {})
        tokens = _tokens_of(delta.get("text") or delta.get("partial_json") or "")
        if document["type"] != "message_delta":
            return GenerateChunk(token_ids=tokens)
        usage = document["usage"]
        cached = usage.get("cache_read_input_tokens", 0)
        prompt = usage["input_tokens"] + cached + usage.get("cache_creation_input_tokens", 0)
        return GenerateChunk(usage=Usage(prompt, usage["output_tokens"], cached))

    def _fields(self, bound: int) -> dict[str, Any]:
        tools = [{"name": _TOOL, "description": _DESCRIPTION, "input_schema": _PARAMETERS}]
        choice = {"type": "any" if self._calls else "none"}
        return {"max_tokens": bound, "messages": self._items, "tools": tools, "tool_choice": choice}

    def _call(self, said: str) -> dict[str, Any]:
        block = {"type": "tool_use", "id": f"call-{self._number}", "name": _TOOL, "input": {"path": said}}
        return {"role": "assistant", "content": [block]}

    def _result(self, text: str) -> dict[str, Any]:
        block = {"type": "tool_result", "tool_use_id": f"call-{self._number}", "content": text}
        return {"role": "user", "content": [block]}


class Responses(Conversation):
    """OpenAI's, without a store."""

    path = "responses"

    def chunk(self, document: dict[str, Any]) -> GenerateChunk:
        """Return an event of a stream as a chunk."""
        _check(document)
        if document["type"].endswith(".delta"):
            return GenerateChunk(token_ids=_tokens_of(document["delta"]))
        if document["type"] != "response.completed":
            return GenerateChunk()
        usage = document["response"]["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return GenerateChunk(usage=Usage(usage["input_tokens"], usage["output_tokens"], cached))

    def _fields(self, bound: int) -> dict[str, Any]:
        tools = [{"type": "function", "name": _TOOL, "description": _DESCRIPTION, "parameters": _PARAMETERS}]
        choice = "required" if self._calls else "none"
        return {
            "max_output_tokens": bound,
            "input": self._items,
            "tools": tools,
            "tool_choice": choice,
            "store": False,
        }

    def _call(self, said: str) -> dict[str, Any]:
        call = {"call_id": f"call-{self._number}", "name": _TOOL, "arguments": json.dumps({"path": said})}
        return {"type": "function_call"} | call

    def _result(self, text: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": f"call-{self._number}", "output": text}


def _extra(turn: Turn) -> dict[str, Any]:
    return {"vllm_xargs": {"output_tokens": turn.output_tokens, "tells_first_token": not turn.streamed}}


def _bound(turn: Turn) -> int:
    return max(turn.max_tokens or MAX_BOUND, turn.output_tokens)


def _check(document: dict[str, Any]) -> None:
    if document.get("error"):
        raise ValueError(str(document["error"])[:200])


def _words(tokens: Iterable[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def _tokens_of(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _WORD.findall(text))
