"""One collection of a Kubernetes API, kept equal by list and watch.

::

    list ──▶ watch ──ends──▶ watch from the last version ──410──▶ list
      ▲                              │
      └────── pause, longer each time, or as Retry-After says ◀── any failure

An optional collection, of a kind that an API need not have, is empty while the API answers 404, and requested again
after minutes.

While nothing else can be had, everything that was known stays. Nothing that the API sends is trusted to be small, to
end, or to be of the right type: pages, lines, objects and pages of a list are counted, and every wait has an end. A
watch is requested anew each minute, so that a connection that is dead without having ended is noticed by then.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

import aiohttp

from kvscout_common.errors import Unavailable
from kvscout_common.http.engine_http import parsed
from kvscout_common.http.json_scan import load_json
from kvscout_common.kubernetes.access import KubernetesAccess
from kvscout_common.kubernetes.objects import ObjectProblem
from kvscout_common.plain_text import printable

log = logging.getLogger("kvscout.kubernetes")

PAGE_OBJECTS: Final = 100
MAX_PAGE_BYTES: Final = 8 * 1024 * 1024
"""Size of a page above which the next request asks for half as many objects."""
MAX_PAGE_VALUES: Final = 200_000
"""A pod has some hundred."""
LARGE_PAGE_BYTES: Final = 1024 * 1024
MAX_EVENT_BYTES: Final = 4 * 1024 * 1024
"""Largest watched object; what a cluster stores is below 2 MiB."""
MAX_OBJECTS: Final = 5_000
"""As in a workers file."""
LIST_SECONDS: Final = 30.0
"""For each page."""
WATCH_SECONDS: Final = 60
WATCH_GRACE_SECONDS: Final = 15.0
CONNECT_SECONDS: Final = 5.0
FIRST_PAUSE_SECONDS: Final = 0.25
LAST_PAUSE_SECONDS: Final = 15.0
MAX_RETRY_AFTER_SECONDS: Final = 60.0
ABSENT_SECONDS: Final = 300.0
"""Longest time until a kind of objects that the API did not have is requested again."""
GOOD_WATCH_SECONDS: Final = 1.0
"""A watch that ended sooner counts as a failure: what ends each immediately is not tried again without pause."""


class Keyed(Protocol):
    """An object as `read` gives it."""

    @property
    def key(self) -> str:
        """Return a key that is unique among the existing objects."""


T = TypeVar("T", bound=Keyed)


class Refused(Unavailable):
    """The API answered with an error."""

    def __init__(self, message: str, status: int, retry_after_seconds: float | None = None) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.status = status


class Expired(Unavailable):
    """The API no longer knows what changed since the version that was requested."""


def api_session() -> aiohttp.ClientSession:
    """Return a session to ask an API server with; keeps nothing that it says."""
    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())


class ListWatch(Generic[T]):
    """One collection.

    Args:
        access: The API.
        path: Of the collection, such as `/api/v1/namespaces/default/pods`.
        query: What selects of it, such as `{"labelSelector": "app=vllm"}`.
        read: Reads one object; raises `ObjectProblem`.
        changed: Called after every change of what is public here, with the keys of the objects that changed.
        optional: The API need not know this kind of objects; there are none then.
    """

    def __init__(
        self,
        access: KubernetesAccess,
        path: str,
        query: Mapping[str, str],
        read: Callable[[Any], T],
        changed: Callable[[Collection[str]], None],
        *,
        optional: bool = False,
    ) -> None:
        self._access = access
        self._url = access.server + path
        self._query = dict(query)
        self._read = read
        self._changed = changed
        self._optional = optional
        self._page_objects = PAGE_OBJECTS
        self._version = ""
        """Version of what is known, as the API calls it; "" = nothing."""
        self.objects: dict[str, T] = {}
        self.listed = False
        """True = `objects` was complete once."""
        self.problem = ""
        """Why `objects` may not be what is there now; "" = it is."""
        self.unreadable = ""
        """Problem of an object that is left out; "" = none is."""

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Follow the collection for ever."""
        clock = asyncio.get_running_loop().time
        pause = FIRST_PAUSE_SECONDS
        while True:
            began = clock()
            wait: float | None = None
            try:
                if not self._version:
                    await self._list(http)
                began = clock()
                await self._watch(http)
            except Expired:
                self._version = ""
            except Unavailable as error:
                if self._optional and isinstance(error, Refused) and error.status == 404:
                    self._absent()
                    await asyncio.sleep(ABSENT_SECONDS * random.uniform(0.5, 1.0))
                    continue
                wait = min(error.retry_after_seconds or 0.0, MAX_RETRY_AFTER_SECONDS)
                self._failed(str(error))
            if wait is None and clock() - began >= GOOD_WATCH_SECONDS:
                pause = FIRST_PAUSE_SECONDS
                continue
            # Many services lose the API at the same moment: they do not come back at the same moment.
            await asyncio.sleep(max(wait or 0.0, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, LAST_PAUSE_SECONDS)

    async def _list(self, http: aiohttp.ClientSession) -> None:
        found: dict[str, T] = {}
        unreadable, query = "", {**self._query, "limit": str(self._page_objects)}
        for _ in range(MAX_OBJECTS // self._page_objects):
            page = await self._page(http, query)
            items, meta = page.get("items"), page.get("metadata")
            version = meta.get("resourceVersion") if isinstance(meta, Mapping) else None
            if not isinstance(items, list) or len(items) > MAX_OBJECTS or not isinstance(version, str) or not version:
                raise Unavailable("the API answers no list")
            for item in items:
                try:
                    one = self._read(item)
                except ObjectProblem as error:
                    unreadable = f"{_name_of(item)}: {error}"
                else:
                    known = self.objects.get(one.key)
                    found[one.key] = known if known is not None and known == one else one  # the same stays the same
            more = meta.get("continue") if isinstance(meta, Mapping) else None
            if not more or not isinstance(more, str):
                break
            query["continue"] = more
        else:
            raise Unavailable(f"more than {MAX_OBJECTS:,} objects: select fewer")
        before = self.objects
        self.objects, self._version, self.unreadable = found, version, unreadable
        self.listed = True
        self._works()
        gone = before.keys() - found.keys()
        self._changed([*gone, *(key for key, one in found.items() if before.get(key) is not one)])

    async def _page(self, http: aiohttp.ClientSession, query: Mapping[str, str]) -> Mapping[str, Any]:
        body = bytearray()
        async with aclosing(self._chunks(http, query, LIST_SECONDS)) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > MAX_PAGE_BYTES:
                    self._page_objects = max(1, self._page_objects // 2)
                    raise Unavailable(f"the API answers more than {MAX_PAGE_BYTES:,} bytes")
        try:
            return await _document(bytes(body))
        except Unavailable:
            if len(body) > LARGE_PAGE_BYTES:  # there may only be too much in it
                self._page_objects = max(1, self._page_objects // 2)
            raise

    async def _watch(self, http: aiohttp.ClientSession) -> None:
        query = {
            **self._query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        buffer = bytearray()
        async with aclosing(self._chunks(http, query, WATCH_SECONDS + WATCH_GRACE_SECONDS)) as chunks:
            async for chunk in chunks:
                seen = len(buffer)
                buffer += chunk
                while (end := buffer.find(b"\n", seen)) >= 0:
                    line, seen = bytes(buffer[:end]), 0
                    del buffer[: end + 1]
                    if line.strip():
                        self._take(await _document(line))
                if len(buffer) > MAX_EVENT_BYTES:
                    self._version = ""  # what comes after it would be missed
                    raise Unavailable(f"the API sends an event of more than {MAX_EVENT_BYTES:,} bytes")

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, item = event.get("type"), event.get("object")
        if not isinstance(item, Mapping):
            raise Unavailable("the API sends an event without an object")
        if kind == "ERROR":
            self._version = ""
            if item.get("code") == 410:
                raise Expired("the watch expired")
            raise Unavailable(f"the API ends the watch: {_message_of(item)}")
        meta = item.get("metadata")
        version = meta.get("resourceVersion") if isinstance(meta, Mapping) else None
        if kind != "BOOKMARK":
            self._take_object(kind, item)
        if isinstance(version, str) and version:
            self._version = version
        self._works()

    def _take_object(self, kind: Any, item: Mapping[str, Any]) -> None:
        try:
            one = self._read(item)
        except ObjectProblem as error:
            self.unreadable = f"{_name_of(item)}: {error}"
            self._changed(())
            return
        if kind == "DELETED":
            self.objects.pop(one.key, None)
        elif kind in ("ADDED", "MODIFIED") and (one.key in self.objects or len(self.objects) < MAX_OBJECTS):
            if self.objects.get(one.key) == one:
                return  # of what changed we read nothing
            self.objects[one.key] = one
        else:
            self.unreadable = f"{one.key}: left out, there are {len(self.objects):,}"
        self._changed((one.key,))

    async def _chunks(
        self, http: aiohttp.ClientSession, query: Mapping[str, str], seconds: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield the body of an answer.

        Raises:
            Unavailable: There is none, or it ended too soon, or not in time; `Refused`, `Expired`.
        """
        try:
            async with http.get(
                self._url,
                params=query,
                headers={**self._access.headers(), "Accept": "application/json", "Accept-Encoding": "identity"},
                ssl=self._access.ssl(),
                timeout=aiohttp.ClientTimeout(seconds, sock_connect=CONNECT_SECONDS),
                allow_redirects=False,
                auto_decompress=False,
            ) as response:
                if response.status != 200:
                    raise await _refusal(response)
                if "watch" in query:
                    self._works()
                try:
                    async for chunk in response.content.iter_any():
                        yield chunk
                finally:
                    _cut(response)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unavailable(f"{self._access.server} does not answer: {_why(error)}") from error

    def _absent(self) -> None:
        """Note that the API does not know this kind of objects."""
        gone, self.objects = self.objects, {}
        self._version, self.listed = "", True
        self.problem = self.unreadable = ""
        self._changed(gone)

    def _failed(self, problem: str) -> None:
        if not self.problem:
            log.warning("%s: %s", self._url, problem)
        if self.problem != problem:
            self.problem = problem
            self._changed(())

    def _works(self) -> None:
        if self.problem:
            log.info("%s: watching again", self._url)
            self.problem = ""
            self._changed(())


async def _refusal(response: aiohttp.ClientResponse) -> Unavailable:
    body = await response.content.read(4096)
    try:
        status = await _document(body)
    except Unavailable:
        status = {}
    if response.status == 410:
        return Expired("the list expired")
    try:
        retry_after = float(response.headers.get("Retry-After", ""))
    except ValueError:
        retry_after = 0.0  # none, or a date
    said = _message_of(status)
    return Refused(
        f"the API answers {response.status}{f', {said}' if said else ''}", response.status, max(0.0, retry_after)
    )


async def _document(body: bytes) -> Mapping[str, Any]:
    try:
        document = await parsed(body, partial(load_json, max_values=MAX_PAGE_VALUES))
    except ValueError as error:
        raise Unavailable(f"the API's answer {printable(str(error))}") from error
    if not isinstance(document, Mapping):
        raise Unavailable("the API answers no object")
    return document


def _cut(response: aiohttp.ClientResponse) -> None:
    """Let go of an answer that is not read to its end: nobody waits for the goodbye of a server that may be dead."""
    connection = response.connection
    if connection is not None and connection.transport is not None and not response.content.at_eof():
        connection.transport.abort()


def _why(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        error = error.certificate_error
    elif isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    elif isinstance(error, aiohttp.ClientPayloadError):
        return "it broke off"
    return printable(str(error)) or type(error).__name__


def _message_of(status: Mapping[str, Any]) -> str:
    message = status.get("message")
    return printable(message) if isinstance(message, str) else ""


def _name_of(item: Any) -> str:
    meta = item.get("metadata") if isinstance(item, Mapping) else None
    name = meta.get("name") if isinstance(meta, Mapping) else None
    return printable(name) if isinstance(name, str) else "an object without a name"
