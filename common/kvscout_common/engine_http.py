"""What engines answer over HTTP: read whole, but only so much and for so long; nothing of it is unpacked or followed.

An engine that is hostile, or only broken, costs its own answer and nothing else: whatever is wrong is `Unavailable`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

import aiohttp

from kvscout_common.errors import Unavailable
from kvscout_common.plain_text import printable

MAX_PAGE_BYTES: Final = 4 * 1024 * 1024
INLINE_BYTES: Final = 32 * 1024
"""Larger pages are parsed in a thread: the event loop has less than a millisecond for one engine."""
_ABSENT: Final = (404, 405, 501)
"""Statuses of a page that an engine does not have."""

T = TypeVar("T")


class NoAnswer(Unavailable):
    """Nobody is there, or it does not speak HTTP, or not in time."""


def engine_session() -> aiohttp.ClientSession:
    """A session to ask engines with; keeps nothing that they say."""
    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())


async def read_page(http: aiohttp.ClientSession, url: str, *, timeout_seconds: float) -> bytes | None:
    """A page; None = the engine has none at this address.

    Args:
        http: To ask with.
        url: What to ask for.
        timeout_seconds: For all of it.

    Raises:
        Unavailable: There is no such answer in time, or one that is too large, packed, or of another place.
    """
    try:
        async with http.get(
            url,
            timeout=aiohttp.ClientTimeout(timeout_seconds),
            allow_redirects=False,
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        ) as response:
            if response.status in _ABSENT:
                return None
            if response.status != 200:
                raise Unavailable(f"{url} answers {response.status}")
            packed = response.headers.get("Content-Encoding", "identity")
            if packed.lower() != "identity":
                raise Unavailable(f"{url} answers packed, as {printable(packed)}, which it was asked not to")
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > MAX_PAGE_BYTES:
                    raise Unavailable(f"{url} answers more than {MAX_PAGE_BYTES} bytes")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        # ValueError: the address is none, or redirects to none.
        raise NoAnswer(f"{url} does not answer: {printable(str(error)) or type(error).__name__}") from error
    return bytes(body)


async def read_json(http: aiohttp.ClientSession, url: str, *, timeout_seconds: float) -> Any:
    """A page of JSON; None = the engine has none at this address.

    Raises:
        Unavailable: As `read_page`, or it is no JSON.
    """
    page = await read_page(http, url, timeout_seconds=timeout_seconds)
    if page is None:
        return None
    try:
        return await parsed(page, json.loads)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"{url} answers no JSON") from error


async def parsed(page: bytes, parse: Callable[[bytes], T]) -> T:
    """What a function makes of a page, without holding up the event loop."""
    return parse(page) if len(page) <= INLINE_BYTES else await asyncio.to_thread(parse, page)
