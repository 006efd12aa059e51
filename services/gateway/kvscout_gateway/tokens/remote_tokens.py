"""Calls of engines and renderers for tokens: in time, not too many at once, and none where it does not work."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, NamedTuple

from kvscout_common.errors import InvalidArgument, Unavailable
from kvscout_common.http.engine_http import parsed
from kvscout_common.http.http import FailureKind, HttpClient, HttpFailed, HttpRequest
from kvscout_common.plain_text import printable
from kvscout_gateway.tokens.chunk_cache import ChunkCache
from kvscout_gateway.tokens.rendered import Rendered

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""A million tokens have eight digits each at most, and a comma."""
MAX_ASKING: Final = 32
"""Prompts that others tokenize at once for one gateway; a further one goes without."""
LACKING_REST_SECONDS: Final = 300.0
"""Back-off after a server says that it has no such path."""
REST_SECONDS: Final = 30.0
"""After one that fails, or answers nonsense."""
LATE_REST_SECONDS: Final = 1.0
"""And one that is too slow: it has enough to do, and each request would wait for it."""
GONE_REST_SECONDS: Final = 1.0
"""And one that cannot be reached: it costs next to nothing to ask, and may be back at any time."""
MAX_SERVERS: Final = 3
"""Servers that are asked for the tokens of one prompt, one after another, if they fail."""
MAX_CANDIDATES: Final = 64
"""Servers among which those are looked for that may be asked now."""

_LACKING: Final = (403, 404, 405, 501)
_REQUESTS_FAULT: Final = (400, 413, 422)


class Server(NamedTuple):
    """Server that can tokenize."""

    endpoint: str
    """Base URL of its HTTP API."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers of a request to it, such as its key."""


class Call(NamedTuple):
    """A call that returns tokens."""

    path: str
    body: bytes
    read: Callable[[bytes], Rendered]
    """Reads the answer; raises Unavailable."""
    digest: str
    """Digest of path and body."""

    @classmethod
    def of(cls, path: str, body: bytes, read: Callable[[bytes], Rendered]) -> Call:
        """Return a call."""
        return cls(path, body, read, path + hashlib.blake2b(body, digest_size=16).hexdigest())


class RemoteTokens:
    """Asks servers, and remembers what they said."""

    def __init__(
        self,
        http: HttpClient,
        *,
        connect_seconds: float,
        cache_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask servers.

        Args:
            http: To ask with.
            connect_seconds: For the connection.
            cache_bytes: Of answers kept for each tenant.
            clock: Seconds.
        """
        self._http = http
        self._connect_seconds = connect_seconds
        self._clock = clock
        self._resting: dict[tuple[str, str, str], tuple[float, str]] = {}
        self._asking = 0
        self.cache = ChunkCache(cache_bytes)

    async def ask(self, servers: Iterable[Server], call: Call, *, model: str, tenant: str, seconds: float) -> Rendered:
        """Return the tokens of a prompt.

        Args:
            servers: At least one, in the order in which they are asked: the next one if one fails. Only the first
                `MAX_CANDIDATES` count.
            call: What to ask.
            model: Whose tokens.
            tenant: Who asks.
            seconds: Longest wait, for all of them.

        Raises:
            InvalidArgument: The server says that this is no prompt.
            Unavailable: None returns them in time.
        """
        known = self.cache.get(tenant, call.digest)
        if known is not None:
            return Rendered.unpacked(known)
        until, asked = self._clock() + seconds, 0
        problem = Unavailable("there is no server to ask")
        for server in islice(servers, MAX_CANDIDATES):
            key, now = (server.endpoint, call.path, model), self._clock()
            if key in self._resting and self._resting[key][0] > now:
                problem = problem if asked else Unavailable(f"{server.endpoint} is not asked to tokenize for now")
                continue
            if asked == MAX_SERVERS or now >= until:
                break
            asked += 1
            try:
                rendered = await self._ask(server, call, key, until - now)
            except Unavailable as error:
                problem = error
                continue
            self.cache.put(tenant, call.digest, rendered.packed())
            return rendered
        raise problem

    async def _ask(self, server: Server, call: Call, key: tuple[str, str, str], seconds: float) -> Rendered:
        """Return the tokens that one server says within that time; it rests if it does not. Errors as of `ask`."""
        if self._asking >= MAX_ASKING:
            raise Unavailable(f"{self._asking} prompts are being tokenized by others (limit)")
        self._asking += 1
        try:
            async with asyncio.timeout(seconds):
                return await self.fetch(server, call)
        except TimeoutError:
            why = f"{server.endpoint} did not tokenize within {seconds * 1000:.0f} ms"
            self._rest(key, LATE_REST_SECONDS, why)
            raise Unavailable(why) from None
        except Unavailable as error:
            self._rest(key, error.rest_seconds if isinstance(error, NotTokenized) else REST_SECONDS, str(error))
            raise
        finally:
            self._asking -= 1

    async def fetch(self, server: Server, call: Call) -> Rendered:
        """Return a server's tokens, however long that takes it.

        Raises:
            InvalidArgument: It says that this is no prompt.
            Unavailable: It returns none; `NotTokenized` if it is gone or has no such path.
        """
        headers = (("Content-Type", "application/json"), *server.headers)
        request = HttpRequest(f"{server.endpoint}{call.path}", headers=headers, body=call.body)
        try:
            answer = await self._http.send(request, connect_seconds=self._connect_seconds)
            try:
                page = await answer.read(MAX_ANSWER_BYTES)
            finally:
                answer.abort()
        except HttpFailed as error:
            why = f"{server.endpoint} does not tokenize: {printable(str(error))}"
            if error.kind in (FailureKind.UNREACHABLE, FailureKind.BROKEN):
                raise NotTokenized(why, GONE_REST_SECONDS) from error
            raise Unavailable(why) from error
        says = f"{server.endpoint} answers {answer.status} at {call.path}"
        if answer.status in _REQUESTS_FAULT:
            raise InvalidArgument(says)
        if answer.status in _LACKING:
            raise NotTokenized(says, LACKING_REST_SECONDS)
        if answer.status != 200:
            raise Unavailable(says)
        return await parsed(page, call.read)

    def troubles(self, endpoint: str) -> set[str]:
        """Return why a server is not asked for now, if it is not."""
        now = self._clock()
        return {why for key, (until, why) in self._resting.items() if key[0] == endpoint and until > now}

    def _rest(self, key: tuple[str, str, str], seconds: float, why: str) -> None:
        now = self._clock()
        self._resting = {one: rest for one, rest in self._resting.items() if rest[0] > now}
        self._resting[key] = now + seconds, why


class NotTokenized(Unavailable):
    """A server cannot be reached, breaks off, or has no such path, or not for this model.

    Args:
        message: The error.
        rest_seconds: For which it is not asked again.
    """

    def __init__(self, message: str, rest_seconds: float) -> None:
        super().__init__(message)
        self.rest_seconds = rest_seconds
