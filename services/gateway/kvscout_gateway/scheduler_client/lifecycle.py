"""One Lifecycle stream to one scheduler: operations in, each with an answer of its own, several a message.

What comes while a message is under way goes in the next one. A message is under way until something of it is answered,
or for `PACE_SECONDS`: what waits in line at the scheduler is answered late, and must hold up nobody.

How "waits in line" is told from "the scheduler is stuck": the scheduler carries operations out in the order in which
they were sent, so that an answer to a later one says that an earlier one was carried out. Where nothing else is asked,
a probe is (`renew` of a request that does not exist). A stream on which no probe is answered is broken off. On one that
has nothing to say, too, a probe goes now and then: so each side knows of the other, and the scheduler is told to expect
it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import grpc

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.errors import DeadlineExceeded, KvscoutError, Unavailable
from kvscout_common.first_status import FirstStatus
from kvscout_common.worker import DEFAULT_TENANT

MESSAGE_OPERATIONS = 1024
MESSAGE_BLOCKS = 65_536
"""In one message, unless one operation has more: half a MiB."""
PACE_SECONDS = 0.005
PROBE_SECONDS = 0.25
"""Silence after which a probe is sent, where an answer is due."""
HEARTBEAT_SECONDS = 2.0
"""Silence after which a probe is sent all the same."""
SILENT_SECONDS = 5.0
"""Silence after which the stream is broken off, though nobody waits for an answer."""
CLOSE_SECONDS = 0.5
"""Longest wait for the answers of a stream that is closed."""

Name: TypeAlias = tuple[str, str, int, str, int]
"""Model, tenant, role, request id and attempt."""

_PROBE = scheduler_pb2.RequestRef(model="-", request_id="-")


class Operation:
    """One operation; its answer is None if the stream ended before it came."""

    __slots__ = ("answer", "id", "kind", "message")

    def __init__(self, id: int, kind: str, message: Any, answer: asyncio.Future[scheduler_pb2.LifecycleResult | None]):
        self.id = id
        self.kind = kind
        self.message = message
        self.answer = answer


class LifecycleStream:
    """One stream, from its hello to its end."""

    def __init__(
        self,
        open_stream: Callable[[], Any],
        owner_id: str,
        in_flight: Iterable[scheduler_pb2.RequestRef],
        *,
        opened_at: int = 0,
        stuck_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens it.

        Args:
            open_stream: The rpc.
            owner_id: Who holds the bookings made here.
            in_flight: What it has in flight; what it does not list of its bookings ends.
            opened_at: When that was so, microseconds since the Unix epoch; more from stream to stream of an owner.
            stuck_seconds: Silence after which the stream is broken off, where an answer is due.
            clock: Monotonic seconds.
        """
        self._clock = clock
        self._stuck_seconds = stuck_seconds
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._unsent: dict[int, Operation] = {}
        self._pending: dict[int, Operation] = {}
        """Sent or not, and not answered."""
        self._heard = 0
        """Every operation up to this one was carried out."""
        self._sent: deque[tuple[int, float]] = deque()
        """Last operation and time of the messages that are not known to be carried out, oldest first."""
        self._sent_at = clock()
        """When the last message was sent."""
        self._suspect = 0
        self._under_way = 0
        """First operation of the message that is under way; 0 = none."""
        self._pace: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._closing = False
        self.hello: asyncio.Future[frozenset[Name] | None] = self._loop.create_future()
        """Names of the listed requests that are not active there; None = it came to nothing."""
        self.changed = asyncio.Event()
        """Set when the scheduler drains, and when the stream ends."""
        self.draining = False
        self.ended = False
        self.error: KvscoutError = Unavailable("the stream is closed")
        """Why it ended."""
        self.operations = 0
        self.messages = 0
        hello = scheduler_pb2.LifecycleRequest(
            hello=scheduler_pb2.LifecycleHello(
                owner_id=owner_id,
                in_flight=in_flight,
                opened_at=opened_at,
                # It is sent when its time is over, by a loop that may be busy: half as much again is promised.
                heartbeat_ms=int(HEARTBEAT_SECONDS * 1500),
            )
        )
        self._task = self._loop.create_task(self._run(open_stream, hello), name="lifecycle")

    def put(self, kind: str, message: Any) -> Operation:
        """Sends an operation with the next message; returns at once.

        Args:
            kind: Field of `LifecycleOperation`.
            message: Its value; must not change any more.
        """
        operation = Operation(next(self._ids), kind, message, self._loop.create_future())
        if self.ended or self._closing:
            operation.answer.set_result(None)
            return operation
        self._pending[operation.id] = self._unsent[operation.id] = operation
        if not self._under_way:
            self._wake.set()
        elif self._pace is None:
            self._pace = self._loop.call_later(PACE_SECONDS, self._arrived)
        return operation

    def drop(self, operation: Operation) -> None:
        """Nobody waits for an operation any more; what was not sent is not."""
        self._pending.pop(operation.id, None)
        self._unsent.pop(operation.id, None)

    def carried_out(self, operation: Operation) -> bool:
        """Whether the scheduler has seen to an operation, be it that it waits in line."""
        return operation.id <= self._heard

    def probe(self) -> None:
        """Asks for a sign of life, unless one is on its way."""
        if all(operation.kind != "renew" for operation in self._unsent.values()):
            probe = self.put("renew", scheduler_pb2.RenewRequest(requests=[_PROBE]))
            self._pending.pop(probe.id, None)  # that something comes is all of its answer

    def check(self) -> None:
        """Asks for a sign of life where an answer is due or nothing was said for long, and breaks the stream off where
        none came; to be called every `PROBE_SECONDS` or so."""
        now = self._clock()
        if self._sent:
            last, since = self._sent[0]
            silent, patience = now - since, self._stuck_seconds if self._pending else SILENT_SECONDS
            # Twice the same: a pause of this process must not look like one of the scheduler.
            if silent > patience and self._suspect == last:
                self.break_off(DeadlineExceeded("no answer on the stream"))
                return
            self._suspect = last if silent > patience else 0
            if silent < PROBE_SECONDS:
                return
        if (self._pending and not self._unsent) or now - self._sent_at >= HEARTBEAT_SECONDS:
            self.probe()

    @property
    def waiting(self) -> int:
        """Operations that were carried out and are not answered: they wait in line."""
        return sum(number < self._heard for number in self._pending)

    def break_off(self, error: KvscoutError) -> None:
        """Ends the stream; what waits for answers gets none."""
        self.error = error
        self._task.cancel()

    async def close(self) -> None:
        """Sends what is there, waits for the answers that come soon, ends the stream."""
        self._closing = True
        self._wake.set()
        await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self, open_stream: Callable[[], Any], hello: scheduler_pb2.LifecycleRequest) -> None:
        stream = open_stream()
        status = FirstStatus(stream)
        reading = self._loop.create_task(self._read(stream, status), name="lifecycle answers")
        try:
            await stream.write(hello)
            await self._write(stream, reading)
        except asyncio.CancelledError:
            pass  # `break_off` has said why
        except grpc.aio.AioRpcError as error:
            self.error = status.of(error)
        except (grpc.aio.UsageError, asyncio.InvalidStateError):
            await asyncio.wait([reading], timeout=CLOSE_SECONDS)  # it ended: the reader is told why
        finally:
            # Before anything else: who waits must not wait for this to end.
            self._end()
            stream.cancel()
            if not reading.done():
                reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _end(self) -> None:
        self.ended = True
        if self._pace is not None:
            self._pace.cancel()
        for operation in self._pending.values():
            if not operation.answer.done():
                operation.answer.set_result(None)
        self._pending.clear()
        self._unsent.clear()
        if not self.hello.done():
            self.hello.set_result(None)
        self.changed.set()

    async def _write(self, stream: Any, reading: asyncio.Task[None]) -> None:
        while not reading.done():
            await self._wake.wait()
            self._wake.clear()
            while self._unsent and (self._closing or not self._under_way):
                await stream.write(self._message())
            if self._closing:
                await stream.done_writing()
                await asyncio.wait([reading])

    def _message(self) -> scheduler_pb2.LifecycleRequest:
        message = scheduler_pb2.LifecycleRequest()
        blocks = 0
        while self._unsent and len(message.operations) < MESSAGE_OPERATIONS:
            number, operation = next(iter(self._unsent.items()))
            more = len(operation.message.block_hashes) if operation.kind in _WITH_BLOCKS else 0
            if blocks and blocks + more > MESSAGE_BLOCKS:
                break
            blocks += more
            del self._unsent[number]
            added = message.operations.add(id=number)
            getattr(added, operation.kind).CopyFrom(operation.message)
        self._under_way = message.operations[0].id
        self._sent_at = self._clock()
        self._sent.append((message.operations[-1].id, self._sent_at))
        self.operations += len(message.operations)
        self.messages += 1
        return message

    def _arrived(self) -> None:
        """The next message may go."""
        self._under_way = 0
        if self._pace is not None:
            self._pace.cancel()
            self._pace = None
        if self._unsent:
            self._wake.set()

    async def _read(self, stream: Any, status: FirstStatus) -> None:
        try:
            async for response in stream:
                self._take(response)
            self.error = Unavailable("the scheduler ended the stream")
        except grpc.aio.AioRpcError as error:
            self.error = status.of(error)
        finally:
            self._under_way = 0
            self._wake.set()

    def _take(self, response: scheduler_pb2.LifecycleResponse) -> None:
        if response.draining:
            self.draining = True
            self.changed.set()
        if not self.hello.done():
            self.hello.set_result(frozenset(map(name_of, response.unknown_in_flight)))
        for result in response.results:
            self._heard = max(self._heard, result.id)
            operation = self._pending.pop(result.id, None)
            if operation is not None and not operation.answer.done():
                operation.answer.set_result(result)
        while self._sent and self._sent[0][0] <= self._heard:
            self._sent.popleft()
        if self._under_way and self._under_way <= self._heard:
            self._arrived()


_WITH_BLOCKS = frozenset({"select", "select_and_reserve", "reserve"})


def name_of(ref: scheduler_pb2.RequestRef) -> Name:
    """A reference as a key."""
    return (
        ref.model,
        ref.tenant or DEFAULT_TENANT,
        ref.role or types_pb2.ROLE_AGGREGATED,
        ref.request_id,
        ref.attempt_id,
    )
