"""One open stream to an upstream: operations in, several a message, most with an answer of their own.

What is put in one iteration of the event loop goes in one message. What nobody waits for (`post`) has no answer: it
goes with the next operation, or after `LINGER_SECONDS`, and is acknowledged by the answer to a later operation. What
comes while a message is under way goes in the next one. A message is under way until something of it is answered, or
for `PACE_SECONDS`: what takes long is answered late, and must hold up nobody.

Messages are bytes: an operation is serialised once, by whoever puts it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import grpc

from kvscout_common.errors import DeadlineExceeded, KvscoutError, Unavailable
from kvscout_common.rpc.callbacks import can_send_now, receive_each
from kvscout_common.rpc.first_status import FirstStatus
from kvscout_common.transport.wire_fields import bytes_field, number_field

MESSAGE_OPERATIONS = 1024
MESSAGE_BYTES = 512 * 1024
"""In one message, unless one operation has more."""
PACE_SECONDS = 0.005
LINGER_SECONDS = 0.02
"""Longest time for which what nobody waits for stays here: the upstream wakes up less often."""
STATUS_SECONDS = 0.5
"""Longest wait for the status of a stream that takes nothing more."""

Result = TypeVar("Result")


class Operation(Generic[Result]):
    """One operation; its answer is None if the stream ended before it came."""

    __slots__ = ("answer", "id")

    def __init__(self, id: int, answer: asyncio.Future[Result | None]) -> None:
        self.id = id
        self.answer = answer

    async def within(self, seconds: float) -> bool:
        """Wait for the answer, or the end of the stream; return whether it came in time."""
        answer = self.answer
        if not answer.done():
            loop = answer.get_loop()
            over = loop.create_future()
            answer.add_done_callback(set_over := partial(_set_over, over))
            late = loop.call_later(seconds, set_over, answer)
            try:
                await over
            finally:
                late.cancel()
                answer.remove_done_callback(set_over)
        return answer.done()


class CoalescedStream(ABC, Generic[Result]):
    """One stream, from its first message to its end.

    Args:
        open_stream: The rpc, over bytes.
        name: Of its task.
        field: Number of the repeated field of a message that holds its operations.
        id_field: Number of the field of an operation that holds its id.
        first: Message that comes before all operations; b"" = there is none.
        on_end: Called once, when it has ended.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        open_stream: Callable[[], Any],
        name: str,
        *,
        field: int,
        id_field: int,
        first: bytes = b"",
        on_end: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._field = field
        self._id_field = id_field
        self._on_end = on_end
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._unsent: dict[int, tuple[bytes, float]] = {}
        """Serialised operations by id, and when those were posted that nobody waits for; 0 = somebody does."""
        self._pending: dict[int, Operation[Result]] = {}
        """Sent or not, and not answered."""
        self._acknowledged = 0
        """The last operation that is known to have been carried out."""
        self._sent: deque[tuple[int, float]] = deque()
        """Last operation and time of the messages that are to be answered and are not, oldest first."""
        self._sent_at = clock()
        """When the last message was sent that is to be answered."""
        self._under_way = 0
        """First operation of the message that is under way; 0 = none."""
        self._pace: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        """Sends what was posted, unless it goes earlier."""
        self.linger_seconds = LINGER_SECONDS
        self._call: Any = None
        """Once operations may be sent."""
        self._is_urgent = False
        """Something unsent is not to wait any longer."""
        self._is_due = False
        """`_send` is called in the next iteration of the loop."""
        self._wake = asyncio.Event()
        """Has the stream's task write, where that has to be waited for."""
        self._closing = False
        self.ended = False
        self.error: KvscoutError = Unavailable("the stream is closed")
        """Why it ended."""
        self.operations = 0
        self.messages = 0
        self._task = self._loop.create_task(self._run(open_stream, first), name=name)

    @abstractmethod
    def _take(self, message: bytes) -> None:
        """Read a message: call `_answered` for each result in it."""

    def put(self, body: bytes) -> Operation[Result]:
        """Send an operation with the next message; `body` is serialised, without its id."""
        operation: Operation[Result] = Operation(next(self._ids), self._loop.create_future())
        if self.ended or self._closing:
            operation.answer.set_result(None)
            return operation
        self._pending[operation.id] = operation
        self._unsent[operation.id] = (body, 0.0)
        self._is_urgent = True
        if not self._under_way:
            self._due()
        elif self._pace is None:
            self._pace = self._loop.call_later(PACE_SECONDS, self._arrived)
        return operation

    def post(self, body: bytes) -> int:
        """Send an operation for whose answer nobody waits, soon; return its id, 0 if the stream has ended."""
        if self.ended or self._closing:
            return 0
        number = next(self._ids)
        self._unsent[number] = (body, self._clock())
        if self._linger is None:
            self._linger = self._loop.call_later(self.linger_seconds, self._lingered)
        return number

    def drop(self, operation: Operation[Result]) -> None:
        """Forget an operation; if it was not sent, it is not."""
        self._pending.pop(operation.id, None)
        self._unsent.pop(operation.id, None)

    async def ask(self, body: bytes, seconds: float) -> Result | None:
        """Send an operation and wait for its answer; None = the stream ended.

        Raises:
            DeadlineExceeded: It did not come in time.
        """
        operation = self.put(body)
        late = self._loop.call_later(seconds, _give_up, operation.answer)
        try:
            result = await operation.answer
        finally:
            late.cancel()
            self.drop(operation)
        if result is _LATE:
            raise DeadlineExceeded("no answer on the stream")
        return result

    def break_off(self, error: KvscoutError) -> None:
        """End the stream; what waits for answers gets none."""
        self.error = error
        self._task.cancel()

    async def close(self, seconds: float) -> None:
        """Send what is there, wait that long for the answers, end the stream."""
        self._closing = True
        self._wake.set()
        await asyncio.wait([self._task], timeout=seconds)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self, open_stream: Callable[[], Any], first: bytes) -> None:
        stream = open_stream()
        status = FirstStatus(stream)
        reading = self._loop.create_task(self._read(stream, status), name=f"{self._task.get_name()} answers")
        try:
            if first:
                await stream.write(first)
            self._call = stream
            await self._write(stream, reading)
        except asyncio.CancelledError:
            pass  # `break_off` has said why, or nobody is to know
        except grpc.aio.AioRpcError as error:
            self.error = status.of(error)
        except (grpc.aio.UsageError, asyncio.InvalidStateError):
            await asyncio.wait([reading], timeout=STATUS_SECONDS)  # it ended: the reader knows why
        finally:
            # Before anything else: who waits must not wait for this to end.
            self._end()
            stream.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _end(self) -> None:
        self.ended, self._call = True, None
        for timer in (self._pace, self._linger):
            if timer is not None:
                timer.cancel()
        for operation in self._pending.values():
            if not operation.answer.done():
                operation.answer.set_result(None)
        self._pending.clear()
        self._unsent.clear()
        self._on_end()

    def _due(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._is_due = False
        if self._closing or not can_send_now(self._call):
            self._wake.set()
        elif self._unsent and not self._under_way:
            self._call.send_now(self._message())

    async def _write(self, stream: Any, reading: asyncio.Task[None]) -> None:
        while not reading.done():
            await self._wake.wait()
            self._wake.clear()
            while self._unsent and (self._closing or not self._under_way):
                await stream.write(self._message())
            if self._closing:
                await stream.done_writing()
                await asyncio.wait([reading])

    def _message(self) -> bytes:
        fields: list[bytes] = []
        size = last = awaited = 0
        now = self._clock()
        for number, (body, posted_at) in itertools.islice(self._unsent.items(), MESSAGE_OPERATIONS):
            if fields and size + len(body) > MESSAGE_BYTES:
                break
            size += len(body)
            body += number_field(self._id_field, number)
            if posted_at:
                body += self._age_field(now - posted_at)
            else:
                awaited = awaited or number
            fields.append(bytes_field(self._field, body))
            last = number
        for number in list(itertools.islice(self._unsent, len(fields))):
            del self._unsent[number]
        if awaited:
            self._under_way = awaited
            self._sent_at = now
            self._sent.append((last, now))
            self._awaits_answer(now)
        self._is_urgent = bool(self._unsent)
        if self._linger is not None and not self._unsent:
            self._linger.cancel()
            self._linger = None
        self.operations += len(fields)
        self.messages += 1
        return b"".join(fields)

    def _awaits_answer(self, now: float) -> None:
        """Note that a message is sent that is to be answered."""

    def _age_field(self, seconds: float) -> bytes:
        """Serialise how long an operation was posted before it was sent; b"" = that does not matter."""
        return b""

    def _arrived(self) -> None:
        """Let the next message go."""
        self._under_way = 0
        if self._pace is not None:
            self._pace.cancel()
            self._pace = None
        if self._is_urgent:
            self._due()

    def _lingered(self) -> None:
        self._linger, self._is_urgent = None, True
        self._arrived()

    async def _read(self, stream: Any, status: FirstStatus) -> None:
        try:
            await receive_each(stream, self._came)
            self.error = Unavailable("the other side ended the stream")
        except grpc.aio.AioRpcError as error:
            self.error = status.of(error)
        finally:
            self._under_way = 0
            self._wake.set()

    def _came(self, message: bytes) -> None:
        self._take(message)
        while self._sent and self._sent[0][0] <= self._acknowledged:
            self._sent.popleft()
        if self._under_way and self._under_way <= self._acknowledged:
            self._arrived()

    def _answered(self, number: int, result: Result) -> None:
        self._acknowledged = max(self._acknowledged, number)
        operation = self._pending.pop(number, None)
        if operation is not None and not operation.answer.done():
            operation.answer.set_result(result)


def _set_over(over: asyncio.Future[None], answer: object) -> None:
    if not over.done():
        over.set_result(None)


_LATE: Any = object()


def _give_up(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_result(_LATE)
