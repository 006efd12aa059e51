"""Context of a handler on the native transport: `grpc.aio.ServicerContext`, as far as kvscout uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NoReturn

import grpc

from kvscout_common.identity.identity import ANONYMOUS, Identity
from kvscout_common.rpc.answering import Answer
from kvscout_common.rpc.handlers import Handler
from kvscout_common.transport.native_core import (
    HALF_CLOSED,
    MESSAGE,
    RESET,
    WRITABLE,
    MessageStream,
    Metadata,
    NativeCore,
)
from kvscout_common.transport.waiting import Inbox, Notice


class NativeContext(MessageStream):
    """One call, from its first event to its last.

    Args:
        core: Brings its events, sends what it says.
        number: Of the call.
        metadata: As the caller sent it.
        timeout_us: Time left, as the caller said; None = it has no deadline.
        handler: Its method's.
    """

    def __init__(
        self, core: NativeCore, number: int, metadata: Metadata, timeout_us: int | None, handler: Handler
    ) -> None:
        self.core = core
        self.number = number
        self._metadata = metadata
        # grpcio's stubs do not know that a handler may go without.
        self._serialize: Any = handler.response_serializer
        self._loop = core.loop
        self._task: asyncio.Task[None] | None = None
        self._inbox = Inbox(core.loop)
        self.takes_messages = handler.response_serializer is None
        self.room = Notice(core.loop)
        self._answer: Answer | None = None
        """Asked first about a message that comes, while the handler waits for one."""
        self._trailers: list[tuple[str, str | bytes]] = []
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._finished = False
        self._callbacks: list[Callable[[Any], None]] = []
        self.ended_by_caller = False
        """The caller has gone, or its deadline is over: nobody waits for what is done here."""
        self._ends_at = None if timeout_us is None else self._loop.time() + timeout_us / 1e6
        self._deadline: int | None = None
        self._reads = bool(handler.request_streaming)
        """Messages of the caller are still to come."""
        self.closed = False
        """Close the call: the handler has returned."""
        core.calls[number] = self

    def waits(self, task: asyncio.Task[None]) -> None:
        """Say that the handler has not returned immediately, and which task runs it, to be cancelled with the call."""
        self._task = task
        if self._ends_at is not None:
            self._deadline = self.core.deadlines.add(self._ends_at, self._expire)

    def on_event(self, kind: int, event: tuple[Any, ...]) -> None:
        """See `native_core.EventHandler`."""
        if kind == MESSAGE:
            if self._answer is None or not self._answered(self._answer(event[2]), event[2]):
                self._inbox.put(event[2])
        elif kind == HALF_CLOSED:
            self._inbox.end()
        elif kind == WRITABLE:
            self.room.notify()
        elif kind == RESET:
            self._finished = True
            self._end()

    def admitted(self, identity: Identity) -> None:
        """Note who calls: a connection of a known caller is not closed for others, and its messages may be large."""
        if identity is not ANONYMOUS:
            self.core.rpc.trust(self.number)
        if self._reads:
            self.core.admit(self.number, identity.tenant)

    def invocation_metadata(self) -> Metadata:
        """Return what the caller sent beside its messages."""
        return self._metadata

    def peer(self) -> str:
        """Return the caller's address; "" = it has gone."""
        return self.core.rpc.peer(self.number) or ""

    def time_remaining(self) -> float | None:
        """Return seconds until the deadline; None = there is none."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._loop.time())

    def code(self) -> Any:
        """Return the status that was set; grpc's stub says nothing of None."""
        return self._code

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the status of an answer."""
        self._code = code

    def details(self) -> str:
        """Return the text of the status."""
        return self._details

    def set_details(self, details: str) -> None:
        """Set the text of the status."""
        self._details = details

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Set what follows the last message."""
        self._trailers = list(metadata)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Has a function called with this context once the call is over, however it ended."""
        self._callbacks.append(callback)

    def cancelled(self) -> bool:
        """Return whether the caller has gone."""
        return self.ended_by_caller

    def done(self) -> bool:
        """Return whether the call is over."""
        return self._finished

    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Send the headers now."""
        self.core.rpc.headers(self.number, list(metadata))
        self.core.flush()

    async def write(self, message: Any) -> None:
        """Send a message; wait while the caller does not read.

        Raises:
            asyncio.CancelledError: The call is over.
        """
        if self._finished:
            raise asyncio.CancelledError
        room = self.core.rpc.send(self.number, self._serialize(message) if self._serialize is not None else message)
        self.core.flush()
        if not room:
            await self.room.wait()

    async def read(self) -> Any:
        """Return the next message of the caller, in bytes; `grpc.aio.EOF` = there are no more."""
        message = await self._inbox.next()
        if message is None:
            return grpc.aio.EOF
        self.core.rpc.consumed(self.number, len(message))
        self.core.flush()
        return message

    async def read_unanswered(self, answer: Answer) -> Any:
        """See `answering.read_unanswered`."""
        self._answer = None if len(self._inbox) else answer
        try:
            return await self.read()
        finally:
            self._answer = None

    def _answered(self, replies: Sequence[bytes] | None, message: bytes) -> bool:
        if replies is None:
            self._answer = None  # what comes next stays behind it
            return False
        self.core.rpc.consumed(self.number, len(message))
        for reply in replies:
            if not self.core.rpc.send(self.number, reply):
                self._answer = None  # the handler waits for room, behind its own answer to the next one
        self.core.flush()
        return True

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> NoReturn:
        """End the call with a status.

        Raises:
            grpc.aio.AbortError: Always.
        """
        self._code, self._details = code, details
        self._trailers = list(trailing_metadata) or self._trailers
        raise grpc.aio.AbortError("the call was ended with a status")

    def finish(self, code: int, details: str) -> None:
        """End the call, unless it has ended."""
        if not self._finished:
            self._finished = True
            self.core.rpc.finish(self.number, code, details, self._trailers)
            self.core.flush()

    def finish_with(self, response: Any) -> None:
        """End the call behind its one answer, or behind those that were written: None."""
        if self._finished:
            return
        code = self._code or grpc.StatusCode.OK
        if response is None or code is not grpc.StatusCode.OK:
            self.finish(code.value[0], self._details)
            return
        self._finished = True
        message = self._serialize(response) if self._serialize is not None else response
        self.core.rpc.answer(self.number, message, self._trailers or None)
        self.core.flush()

    def finish_aborted(self) -> None:
        """End the call with the status that `abort` was given."""
        self.finish((self._code or grpc.StatusCode.UNKNOWN).value[0], self._details)

    def close(self) -> None:
        """Close the call: the handler has returned."""
        self.closed = True
        self.core.calls.pop(self.number, None)
        if self._deadline is not None:
            self.core.deadlines.drop(self._deadline)
        for callback in self._callbacks:
            callback(self)

    def _expire(self) -> None:
        if not self._finished:
            # While they write, grpc's clients take a status without headers for their own failure.
            self.core.rpc.headers(self.number, [])
        self.finish(grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "Deadline Exceeded")
        self._end()

    def _end(self) -> None:
        self.ended_by_caller = True
        if self._task is not None:
            self._task.cancel()


class RequestIterator:
    """The messages of a caller."""

    def __init__(self, context: NativeContext) -> None:
        self._context = context

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self._context.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message
