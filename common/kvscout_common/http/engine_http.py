"""Answers of engines over HTTP: read whole, but only so much and for so long; nothing of it is unpacked or followed.

An engine that is hostile, or only broken, costs its own answer and nothing else: whatever is wrong is `Unavailable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final, TypeVar

from kvscout_common.errors import Unavailable
from kvscout_common.http.http import Headers, HttpClient, HttpFailed, HttpRequest
from kvscout_common.http.json_scan import load_json
from kvscout_common.plain_text import printable

MAX_PAGE_BYTES: Final = 4 * 1024 * 1024
MAX_PAGE_VALUES: Final = 100_000
"""Largest number of values in a page of JSON."""
INLINE_BYTES: Final = 32 * 1024
"""Larger pages are parsed in a thread: the event loop has less than a millisecond for one engine."""
_ABSENT: Final = (404, 405, 501)
"""Statuses of a page that an engine does not have."""
_UNPACKED: Final = (("Accept-Encoding", "identity"),)

T = TypeVar("T")


class NoAnswer(Unavailable):
    """Nobody is there, or it does not speak HTTP, or not in time."""


async def read_page(
    http: HttpClient,
    url: str,
    *,
    timeout_seconds: float,
    headers: Headers = (),
    method: str = "GET",
    max_bytes: int = MAX_PAGE_BYTES,
) -> bytes | None:
    """Return a page; None = the engine has none at this address.

    Args:
        http: To ask with.
        url: What to ask for.
        timeout_seconds: For all of it.
        headers: That the engine wants to see, such as its key.
        method: Of the request.
        max_bytes: Largest page that is read.

    Raises:
        Unavailable: There is no such answer in time, or one that is too large, packed, or of another place.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            answer = await http.send(HttpRequest(url, method, (*_UNPACKED, *headers)), connect_seconds=timeout_seconds)
            try:
                if answer.status in _ABSENT:
                    return None
                if answer.status != 200:
                    raise Unavailable(f"{url} answers {answer.status}")
                packed = next((text for name, text in answer.headers if name.lower() == "content-encoding"), "identity")
                if packed.lower() != "identity":
                    raise Unavailable(f"{url} answers packed, as {printable(packed)}, which it was asked not to")
                return await _bounded(answer.chunks(), url, max_bytes)
            finally:
                answer.abort()
    except (HttpFailed, TimeoutError, OSError) as error:
        raise NoAnswer(f"{url} does not answer: {printable(str(error)) or 'not in time'}") from error


async def _bounded(chunks: AsyncIterator[bytes], url: str, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > max_bytes:
            raise Unavailable(f"{url} answers more than {max_bytes} bytes")
    return bytes(body)


async def read_json(http: HttpClient, url: str, *, timeout_seconds: float) -> Any:
    """Return a page of JSON; None = the engine has none at this address.

    Raises:
        Unavailable: As `read_page`, or it is no JSON, or there is too much in it.
    """
    page = await read_page(http, url, timeout_seconds=timeout_seconds)
    if page is None:
        return None
    try:
        return await parsed(page, partial(load_json, max_values=MAX_PAGE_VALUES))
    except ValueError as error:
        raise Unavailable(f"the answer of {url} {printable(str(error))}") from error


async def parsed(page: bytes, parse: Callable[[bytes], T]) -> T:
    """Return what a function makes of a page, without holding up the event loop."""
    return parse(page) if len(page) <= INLINE_BYTES else await asyncio.to_thread(parse, page)
