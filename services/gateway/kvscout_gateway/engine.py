"""Driving a vLLM-compatible engine over HTTP: token ids in, a stream of token ids out."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvscout_common.errors import Unavailable

MAX_EVENT_BYTES = 1 << 20
"""A server-sent event longer than this is no completion chunk."""


class EngineFailed(Unavailable):
    """The engine refused the request, or its stream broke."""

    def __init__(self, message: str, *, client_fault: bool = False) -> None:
        super().__init__(message)
        self.client_fault = client_fault
        """The engine says that the request itself is wrong: no other worker would take it."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One request as an engine gets it."""

    endpoint: str
    model: str
    token_ids: list[int]
    request_id: str
    dp_rank: int | None
    """None = the engine has one rank, no header is sent."""
    parameters: Mapping[str, Any]
    """Sampling and stop parameters, named as vLLM names them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an engine's output."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    """"" = not finished."""
    prompt_tokens: int | None = None
    """Set in the usage chunk, as are the next two."""
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """None = the engine does not report it."""


class VllmEngine:
    """The adapter for vLLM's `/v1/completions`."""

    def __init__(self, *, connect_seconds: float, idle_seconds: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds, sock_read=idle_seconds)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes every connection."""
        if self._session is not None:
            await self._session.close()

    async def generate(self, dispatch: Dispatch) -> AsyncGenerator[Chunk, None]:
        """Runs one request; closing the iterator aborts it on the engine.

        Raises:
            EngineFailed: If the engine cannot be reached, refuses, or breaks off.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        headers = {"X-Request-Id": dispatch.request_id}
        if dispatch.dp_rank is not None:
            headers["X-data-parallel-rank"] = str(dispatch.dp_rank)
        body = {
            **dispatch.parameters,
            "model": dispatch.model,
            "prompt": dispatch.token_ids,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        try:
            async with self._session.post(
                f"{dispatch.endpoint}/v1/completions", json=body, headers=headers
            ) as response:
                if response.status != 200:
                    raise await _refusal(response)
                async with aclosing(_events(response.content)) as events:
                    async for event in events:
                        yield _chunk(event)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineFailed(f"{dispatch.endpoint}: {str(error) or type(error).__name__}") from error


async def _refusal(response: aiohttp.ClientResponse) -> EngineFailed:
    text = (await response.content.read(4096)).decode(errors="replace")
    try:
        document = json.loads(text)
        text = str(document.get("error", document).get("message", text))
    except (ValueError, AttributeError):
        pass  # not OpenAI's error shape: the text itself says it
    # 429 and the 5xx are the engine's state; the other 4xx would come from every engine.
    client_fault = 400 <= response.status < 500 and response.status not in (404, 408, 429)
    return EngineFailed(f"engine answered {response.status}: {text[:500]}", client_fault=client_fault)


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON documents of a stream of server-sent events, up to [DONE]."""
    buffer = b""
    async for data in content.iter_any():
        buffer += data
        *lines, buffer = buffer.split(b"\n")
        if len(buffer) > MAX_EVENT_BYTES:
            raise EngineFailed("the engine sent an event of over 1 MiB")
        for line in lines:
            payload = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or not payload:
                continue
            if payload == b"[DONE]":
                return
            try:
                document = json.loads(payload)
            except ValueError as error:
                raise EngineFailed("the engine sent an event that is not JSON") from error
            if "error" in document:
                raise EngineFailed(f"the engine reports: {document['error']}")
            yield document
    raise EngineFailed("the engine broke off its stream")


def _chunk(document: dict[str, Any]) -> Chunk:
    choice: dict[str, Any] = next(iter(document.get("choices") or ()), {})
    usage = document.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Chunk(
        token_ids=tuple(choice.get("token_ids") or ()),
        text=choice.get("text") or "",
        finish_reason=choice.get("finish_reason") or "",
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=details.get("cached_tokens"),
    )
