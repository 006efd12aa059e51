"""Calls on a native channel: what `grpc.aio` calls are, as far as kvscout uses them.

They fail with `grpc.aio.AioRpcError`, as those do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from kvscout_common.transport.native_core import (
    ANSWERED,
    END,
    HEADERS,
    MESSAGE,
    SEEN_MAYBE,
    SEEN_NOT_SENT,
    WRITABLE,
)
from kvscout_common.transport.waiting import Inbox, Notice

if TYPE_CHECKING:
    from kvscout_common.rpc.native_channel import NativeChannel

_CODES = {code.value[0]: code for code in grpc.StatusCode}
Metadata = Sequence[tuple[str, str | bytes]]
_HERE = "Locally cancelled by application!"
"""The text of a status that no server sent, as grpc has it."""


class NativeCall:
    """A call; begins as soon as there is a connection.

    Args:
        channel: Whose connection it uses.
        method: Full name.
        serialize: Makes bytes of a request; None = it is bytes.
        deserialize: Makes an answer of bytes; None = bytes are wanted.
        timeout: Seconds; None = no deadline.
        metadata: Sent with it, beside the channel's.
        wait_for_ready: Whether it waits, up to its deadline, while no connection can be made, instead of failing.
        request: Its one request.
        requests: Its requests, one after the other; None = `write` and `done_writing` say.
    """

    def __init__(
        self,
        channel: NativeChannel,
        method: str,
        *,
        serialize: Callable[[Any], bytes] | None,
        deserialize: Callable[[bytes], Any] | None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        wait_for_ready: bool | None = None,
        request: Any = None,
        requests: Any = None,
    ) -> None:
        self._channel = channel
        self._core = channel.core
        self._loop = self._core.loop
        self._method = method
        self._serialize = serialize
        self._deserialize = deserialize
        self._metadata = [*channel.metadata(), *(metadata or ())]
        self._waits = bool(wait_for_ready)
        self._number: int | None = None
        self._connection = 0
        self._inbox = Inbox(self._loop)
        self._news = self._inbox.news
        """Something came, it has begun, or it has ended."""
        self._room = Notice(self._loop)
        """For what is to be sent."""
        self._is_full = False
        """There is none."""
        self._received: Callable[[bytes], object] | None = None
        """Called with messages as they come."""
        self._receive_error: Exception | None = None
        """Exception that the callback raised."""
        self._status: tuple[grpc.StatusCode, str, Any] | None = None
        self._headers: Any = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._unsent: list[bytes] = []
        """Written before there was a connection."""
        self._again: list[bytes] | None = None
        """Messages sent, as long as the call can be made again."""
        self._made_again = False
        self._writes_all = False
        self._ends_at = None if timeout is None else self._loop.time() + timeout
        self._deadline = None if self._ends_at is None else self._core.deadlines.add(self._ends_at, self._expire)
        self._tasks: list[asyncio.Task[None]] = []
        if request is not None:
            self._unsent.append(self._bytes(request))
            self._writes_all = True
        elif requests is not None:
            self._tasks.append(self._loop.create_task(self._write_all(requests), name=f"requests of {method}"))
        self._begin_or_connect()

    async def read(self) -> Any:
        """Return the next answer; `grpc.aio.EOF` = there are no more.

        Raises:
            grpc.aio.AioRpcError: The call failed.
        """
        message = await self._inbox.next()
        if message is None:
            self._raise_for_status()
            return grpc.aio.EOF
        self._consumed(message)
        return message if self._deserialize is None else self._deserialize(message)

    async def receive_each(self, received: Callable[[bytes], object]) -> None:
        """See `callbacks.receive_each`."""
        self._received = received
        try:
            while (message := self._inbox.take()) is not None:
                self._receive(message, received)
            while self._status is None and self._receive_error is None:
                await self._news.wait()
        finally:
            self._received = None
        if self._receive_error is not None:
            raise self._receive_error
        self._raise_for_status()

    def _receive(self, message: bytes, received: Callable[[bytes], object]) -> None:
        self._consumed(message)
        if self._receive_error is None:
            try:
                received(message)
            except Exception as error:
                self._receive_error = error
                self._news.notify()

    def _consumed(self, message: bytes) -> None:
        if self._number is not None:
            self._core.rpc.consumed(self._number, len(message))
            self._core.flush()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._answers()

    async def _answers(self) -> AsyncIterator[Any]:
        while (answer := await self.read()) is not grpc.aio.EOF:
            yield answer

    async def write(self, request: Any) -> None:
        """Send a request; wait while the server does not read.

        Raises:
            asyncio.InvalidStateError: The call is over.
            grpc.aio.AioRpcError: It has failed.
        """
        if self._status is not None:
            self._raise_for_status()
            raise asyncio.InvalidStateError("the call is over")
        if self._number is None:
            self._unsent.append(self._bytes(request))
            await self._room.wait()
            return
        self._send(self._number, request)
        self._core.flush()
        if self._is_full:
            await self._room.wait()

    @property
    def has_room(self) -> bool:
        """Return whether a request can be sent immediately."""
        return self._number is not None and not self._is_full

    def send_now(self, request: Any) -> None:
        """Send a request, for which there is room; to be called from a callback of the loop.

        Raises:
            asyncio.InvalidStateError: The call has not begun, or is over.
        """
        if self._number is None:
            raise asyncio.InvalidStateError("the call has not begun, or is over")
        self._send(self._number, request)
        self._core.flush_now()

    def _send(self, number: int, request: Any) -> None:
        self._again = None
        self._is_full = not self._core.rpc.send(number, self._bytes(request))

    async def done_writing(self) -> None:
        """Say that no more requests come."""
        self._writes_all = True
        if self._number is not None:
            self._core.rpc.half_close(self._number)
            self._core.flush()

    def cancel(self) -> bool:
        """End it, and what came is not read any more; False if it has ended."""
        ended = self._end(grpc.StatusCode.CANCELLED, _HERE, ())
        if ended:
            self._inbox.clear()
        return ended

    def done(self) -> bool:
        """Return whether it has ended."""
        return self._status is not None

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self._status is not None and self._status[0] is grpc.StatusCode.CANCELLED

    def time_remaining(self) -> float | None:
        """Return seconds until its deadline; None = it has none."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._loop.time())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Has a function called with this call once it has ended."""
        if self._status is None:
            self._callbacks.append(callback)
        else:
            self._loop.call_soon(callback, self)

    async def initial_metadata(self) -> Any:
        """Return what came before the first answer, once one came or it ended."""
        while self._headers is None and self._status is None:
            await self._news.wait()
        return self._headers or ()

    async def trailing_metadata(self) -> Any:
        """Return what came with the status, once it ended."""
        return (await self._outcome())[2]

    async def code(self) -> grpc.StatusCode:
        """Return how it ended, once it did."""
        return (await self._outcome())[0]

    async def details(self) -> str:
        """Return the text of its status, once it ended."""
        return (await self._outcome())[1]

    async def wait_for_connection(self) -> None:
        """Return once it has begun.

        Raises:
            grpc.aio.AioRpcError: It could not.
        """
        while self._number is None and self._status is None:
            await self._news.wait()
        self._raise_for_status()

    def on_event(self, kind: int, event: tuple[Any, ...]) -> None:
        """See `native_core.EventHandler`."""
        if kind == ANSWERED:
            _, _, self._headers, message, code, details, trailers = event
            self._came(message)
            self._over(_CODES[code], details, trailers)
        elif kind == MESSAGE:
            self._came(event[2])
        elif kind == END:
            _, _, code, details, trailers, seen = event
            if seen == SEEN_MAYBE or not self._make_again(seen):
                self._over(_CODES[code], details, trailers)
        elif kind == HEADERS:
            self._headers, self._again = event[2], None
            self._news.notify()
        elif kind == WRITABLE:
            self._is_full = False
            self._room.notify()

    def _came(self, message: bytes) -> None:
        if self._received is None:
            self._inbox.put(message)
        else:
            self._receive(message, self._received)

    def _over(self, code: grpc.StatusCode, details: str, trailers: Any) -> None:
        if self._number is not None:
            self._core.calls.pop(self._number, None)
            self._number = None
        self._end(code, details, trailers)

    def _make_again(self, seen: int) -> bool:
        """Make a call again that the server has not looked at; not twice, and not without all that was sent of it."""
        if self._again is None or self._made_again or self._number is None:
            return False
        del self._core.calls[self._number]
        self._number = None
        self._unsent, self._again, self._made_again = self._again, None, True
        if seen == SEEN_NOT_SENT:
            self._channel.leave(self._connection)
        self._begin_or_connect()
        return True

    async def _outcome(self) -> tuple[grpc.StatusCode, str, Any]:
        while self._status is None:
            await self._news.wait()
        return self._status

    def _bytes(self, request: Any) -> bytes:
        if self._serialize is not None:
            return self._serialize(request)
        message: bytes = request
        return message

    def _begin_or_connect(self) -> None:
        connection = self._channel.ready()
        if connection is None or not self._begin(connection):
            self._tasks.append(self._loop.create_task(self._connect(), name=f"begin {self._method}"))

    async def _connect(self) -> None:
        try:
            while not self.done():
                connection = await self._channel.connected(waits=self._waits)
                if self.done() or self._begin(connection):
                    return
        except ConnectionError as error:
            self._end(grpc.StatusCode.UNAVAILABLE, str(error), ())

    def _begin(self, connection: int) -> bool:
        """False if the connection has gone meanwhile."""
        remaining = self.time_remaining()
        timeout_us = None if remaining is None else max(1, int(remaining * 1e6))
        first = self._unsent[0] if self._unsent else None
        ends = self._writes_all and len(self._unsent) < 2
        try:
            number = self._core.rpc.call(connection, self._method, self._metadata, timeout_us, first, ends)
        except ValueError as error:
            self._end(grpc.StatusCode.INTERNAL, str(error), ())
            return True
        if number is None:
            return False
        self._number, self._connection = number, connection
        self._core.calls[number] = self
        for message in self._unsent[1:]:
            self._core.rpc.send(number, message)
        if self._writes_all and len(self._unsent) > 1:
            self._core.rpc.half_close(number)
        self._again, self._unsent = self._unsent, []
        self._core.flush()
        self._room.notify()
        self._news.notify()
        return True

    async def _write_all(self, requests: Any) -> None:
        try:
            if hasattr(requests, "__aiter__"):
                async for request in requests:
                    await self.write(request)
            else:
                for request in requests:
                    await self.write(request)
            await self.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass  # the call has ended, which its reader learns
        except Exception:
            self._end(grpc.StatusCode.UNKNOWN, "the iterator of requests raised", ())
            raise

    def _expire(self) -> None:
        self._end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())

    def _end(self, code: grpc.StatusCode, details: str, metadata: Any) -> bool:
        if self._status is not None:
            return False
        self._status = (code, details, metadata)
        if self._number is not None:
            self._core.calls.pop(self._number, None)
            self._core.rpc.reset(self._number)
            self._core.flush()
            self._number = None
        if self._deadline is not None:
            self._core.deadlines.drop(self._deadline)
        current = asyncio.current_task(self._loop) if self._tasks else None
        for task in self._tasks:
            if task is not current:
                task.cancel()
        for callback in self._callbacks:
            self._loop.call_soon(callback, self)
        self._again = None
        self._room.notify()
        self._inbox.end()
        return True

    def _raise_for_status(self) -> None:
        if self._status is None or self._status[0] is grpc.StatusCode.OK:
            return
        code, details, trailers = self._status
        if code is grpc.StatusCode.CANCELLED and details is _HERE:
            raise asyncio.CancelledError
        raise grpc.aio.AioRpcError(
            code, grpc.aio.Metadata(*(self._headers or ())), grpc.aio.Metadata(*trailers), details=details
        )

    def __del__(self) -> None:
        # A stream that nobody reads to its end any more, as grpc.aio has it.
        if self._status is None and not self._loop.is_closed():
            self.cancel()


class UnaryCall(NativeCall):
    """A call of one request and one answer; awaited, it is its answer."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            while self._status is None:
                await self._news.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise_for_status()
        message = self._inbox.first()
        if message is None:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no answer came"
            )
        return message if self._deserialize is None else self._deserialize(message)
