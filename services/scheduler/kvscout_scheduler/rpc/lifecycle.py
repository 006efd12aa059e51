"""Lifecycle: the open stream of one owner. Its operations in, results out as they are ready, several a message.

::

    codec ──▶ operations.py ──▶ codec ─┬─ directly ────────────▶ caller
                  │                    └─ behind others ─▶ writer ─▲
                  └── waits in line ──later────────────────▲

The stream is what an owner's bookings hang on: they outlive it by the grace time, in which the owner may come back and
say what it still has in flight. Results that could not be sent need no undoing: the owner does not list what it never
received.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from itertools import islice
from typing import TYPE_CHECKING, Any

import grpc

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import DeadlineExceeded, Draining, InvalidArgument, KvscoutError
from kvscout_common.identity.identity import current_identity
from kvscout_common.plain_text import name_problem
from kvscout_common.rpc.answering import Answer, answers_in_callbacks, read_unanswered
from kvscout_common.rpc.raw_messages import parse_message
from kvscout_scheduler.bookings.takeover import Takeover
from kvscout_scheduler.messages import translate
from kvscout_scheduler.messages.codec import MAX_OPERATIONS, Codec, Read
from kvscout_scheduler.rpc.liveness import LivenessTimer
from kvscout_scheduler.rpc.operations import Operations, RemoteOperations
from kvscout_scheduler.values.operations import Operation, Outcome
from kvscout_scheduler.values.reservation import OwnerName, RequestKey

if TYPE_CHECKING:
    from kvscout_scheduler.scheduler import Scheduler

MAX_RESULTS = 16 * MAX_OPERATIONS
"""Results that wait for a slow caller; above, nothing more is read from it."""

HEARTBEAT_MS = (100, 60_000)
"""Least and most that an owner may promise."""
MISSED_HEARTBEATS = 2.5
"""Heartbeats that may be missed before the owner is gone."""

READ_SLICE = 512
"""Requests of a hello, a few milliseconds."""

DRAIN_SECONDS = 1.0
"""Seconds that owners have to leave a scheduler that drains; they list what is in flight to the next one."""


class LifecycleRpc:
    """The rpc, for the servicer to inherit.

    Args:
        scheduler: Decides.
        remote: Operations on bookings of other replicas; None = there are none.
    """

    def __init__(self, scheduler: Scheduler, remote: RemoteOperations | None = None) -> None:
        self._scheduler = scheduler
        self._remote = remote
        self._streams: dict[asyncio.Task[Any], _Outbox] = {}
        """By the task that reads them."""
        self._slicing = asyncio.Lock()
        self._ending: dict[asyncio.Task[Any], KvscoutError] = {}
        """Readers that are cancelled by us, and why."""

    async def Lifecycle(self, requests: object, context: Any) -> None:  # noqa: C901, PLR0915  # a stream from its hello to its end
        """Serve one stream over serialised messages, which are read from the context."""
        message = await context.read()
        if message is grpc.aio.EOF:
            return
        first = parse_message(scheduler_pb2.LifecycleRequest, message)
        if not first.HasField("hello"):
            raise InvalidArgument("the first message of a stream names its owner", field="hello")
        if problem := name_problem(first.hello.owner_id):
            raise InvalidArgument(problem, field="hello.owner_id")
        scheduler, owner = self._scheduler, OwnerName(current_identity().tenant, first.hello.owner_id)
        timeout_seconds = _heartbeat_timeout(first.hello)
        codec = Codec(first.tenant, current_identity().tenant, acknowledges=first.hello.acknowledges_in_order)
        outbox = _Outbox(codec, draining=scheduler.draining, queues_requests=scheduler.queues_requests)
        operations = Operations(scheduler, owner, outbox.put, self._remote)
        reader = asyncio.current_task()
        if reader is None:
            raise RuntimeError("a stream is served in a task")
        self._streams[reader] = outbox
        takeover: Takeover | None = None
        writer: asyncio.Task[None] | None = None
        liveness = LivenessTimer(0, lambda silent: None)
        failure: BaseException | None = None

        def answer_immediately(message: bytes) -> Sequence[bytes] | None:
            nonlocal failure
            liveness.beat()
            if not (answers_in_callbacks(context) and outbox.is_empty):
                return None
            try:
                results = carry_out_all(operations, codec, codec.read(message))
                return () if results is None else (b"".join((*outbox.take(), *results)),)
            except BaseException as error:
                failure = error
                return None

        try:
            in_flight: list[tuple[RequestKey, int]] = []
            refs = iter(first.hello.in_flight)
            await self._in_slices(lambda: _read_some(refs, first.tenant, in_flight))
            takeover = begun = scheduler.begin_takeover(owner, in_flight, first.hello.opened_unix_us)
            await self._in_slices(lambda: begun.advance(scheduler.clock()))
            outbox.next.unknown_in_flight.extend(translate.key_to_proto(*name) for name in begun.unknown)
            # Even an empty answer shows the owner that it is known: its bookings are safe from here on.
            outbox.news.set()
            writer = asyncio.create_task(outbox.write_to(context), name=f"lifecycle of {owner}")
            liveness = LivenessTimer(timeout_seconds, lambda silent: self._end(reader, silent))
            outbox.add(carry_out_all(operations, codec, codec.operations(first)))
            caller = copy_context()  # as this task knows it
            answer: Answer = lambda message: caller.run(answer_immediately, message)  # noqa: E731
            while (message := await read_unanswered(context, answer)) is not grpc.aio.EOF:
                liveness.beat()
                if failure is not None:
                    raise failure
                outbox.add(carry_out_all(operations, codec, codec.read(message)))
                if len(outbox.results) > MAX_RESULTS:
                    await outbox.room()
            await operations.answered()
            await outbox.flushed()
        except asyncio.CancelledError:
            if reader not in self._ending:
                raise
            reader.uncancel()
            raise self._ending[reader] from None
        finally:
            liveness.stop()
            ended = self._ending.pop(reader, None)
            del self._streams[reader]
            if writer is not None:
                writer.cancel()
            operations.close()
            # Whose stream ends in sight was there until now, however little it had to say.
            silent = liveness.silent_seconds if isinstance(ended, DeadlineExceeded) else 0.0
            if takeover is not None:
                scheduler.disconnect_owner(owner, takeover.session, silent_seconds=silent)

    async def _in_slices(self, advance: Callable[[], bool]) -> None:
        """Call until all is done, once a tick of the event loop, whoever else has slices to do too."""
        while True:
            async with self._slicing:
                if advance():
                    return
                await asyncio.sleep(0)

    def _end(self, reader: asyncio.Task[Any], silent_seconds: float) -> None:
        """End the stream of an owner whose messages have stopped."""
        if reader not in self._ending:
            self._ending[reader] = DeadlineExceeded(f"nothing came from the owner for {silent_seconds:.3g} s")
            reader.cancel()

    async def drain_streams(self) -> None:
        """Send every owner to the next scheduler, and end the streams of those that stay."""
        for outbox in self._streams.values():
            outbox.next.draining = True
            outbox.news.set()
        if self._streams:
            _, staying = await asyncio.wait(set(self._streams), timeout=DRAIN_SECONDS)
            for reader in staying:
                self._ending[reader] = Draining("the scheduler is draining")
                reader.cancel()
            await asyncio.gather(*staying, return_exceptions=True)


class _Outbox:
    """Outgoing messages of one stream."""

    def __init__(self, codec: Codec, *, draining: bool, queues_requests: bool) -> None:
        self.next = scheduler_pb2.LifecycleResponse(draining=draining, queues_requests=queues_requests)
        """Next message, without results."""
        self.results: list[bytes] = []
        """Serialised."""
        self._codec = codec
        self.news = asyncio.Event()
        self._sent = asyncio.Event()
        self._writing = False

    def put(self, number: int, operation: Operation, outcome: Outcome) -> None:
        """Add a result that came later."""
        result = self._codec.write(number, operation, outcome)
        if result:
            self.results.append(result)
            self.news.set()

    def add(self, results: list[bytes] | None) -> None:
        """Add the results of a message; None = it needs no answer."""
        if results is not None:
            self.results += results
            self.news.set()

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is to be sent first."""
        return not (self.news.is_set() or self._writing)

    def take(self) -> list[bytes]:
        """Return the results that are there, for whoever sends them now."""
        results, self.results = self.results, []
        self.news.clear()
        return results

    async def write_to(self, context: Any) -> None:
        """Send until cancelled; what gathers while a message goes out is one message."""
        while True:
            while not self.news.is_set():
                await self.news.wait()
            message, self.next = self.next, scheduler_pb2.LifecycleResponse()
            results = self.take()
            self._writing = True
            # Messages in a row are one message: fields that are repeated add up.
            await context.write(b"".join((message.SerializeToString(), *results)))
            self._writing = False
            self._sent.set()

    async def room(self) -> None:
        """Wait until something was sent."""
        self._sent.clear()
        await self._sent.wait()

    async def flushed(self) -> None:
        """Wait until everything that is there was sent."""
        while self.news.is_set() or self._writing:
            await self.room()


def _read_some(refs: Iterator[scheduler_pb2.RequestRef], tenant: str, in_flight: list[tuple[RequestKey, int]]) -> bool:
    """Read a slice of the requests that a hello lists; True = that was all."""
    before = len(in_flight)
    in_flight += [(translate.key_from_proto(ref, tenant), ref.attempt_id) for ref in islice(refs, READ_SLICE)]
    return len(in_flight) - before < READ_SLICE


def _heartbeat_timeout(hello: scheduler_pb2.LifecycleHello) -> float:
    """Return the seconds without a message after which an owner is gone; 0 = never."""
    least, most = HEARTBEAT_MS
    if hello.heartbeat_ms and not least <= hello.heartbeat_ms <= most:
        raise InvalidArgument(f"must be between {least} and {most}", field="hello.heartbeat_ms")
    return hello.heartbeat_ms / 1000 * MISSED_HEARTBEATS


def carry_out_all(operations: Operations, codec: Codec, operations_read: Iterable[Read]) -> list[bytes] | None:
    """Carry out the operations of a message, in order, and return the results of those that do not wait.

    Returns:
        The results; None = a later answer acknowledges all of the message.
    """
    results: list[bytes] = []
    count = acknowledged = 0
    for number, operation in operations_read:
        count += 1
        outcome = operation if isinstance(operation, KvscoutError) else operations.carry_out(number, operation)
        if outcome is not None:
            result = codec.write(number, operation, outcome)
            if result:
                results.append(result)
            else:
                acknowledged += 1
    return results if results or acknowledged < max(count, 1) else None
