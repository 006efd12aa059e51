"""One Lifecycle stream to one scheduler: what this gateway has in flight, then its operations.

How "waits in line" is told from "the scheduler is stuck": the scheduler carries operations out in the order in which
they were sent, so that an answer to a later one says that an earlier one was carried out. Where nothing else is asked,
a probe is (`renew` of a request that does not exist). A stream on which no probe is answered is broken off. On one that
has nothing to say, too, a probe goes now and then: so each side knows of the other, and the scheduler is told to expect
it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from google.protobuf.message import Message

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.errors import DeadlineExceeded
from kvscout_common.wire_fields import bytes_field
from kvscout_common.worker import DEFAULT_TENANT
from kvscout_gateway.coalesced_stream import CoalescedStream
from kvscout_gateway.coalesced_stream import Operation as AnyOperation

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
Operation: TypeAlias = "AnyOperation[scheduler_pb2.LifecycleResult]"

_KINDS = {field.name: field.number for field in scheduler_pb2.LifecycleOperation.DESCRIPTOR.oneofs[0].fields}
_PROBE = scheduler_pb2.RenewRequest(requests=[scheduler_pb2.RequestRef(model="-", request_id="-")])


class LifecycleStream(CoalescedStream[scheduler_pb2.LifecycleResult]):
    """One stream, from its hello to its end.

    Args:
        open_stream: The rpc, over bytes.
        owner_id: Who holds the bookings made here.
        in_flight: What it has in flight; what it does not list of its bookings ends.
        opened_at: When that was so, microseconds since the Unix epoch; more from stream to stream of an owner.
        stuck_seconds: Silence after which the stream is broken off, where an answer is due.
        clock: Monotonic seconds.
    """

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
        self._stuck_seconds = stuck_seconds
        self._suspect = 0
        self._probing = 0
        """Id of the last probe."""
        self.hello: asyncio.Future[frozenset[Name] | None] = asyncio.get_running_loop().create_future()
        """Names of the listed requests that are not active there; None = it came to nothing."""
        self.changed = asyncio.Event()
        """Set when the scheduler drains, and when the stream ends."""
        self.draining = False
        hello = scheduler_pb2.LifecycleHello(
            owner_id=owner_id,
            in_flight=in_flight,
            opened_unix_us=opened_at,
            # It is sent when its time is over, by a loop that may be busy: half as much again is promised.
            heartbeat_ms=int(HEARTBEAT_SECONDS * 1500),
        )
        super().__init__(
            open_stream,
            "lifecycle",
            field=scheduler_pb2.LifecycleRequest.OPERATIONS_FIELD_NUMBER,
            id_field=scheduler_pb2.LifecycleOperation.ID_FIELD_NUMBER,
            first=scheduler_pb2.LifecycleRequest(hello=hello).SerializeToString(),
            on_end=self._ended,
            clock=clock,
        )

    def tell(self, kind: str, message: Message | bytes, *, awaited: bool = True) -> Operation:
        """Sends an operation with the next message; returns at once.

        Args:
            kind: Field of `LifecycleOperation`.
            message: Its value, serialised or not.
            awaited: See `put`.
        """
        return self.put(body_of(kind, message), awaited=awaited)

    def carried_out(self, operation: Operation) -> bool:
        """Whether the scheduler has seen to an operation, be it that it waits in line."""
        return operation.id <= self._heard

    @property
    def waiting(self) -> int:
        """Operations that were carried out and are not answered: they wait in line."""
        return sum(number < self._heard for number in self._pending)

    def probe(self) -> None:
        """Asks for a sign of life, unless one is on its way."""
        if self._probing not in self._unsent:
            probe = self.tell("renew", _PROBE)
            self._pending.pop(probe.id, None)  # that something comes is all of its answer
            self._probing = probe.id

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

    def _ended(self) -> None:
        if not self.hello.done():
            self.hello.set_result(None)
        self.changed.set()

    def _take(self, message: bytes) -> None:
        response = scheduler_pb2.LifecycleResponse.FromString(message)
        if response.draining:
            self.draining = True
            self.changed.set()
        if not self.hello.done():
            self.hello.set_result(frozenset(map(name_of, response.unknown_in_flight)))
        for result in response.results:
            self._answered(result.id, result)


def body_of(kind: str, message: Message | bytes) -> bytes:
    """An operation as streams take it."""
    return bytes_field(_KINDS[kind], message if isinstance(message, bytes) else message.SerializeToString())


def name_of(ref: scheduler_pb2.RequestRef) -> Name:
    """A reference as a key."""
    return (
        ref.model,
        ref.tenant or DEFAULT_TENANT,
        ref.role or types_pb2.ROLE_AGGREGATED,
        ref.request_id,
        ref.attempt_id,
    )
