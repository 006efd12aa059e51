"""A call of a synchronous handler whose both sides send many messages: each is answered as it comes, without a task.

Those that the extension can answer it answers, until there is one that it cannot, or no room: then they come here,
until none waits.
"""

from __future__ import annotations

import time
from typing import Any

import grpc

from kvscout_common.errors import KvscoutError
from kvscout_common.identity.identity import ANONYMOUS
from kvscout_common.process.running_calls import draining
from kvscout_common.rpc.guard import GuardedMethod
from kvscout_common.transport.native_core import HALF_CLOSED, MESSAGE, RESET, WRITABLE, Metadata, NativeCore
from kvscout_common.transport.statuses import Status, status_of
from kvscout_common.transport.waiting import Inbox

DEADLINE = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
OK = Status(grpc.StatusCode.OK, "")
CANCELLED = grpc.StatusCode.CANCELLED


class SynchronousStream:
    """See the module.

    Args:
        core: Brings its events, sends what it says.
        number: Of the call.
        method: Handles its messages.
        metadata: As the caller sent it.
        timeout_us: Time left, as the caller said; None = it has no deadline.
    """

    def __init__(
        self, core: NativeCore, number: int, method: GuardedMethod, metadata: Metadata, timeout_us: int | None
    ) -> None:
        self._core = core
        self._number = number
        self._method = method
        self._inbox = Inbox(core.loop)
        self._half_closed = False
        self._room = True
        self._deadline: int | None = None
        self._started = time.perf_counter()
        # First, whatever follows: while they write, grpc's clients take a status without headers for their own failure.
        core.rpc.headers(number, [])
        core.flush()
        try:
            self._identity = method.admit(metadata)
            if self._identity is not ANONYMOUS:
                core.rpc.trust(number)
            method.begin(self, self._identity)
            core.admit(number, self._identity.tenant)
        except KvscoutError as error:
            status = status_of(error, method.name)
            method.times.ended(status.code, self._started)
            core.finish(number, status)
            return
        if timeout_us is not None:
            self._deadline = core.deadlines.add(core.loop.time() + timeout_us / 1e6, lambda: self._end(DEADLINE))
        core.calls[number] = self
        self._lend()

    def on_event(self, kind: int, event: tuple[Any, ...]) -> None:
        """See `native_core.EventHandler`."""
        if kind == MESSAGE:
            self._inbox.put(event[2])
        elif kind == HALF_CLOSED:
            self._half_closed = True
        elif kind == WRITABLE:
            self._room = True
        elif kind == RESET:
            self._end(None)
            return
        self._answer()

    def cancel(self) -> None:
        """See `running_calls.RunningCall`."""
        self._end(status_of(draining(), self._method.name))

    def _answer(self) -> None:
        """Answers what came, as long as the caller reads the answers."""
        core = self._core
        while self._room and (message := self._inbox.take()) is not None:
            try:
                answer = self._method.answer(message, self._identity)
            except BaseException as error:
                self._end(status_of(error, self._method.name))
                return
            core.rpc.consumed(self._number, len(message))
            self._room = core.rpc.send(self._number, answer)
        core.flush()
        if not len(self._inbox):
            if self._half_closed:
                self._end(OK)
            elif self._room:
                self._lend()

    def _lend(self) -> None:
        """Let the extension answer what it can."""
        if self._method.native is not None:
            self._core.rpc.answer_stream(self._number, self._method.native, self._identity.tenant)

    def _end(self, status: Status | None) -> None:
        """End it with a status; None: the caller has gone."""
        if self._core.calls.pop(self._number, None) is None:
            return
        if self._deadline is not None:
            self._core.deadlines.drop(self._deadline)
        self._method.times.ended(CANCELLED if status is None else status.code, self._started)
        if status is not None:
            self._core.finish(self._number, status)
        self._method.end(self, self._identity)
