"""Servers as sources of tokens: a renderer, and engines with their render endpoints or `/tokenize`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Final, NamedTuple

from kvscout_common.errors import Unavailable
from kvscout_common.http.json_fields import Fields
from kvscout_gateway.tokens.as_chat import CHAT, MESSAGES, RESPONSES, as_chat
from kvscout_gateway.tokens.conversation import NotText, conversation, template_variables
from kvscout_gateway.tokens.remote_tokens import Call, RemoteTokens, Server
from kvscout_gateway.tokens.rendered import read_rendered, read_tokenized
from kvscout_gateway.tokens.source import COMPLETIONS, Found, SourceName, TokenRequest
from kvscout_gateway.tokens.text_tokenizer import INLINE_RENDERED

TOKENIZE: Final = "/tokenize"
MAX_BYTES: Final = 8 * 1024 * 1024
"""Longest body that is sent to have it tokenized, but for what is in images."""


_NO_THINKING: Final = {"type": "disabled"}


class _Render(NamedTuple):
    """Render endpoint of a dialect."""

    path: str
    fields: tuple[str, ...]
    """Fields of the client's that are sent."""
    more: Mapping[str, Any]
    """Others, which the endpoint wants."""


_ANY: Final = ("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs")
_CHAT: Final = ("messages", "tools", "tool_choice", "add_generation_prompt", "continue_final_message",
                "add_special_tokens", "documents", "reasoning_effort", "response_format")  # fmt: skip
_RENDER: Final = {
    COMPLETIONS: _Render("/v1/completions/render", ("add_special_tokens",), {"max_tokens": 1}),
    CHAT: _Render("/v1/chat/completions/render", (*_CHAT, *_ANY), {"max_completion_tokens": 1}),
    MESSAGES: _Render(
        "/v1/messages/render",
        ("messages", "system", "tools", "tool_choice", "output_config", *_ANY),
        {"max_tokens": 1},
    ),
    RESPONSES: _Render(
        "/v1/responses/render",
        ("input", "instructions", "tools", "tool_choice", "reasoning", "truncation", *_ANY),
        {"max_output_tokens": 1, "store": False},
    ),
}


class RemoteSource:
    """Servers of one kind."""

    def __init__(
        self,
        name: SourceName,
        remote: RemoteTokens,
        choose: Callable[[TokenRequest], Iterable[Server]],
        call_of: Callable[[TokenRequest], Call],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask servers.

        Args:
            name: Of the source.
            remote: How they are asked.
            choose: Servers for a request, in the order in which they are asked.
            call_of: What it is asked; raises NotText.
            clock: Seconds.
        """
        self.name = name
        self._remote = remote
        self._choose = choose
        self._call_of = call_of
        self._clock = clock

    async def find(self, wanted: TokenRequest) -> Found | None:
        """See `TokenSource`."""
        servers = iter(self._choose(wanted))
        first = next(servers, None)
        if first is None:
            return None
        if wanted.remote_seconds <= 0:
            raise Unavailable("no time is left to have the prompt tokenized")
        long = wanted.size > INLINE_RENDERED
        call = await asyncio.to_thread(self._call_of, wanted) if long else self._call_of(wanted)
        begin = self._clock()
        try:
            rendered = await self._remote.ask(
                chain((first,), servers),
                call,
                model=wanted.model,
                tenant=wanted.tenant,
                seconds=wanted.remote_seconds,
            )
        finally:
            wanted.remote_seconds -= self._clock() - begin
        return Found(*rendered)

    async def find_beginning(self, wanted: TokenRequest) -> Found | None:
        """Return None: what a server does not take, it does not begin either."""
        return None


def render_call(wanted: TokenRequest) -> Call:
    """Return the call of a render endpoint.

    Raises:
        NotText: The endpoint does not know what the prompt is.
        InvalidArgument: A field is too long to be read.
    """
    request, dialect = wanted.request, wanted.dialect
    render = _RENDER[dialect]
    if request.get("chat_template") is not None or request.get("previous_response_id") is not None:
        raise NotText("the prompt depends on what a renderer is not told")
    more = {"model": wanted.model, "mm_payload": "none", **render.more}
    if dialect == COMPLETIONS:
        more["prompt"] = wanted.text
    if dialect == MESSAGES and request.get("thinking") == _NO_THINKING:
        more["thinking"] = _NO_THINKING  # a budget changes no prompt, and is refused beside one output token
    written = _written(request, render.fields)
    body = _json(more)[:-1] + (b"," + written if written else b"") + b"}"
    return Call.of(render.path, body, read_rendered)


def tokenize_call(wanted: TokenRequest) -> Call:
    """Return the call of `/tokenize`.

    Raises:
        NotText: The prompt is not only text, or not known here.
        InvalidArgument: A field is too long to be read.
    """
    if wanted.dialect == COMPLETIONS:
        special = wanted.request.get("add_special_tokens", True) is not False
        body = {"model": wanted.request.get("model"), "prompt": wanted.text, "add_special_tokens": special}
    else:
        body = _chat_body(as_chat(wanted.dialect, wanted.request, engine=wanted.engine, traits=wanted.traits))
    return Call.of(TOKENIZE, _json(body), read_tokenized)


def _chat_body(chat: Mapping[str, Any]) -> dict[str, Any]:
    conversation(chat.get("messages"), as_parts=True)
    variables = template_variables(chat)
    body = {
        "model": chat.get("model"),
        "messages": chat.get("messages"),
        "tools": chat.get("tools"),
        "tool_choice": chat.get("tool_choice"),
        "add_generation_prompt": variables.pop("add_generation_prompt"),
        "continue_final_message": chat.get("continue_final_message"),
        "add_special_tokens": chat.get("add_special_tokens"),
        "chat_template_kwargs": variables or None,
    }
    return {name: value for name, value in body.items() if value is not None}


def _written(request: Mapping[str, Any], names: tuple[str, ...]) -> bytes:
    """Return fields of a request as JSON, without braces: as the client wrote them where that is known."""
    if isinstance(request, Fields):
        written = request.written(names)
    else:
        written = _json({name: request[name] for name in names if request.get(name) is not None})[1:-1]
    if len(written) > MAX_BYTES:
        raise NotText(f"the prompt has more than {MAX_BYTES:,} bytes")
    return written


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise NotText("half of a surrogate pair is not valid text") from error
