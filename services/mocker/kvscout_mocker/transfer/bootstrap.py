"""SGLang's handshake between a prefill and a decode engine: both get the same body with a `bootstrap_room` at once.

::

    client ──▶ prefill: opens the room, waits for the decode engine       ┐
           └─▶ decode:  reserves blocks, calls the prefill's bootstrap    ├─ then prefill computes, the blocks
               server, waits there                                        ┘  cross, both answer

The room's number picks the prefill rank (room mod ranks). Neither side can serve alone: without a room the answer is
400. A side that does not come, goes or fails ends the other with 500 (with a broken stream if it has begun), after
`bootstrap_timeout_seconds` at the prefill and `waiting_timeout_seconds` at the decode engine.

Kinder than SGLang: a room that is open already is refused (SGLang 0.5's schedulers crash), and the bootstrap server
forwards the rooms' changes itself, so that a waiter learns of an end immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import aiohttp
from aiohttp import web

from kvscout_common.errors import InternalError, InvalidArgument
from kvscout_mocker.config import TransferConfig
from kvscout_mocker.engine.kv_transfer import BlockHolder, KvTransfer, TransferFailed
from kvscout_mocker.engine.request import Request
from kvscout_mocker.fields import integer, json_object
from kvscout_mocker.requests.generation import Bootstrap
from kvscout_mocker.server import Document, json_body

ROOM_PATH = "/mock/rooms"


class _Computed(NamedTuple):
    request: Request
    rank: BlockHolder


class _Room:
    """The meeting of the two engines of one request, seen from the prefill engine."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.opened = False
        """The prefill transfer is here."""
        self.decode_came = asyncio.Event()
        self.computed: asyncio.Future[_Computed] = asyncio.get_running_loop().create_future()
        """Result of the prefill side; an exception when it ends otherwise."""

    def fail(self, why: str) -> None:
        """Fail both sides; no-op when the prompt is computed."""
        if not self.computed.done():
            self.computed.set_exception(TransferFailed(why))
            self.computed.exception()  # retrieved: there may be no waiter
        self.decode_came.set()


class BootstrapServer:
    """The rooms of a prefill engine, and the routes through which decode engines enter them.

    Args:
        config: Times.
        dp_size: Ranks of the engine.
    """

    def __init__(self, config: TransferConfig, dp_size: int) -> None:
        self._config = config
        self._dp_size = dp_size
        self._rooms: dict[int, _Room] = {}

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
        app.add_routes([web.post(ROOM_PATH, self.entered)])

    def transfer(self, bootstrap: Bootstrap) -> KvTransfer:
        """Return the prefill side of a room.

        Raises:
            InvalidArgument: It is open already.
        """
        room = self._room(bootstrap.room)
        if room.opened:
            raise InvalidArgument(f"room {room.number} is in use", field="bootstrap_room")
        room.opened = True
        return _PrefillTransfer(room, room.number % self._dp_size, self._config, lambda: self._closed(room))

    async def entered(self, http: web.Request) -> web.StreamResponse:
        """Let a decode engine wait in a room; answer when its blocks are across, or will not come."""
        fields = json_object(await json_body(http))
        room = self._room(integer(fields, "room", -1, minimum=0))
        if room.decode_came.is_set():
            raise InvalidArgument(f"room {room.number} is taken", field="bootstrap_room")
        room.decode_came.set()
        try:
            request, rank = await asyncio.shield(room.computed)
        except TransferFailed as error:
            raise InternalError(str(error)) from None
        finally:
            room.fail("the decode engine went away")
            if not room.opened:
                self._closed(room)
        try:
            if request.prompt_digest != fields.get("prompt_digest"):
                raise InvalidArgument("another prompt was computed", field="prompt_digest")
            tokens = integer(fields, "tokens", 0, minimum=0, maximum=request.prompt_tokens)
            await asyncio.sleep(self._config.seconds(tokens))
        finally:
            rank.release(request)
        return web.json_response({"cached_tokens": request.cached_tokens or 0})

    def _room(self, number: int) -> _Room:
        return self._rooms.setdefault(number, _Room(number))

    def _closed(self, room: _Room) -> None:
        if self._rooms.get(room.number) is room:
            del self._rooms[room.number]


class _PrefillTransfer(KvTransfer):
    holds = True
    max_tokens = 1

    def __init__(self, room: _Room, dp_rank: int, config: TransferConfig, closed: Callable[[], None]) -> None:
        self.dp_rank = dp_rank
        self._room = room
        self._config = config
        self._closed = closed

    async def ready(self) -> None:
        room, seconds = self._room, self._config.bootstrap_timeout_seconds
        why = f"Request {room.number} timed out after {seconds:.1f}s in KVPoll.Bootstrapping"
        try:
            async with asyncio.timeout(seconds):
                await room.decode_came.wait()
        except TimeoutError:
            room.fail(why)
        if room.computed.done():  # only by a failure, so early
            error = room.computed.exception() or why
            text = f"Prefill bootstrap failed for request rank={self.dp_rank} req.bootstrap_room={room.number}"
            raise InternalError(f"{text} with exception KVTransferError(bootstrap_room={room.number}): {error}")

    def done(self, request: Request, rank: BlockHolder) -> Document:
        if self._room.computed.done():  # the decode engine went away
            rank.release(request)
        else:
            self._room.computed.set_result(_Computed(request, rank))
        return {}

    def close(self) -> None:
        self._room.fail("the prefill request was aborted")
        self._closed()


class RoomClient:
    """The decode engines' side: one for a process.

    Args:
        config: Times.
    """

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """End transfers."""
        if self._session is not None:
            await self._session.close()

    def transfer(self, bootstrap: Bootstrap) -> KvTransfer:
        """Return the decode transfer of a room."""
        return _DecodeTransfer(bootstrap, self)

    async def enter(self, bootstrap: Bootstrap, request: Request, tokens: int) -> int:
        """Wait in a room until the blocks are across; return the tokens that the prefill engine had cached.

        Raises:
            TransferFailed: They do not come.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        where = f"{bootstrap.host}:{bootstrap.port}"
        seconds = self._config.waiting_timeout_seconds
        body = {"room": bootstrap.room, "prompt_digest": request.prompt_digest, "tokens": tokens}
        failed = f"KVTransferError(bootstrap_room={bootstrap.room})"
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._session.post(f"http://{where}{ROOM_PATH}", json=body, timeout=timeout) as answer:
                if answer.status != 200:
                    raise TransferFailed(f"{failed}: {where} answered {answer.status}: {(await answer.text())[:200]}")
                cached: int = (await answer.json())["cached_tokens"]
                return cached
        except TimeoutError:
            raise TransferFailed(f"{failed}: timed out after {seconds:.1f}s in KVPoll.WaitingForInput") from None
        except (aiohttp.ClientError, ValueError, OSError) as error:
            text = f"{failed}: Lost connection with prefill instance (bootstrap_addr: {where}): {error}"
            raise TransferFailed(text) from None


class _DecodeTransfer(KvTransfer):
    recomputes = False

    def __init__(self, bootstrap: Bootstrap, client: RoomClient) -> None:
        self.source = self
        self._bootstrap = bootstrap
        self._client = client
        self._cached_tokens = 0
        """Cached tokens of the prefill engine."""

    async def fetch(self, request: Request, tokens: int) -> None:
        self._cached_tokens = await self._client.enter(self._bootstrap, request, tokens)

    def cached_tokens(self, request: Request) -> int:
        return self._cached_tokens
