"""Driving a vLLM-compatible engine over HTTP: token ids in, a stream of token ids out."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvscout_common.telemetry import RateLimitedLog
from kvscout_gateway.engines.failure import MAX_MESSAGE, EngineFailed, Fault, fault_of_os_error, fault_of_status
from kvscout_gateway.engines.framing import Chunk, CompletionStream
from kvscout_gateway.engines.patience import Patience, Pulse, Watch, until

log = logging.getLogger("kvscout.gateway")

TOKENS_A_TURN = 16_384
"""Of a prompt, written at a time: about a millisecond, after which others have their turn."""
KEEPALIVE_SECONDS = 4.0
"""Idle connections are kept this long: below the 5 s after which uvicorn, and so vLLM, closes them. A request written
to a connection that the engine is just closing would count as a failure of the engine."""
TRAILER_SECONDS = 1.0
"""Longest wait for the end of a body whose last event came; after it the connection can be used again."""
REFUSAL_BYTES = 4096
REFUSAL_SECONDS = 2.0
"""Longest wait for the text of a refusal, and the most that is read of it."""


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
    uncached_tokens: int = 0
    """Of the prompt, those that the engine has to compute."""
    pulse: Pulse = field(default_factory=Pulse)
    """Of the worker rank."""


class VllmEngine:
    """The adapter for vLLM's `/v1/completions`."""

    def __init__(self, patience: Patience) -> None:
        """Connects when first used.

        Args:
            patience: How long engines may be silent.
        """
        self._patience = patience
        self._timeout = aiohttp.ClientTimeout(total=None, connect=patience.connect_seconds)
        self._session: aiohttp.ClientSession | None = None
        self._warnings = RateLimitedLog(log)

    async def close(self) -> None:
        """Closes every connection."""
        if self._session is not None:
            await self._session.close()

    async def generate(self, dispatch: Dispatch) -> AsyncGenerator[Chunk, None]:
        """Runs one request; closing the iterator aborts it on the engine.

        Raises:
            EngineFailed: If the engine cannot be reached, refuses, or breaks off.
        """
        now = asyncio.get_running_loop().time
        with Watch(self._patience, dispatch.uncached_tokens, dispatch.pulse, now()) as watch:
            try:
                async with aclosing(self._stream(dispatch, watch, now)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except aiohttp.ClientError as error:
                fault = fault_of_os_error(error) if isinstance(error, OSError) else Fault.WORKER
                raise self._failed(dispatch, str(error) or type(error).__name__, fault) from error
            except TimeoutError as error:
                raise self._failed(dispatch, f"hangs: no output for {watch.silence(now()):.3g} s") from error
            except OSError as error:
                raise self._failed(dispatch, str(error), fault_of_os_error(error)) from error

    async def _stream(self, dispatch: Dispatch, watch: Watch, now: Callable[[], float]) -> AsyncGenerator[Chunk, None]:
        asking = self._http().post(
            f"{dispatch.endpoint}/v1/completions",
            data=await _body(dispatch),
            headers=_headers(dispatch),
            allow_redirects=False,
        )
        async with until(watch.deadline):
            response = await asking
        async with response:
            if response.status != 200:
                raise await _refusal(response)
            stream = CompletionStream(dispatch.parameters.get("max_tokens"))
            while not stream.done and stream.failure is None:
                async with until(watch.deadline):
                    data = await response.content.readany()
                if not data:
                    break
                chunk = stream.feed(data)
                if chunk is not None and chunk.is_progress:
                    watch.output(now())
                    yield chunk
                    watch.paused(now())
            stream.end()
            if stream.failure is not None:
                raise stream.failure
            if stream.overrun:
                self._warnings.warning(
                    dispatch.endpoint, "%s goes on past the end of what was asked for", dispatch.endpoint
                )
                response.close()
            else:
                await _finish(response)

    def _failed(self, dispatch: Dispatch, what: str, fault: Fault = Fault.WORKER) -> EngineFailed:
        if fault is Fault.GATEWAY:
            self._warnings.warning("resources", "requests fail for lack of resources here: %s", what)
        return EngineFailed(f"{dispatch.endpoint}: {what}", fault=fault)

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # How many requests run at once is limited elsewhere, for all engines together.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
            # A packed answer is none: a few bytes of it may unpack to anything.
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                headers={"Accept-Encoding": "identity"},
            )
        return self._session


def _headers(dispatch: Dispatch) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "X-Request-Id": dispatch.request_id}
    if dispatch.dp_rank is not None:
        headers["X-data-parallel-rank"] = str(dispatch.dp_rank)
    return headers


async def _body(dispatch: Dispatch) -> bytes:
    rest = {
        **dispatch.parameters,
        "model": dispatch.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    written: list[str] = []
    for start in range(0, len(dispatch.token_ids), TOKENS_A_TURN):
        if start:
            await asyncio.sleep(0)
        # A list of integers prints as JSON, and several times as fast as json.dumps writes it.
        written.append(str(dispatch.token_ids[start : start + TOKENS_A_TURN].tolist())[1:-1])
    return f'{{"prompt": [{", ".join(written)}], {json.dumps(rest)[1:]}'.encode()


async def _finish(response: aiohttp.ClientResponse) -> None:
    """Reads the end of a body, so that its connection can be used again."""
    try:
        async with asyncio.timeout(TRAILER_SECONDS):
            while not response.content.at_eof():
                await response.content.readany()
    except (aiohttp.ClientError, TimeoutError, OSError):
        response.close()  # the answer is complete: only the connection is lost


async def _refusal(response: aiohttp.ClientResponse) -> EngineFailed:
    try:
        async with asyncio.timeout(REFUSAL_SECONDS):
            body = bytearray()
            while len(body) < REFUSAL_BYTES and (data := await response.content.read(REFUSAL_BYTES - len(body))):
                body += data
            text = body.decode(errors="replace")
    except (aiohttp.ClientError, TimeoutError, OSError):
        text = response.reason or ""
    try:
        document = json.loads(text)
        text = str(document.get("error", document).get("message", text))
    except (ValueError, AttributeError, RecursionError):
        pass  # not OpenAI's error shape: the text itself says it
    retry_after = response.headers.get("Retry-After", "")
    return EngineFailed(
        f"engine answered {response.status}: {text[:MAX_MESSAGE]}",
        fault=fault_of_status(response.status, retry_after=bool(retry_after)),
        retry_after_seconds=float(retry_after) if retry_after.isdecimal() else None,
    )
