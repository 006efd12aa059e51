"""Driving a vLLM-compatible engine over HTTP: token ids in, a stream of token ids out."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvscout_gateway.completion_stream import Chunk, CompletionStream, EngineFailed

KEEPALIVE_SECONDS = 4.0
"""Idle connections are kept this long: below the 5 s after which uvicorn, and so vLLM, closes them. A request written
to a connection that the engine is just closing would count as a failure of the engine."""
TRAILER_SECONDS = 1.0
"""Longest wait for the end of a body whose last event came; after it the connection can be used again."""

_CLIENT_FAULTS = frozenset({400, 413, 422})
"""What every engine would answer to the same request. The other errors are of this engine, or of our access to it."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One request as an engine gets it."""

    endpoint: str
    model: str
    token_ids: array[int]
    request_id: str
    dp_rank: int | None
    """None = the engine has one rank, no header is sent."""
    parameters: Mapping[str, Any]
    """Sampling and stop parameters, named as vLLM names them."""


class VllmEngine:
    """The adapter for vLLM's `/v1/completions`."""

    def __init__(self, *, connect_seconds: float, idle_seconds: float) -> None:
        """Connects when first used.

        Args:
            connect_seconds: Longest wait for a connection, its name's resolution included.
            idle_seconds: Longest silence of an engine within one request.
        """
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_seconds, sock_read=idle_seconds)
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
        try:
            async with self._http().post(
                f"{dispatch.endpoint}/v1/completions",
                data=_body(dispatch),
                headers=_headers(dispatch),
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise await _refusal(response)
                stream = CompletionStream()
                async for data in response.content.iter_any():
                    chunk = stream.feed(data)
                    if chunk is not None:
                        yield chunk
                    if stream.done or stream.failure is not None:
                        break
                stream.end()
                if stream.failure is not None:
                    raise stream.failure
                await _finish(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFailed(f"{dispatch.endpoint}: {str(error) or type(error).__name__}") from error

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # How many requests run at once is limited elsewhere, for all engines together.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session


def _headers(dispatch: Dispatch) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "X-Request-Id": dispatch.request_id}
    if dispatch.dp_rank is not None:
        headers["X-data-parallel-rank"] = str(dispatch.dp_rank)
    return headers


def _body(dispatch: Dispatch) -> bytes:
    rest = {
        **dispatch.parameters,
        "model": dispatch.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    # A list of integers prints as JSON, and several times as fast as json.dumps writes it.
    return f'{{"prompt": {dispatch.token_ids.tolist()}, {json.dumps(rest)[1:]}'.encode()


async def _finish(response: aiohttp.ClientResponse) -> None:
    """Reads the end of a body, so that its connection can be used again."""
    try:
        async with asyncio.timeout(TRAILER_SECONDS):
            while not response.content.at_eof():
                await response.content.readany()
    except (aiohttp.ClientError, TimeoutError, OSError):
        response.close()  # the answer is complete: only the connection is lost


async def _refusal(response: aiohttp.ClientResponse) -> EngineFailed:
    text = (await response.content.read(4096)).decode(errors="replace")
    try:
        document = json.loads(text)
        text = str(document.get("error", document).get("message", text))
    except (ValueError, AttributeError):
        pass  # not OpenAI's error shape: the text itself says it
    retry_after = response.headers.get("Retry-After", "")
    return EngineFailed(
        f"engine answered {response.status}: {text[:500]}",
        client_fault=response.status in _CLIENT_FAULTS,
        retry_after_seconds=float(retry_after) if retry_after.isdecimal() else None,
    )
