"""An engine's /tokenize: 50 ms at most, and not at all where it does not work."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kvscout_common.errors import InvalidArgument, Unavailable
from kvscout_common.http.engine_http import parsed
from kvscout_common.http.http import HttpClient, HttpFailed, HttpRequest
from kvscout_common.http.json_scan import scan_object
from kvscout_common.plain_text import printable
from kvscout_gateway.tokens.chunk_cache import ChunkCache

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""A million tokens have eight digits each at most, and a comma."""
MAX_ASKING: Final = 32
"""Prompts that engines tokenize at once for one gateway; a further one goes without."""
REST_SECONDS: Final = 30.0
"""Back-off after an engine says that it does not tokenize."""
LATE_REST_SECONDS: Final = 1.0
"""And one that is too slow: it has enough to do, and each request would wait for it."""


_REQUESTS_FAULT: Final = (400, 413, 422)


class Tokenizing(NamedTuple):
    """Engine that can tokenize."""

    endpoint: str
    """Base URL of its HTTP API."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers of a request to it, such as its key."""


class EngineTokenize:
    """Asks engines, and remembers what they said."""

    def __init__(
        self,
        http: HttpClient,
        choose: Callable[[str, str], Tokenizing | None],
        *,
        timeout_seconds: float,
        connect_seconds: float,
        cache_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask engines.

        Args:
            http: To ask with.
            choose: A healthy engine for a model, as the client names it, of a tenant; None = there is none.
            timeout_seconds: For the answer.
            connect_seconds: For the connection, within it.
            cache_bytes: Of prompts kept for each tenant.
            clock: Seconds.
        """
        self._http = http
        self._choose = choose
        self._timeout = timeout_seconds
        self._connect_seconds = connect_seconds
        self._clock = clock
        self._resting: dict[str, float] = {}
        self._asking = 0
        self.cache = ChunkCache(cache_bytes)

    async def __call__(self, body: Mapping[str, Any], tenant: str) -> bytes:
        """Return the tokens of a prompt, u32 each.

        Args:
            body: As /tokenize wants it.
            tenant: Whose it is.

        Raises:
            InvalidArgument: The engine says that this is no prompt.
            Unavailable: No engine returns them in time.
        """
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        known = self.cache.get(tenant, text)
        if known is not None:
            return known
        engine = self._choose(tenant, str(body.get("model") or ""))
        if engine is None:
            raise Unavailable("no engine is there to tokenize the prompt")
        now = self._clock()
        if self._resting.get(engine.endpoint, 0.0) > now:
            raise Unavailable(f"{engine.endpoint} is not asked to tokenize for now")
        if self._asking >= MAX_ASKING:
            raise Unavailable(f"{self._asking} prompts are being tokenized by engines (limit)")
        self._asking += 1
        try:
            async with asyncio.timeout(self._timeout):
                tokens = await self.ask(engine, text)
        except TimeoutError:
            self._rest(engine.endpoint, now + LATE_REST_SECONDS)
            raise Unavailable(f"{engine.endpoint} did not tokenize within {self._timeout * 1000:g} ms") from None
        except Unavailable:
            self._rest(engine.endpoint, now + REST_SECONDS)
            raise
        finally:
            self._asking -= 1
        self.cache.put(tenant, text, tokens)
        return tokens

    async def ask(self, engine: Tokenizing, body: str) -> bytes:
        """Return an engine's tokens, however long that takes it.

        Raises:
            InvalidArgument: It says that this is no prompt.
            Unavailable: It returns none.
        """
        headers = (("Content-Type", "application/json"), *engine.headers)
        try:
            request = HttpRequest(f"{engine.endpoint}/tokenize", headers=headers, body=body.encode())
        except UnicodeEncodeError as error:
            raise Unavailable("half of a surrogate pair is no text") from error
        try:
            answer = await self._http.send(request, connect_seconds=self._connect_seconds)
            try:
                page = await answer.read(MAX_ANSWER_BYTES)
            finally:
                answer.abort()
        except HttpFailed as error:
            raise Unavailable(f"{engine.endpoint} does not tokenize: {printable(str(error))}") from error
        if answer.status in _REQUESTS_FAULT:
            raise InvalidArgument(f"{engine.endpoint} answers {answer.status} when asked to tokenize")
        if answer.status != 200:
            raise Unavailable(f"{engine.endpoint} answers {answer.status} when asked to tokenize")
        return await parsed(page, _tokens)

    def _rest(self, endpoint: str, until: float) -> None:
        now = self._clock()
        self._resting = {one: end for one, end in self._resting.items() if end > now}
        self._resting[endpoint] = until


def _tokens(page: bytes) -> bytes:
    try:
        tokens = scan_object(page, strict=False, packed="tokens").packed
    except ValueError as error:
        raise Unavailable(f"an engine was asked to tokenize and its answer {printable(str(error))}") from error
    if tokens.token_ids is None or tokens.first is not None:
        raise Unavailable("an engine was asked to tokenize and answers without tokens")
    return tokens.token_ids
