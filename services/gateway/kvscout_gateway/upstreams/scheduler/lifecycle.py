"""One Lifecycle stream to one scheduler: what this gateway has in flight, then its operations.

The scheduler carries operations out in the order in which they were sent, so that an answer to a later one shows that
an earlier one was carried out: ends of prefills and of requests need no answers of their own, and "waits in line" is
distinguished from "the scheduler is stuck". Where nothing else is sent, a probe is (`renew` of a request that does not
exist). A stream on which no probe is answered is broken off. On one that has nothing to say, too, a probe goes now and
then: so each side knows of the other, and the hello announces the interval.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from google.protobuf.message import Message

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.errors import DeadlineExceeded
from kvscout_common.transport.wire_fields import bytes_field, number_field
from kvscout_common.worker import DEFAULT_TENANT
from kvscout_gateway.upstreams.coalesced_stream import CoalescedStream
from kvscout_gateway.upstreams.coalesced_stream import Operation as AnyOperation

log = logging.getLogger("kvscout.gateway")

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
_OUTPUT_TOKENS = scheduler_pb2.LifecycleOperation.OUTPUT_TOKENS_FIELD_NUMBER
_AGE_US = scheduler_pb2.LifecycleOperation.AGE_US_FIELD_NUMBER
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
        self._check_timer: asyncio.TimerHandle | None = None
        self._check_at = 0.0
        """When `_check` is due, on the clock."""
        self._probing = 0
        """Id of the last probe."""
        self.hello: asyncio.Future[frozenset[Name] | None] = asyncio.get_running_loop().create_future()
        """Names of the listed requests that are not active there; None = it came to nothing."""
        self.changed = asyncio.Event()
        """Set when the scheduler drains, and when the stream ends."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the stream has ended."""
        self.unary_calls = 0
        """Calls beside the stream that wait for an answer: the stream shows whether the scheduler is up."""
        self.draining = False
        self._frees: dict[int, None] = {}
        """Ids of frees that are not acknowledged."""
        self._frees_refused = 0
        hello = scheduler_pb2.LifecycleHello(
            owner_id=owner_id,
            in_flight=in_flight,
            opened_unix_us=opened_at,
            # It is sent when its time is over, by a loop that may be busy: half as much again is promised.
            heartbeat_ms=int(HEARTBEAT_SECONDS * 1500),
            acknowledges_in_order=True,
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
        self._set_check(PROBE_SECONDS, clock())

    def send(self, kind: str, message: Message | bytes) -> Operation:
        """Send an operation with the next message.

        Args:
            kind: Field of `LifecycleOperation`.
            message: Its value, serialised or not.
        """
        return self.put(body_of(kind, message))

    def prefill_complete(self, ref: scheduler_pb2.RequestRef) -> None:
        """Report the first token of a request."""
        self.post(body_of("prefill_complete", ref))

    def free(self, ref: scheduler_pb2.RequestRef, output_tokens: int = 0) -> bool:
        """Report the end of a request; return whether the stream is there.

        Args:
            ref: The request.
            output_tokens: That it generated; 0 = unknown.
        """
        body = body_of("free", ref)
        number = self.post(body + number_field(_OUTPUT_TOKENS, output_tokens) if output_tokens else body)
        if number:
            self._frees[number] = None
        return bool(number)

    @property
    def unacknowledged_frees(self) -> int:
        """Return the number of frees that the scheduler has not acknowledged, or has refused."""
        return len(self._frees) + self._frees_refused

    def carried_out(self, operation: Operation) -> bool:
        """Return whether the scheduler has carried out an operation, be it that it waits in line."""
        return operation.id <= self._acknowledged

    @property
    def waiting(self) -> int:
        """Return the number of operations that wait in line: carried out, and not answered."""
        return sum(number < self._acknowledged for number in self._pending)

    @property
    def _owes_answer(self) -> bool:
        return bool(self._pending or self.unary_calls)

    def probe(self) -> None:
        """Send a probe, unless one is on its way."""
        if self._probing not in self._unsent:
            probe = self.send("renew", _PROBE)
            self._pending.pop(probe.id, None)  # that something comes is all of its answer
            self._probing = probe.id

    def check(self) -> None:
        """Send a probe where an answer is due or nothing was said for long; break the stream off where none came."""
        now = self._clock()
        if self._sent:
            last, since = self._sent[0]
            silent, limit = now - since, self._stuck_seconds if self._owes_answer else SILENT_SECONDS
            # Twice the same: a pause of this process must not look like one of the scheduler.
            if silent > limit and self._suspect == last:
                self.break_off(DeadlineExceeded("no answer on the stream"))
                return
            self._suspect = last if silent > limit else 0
            if silent < PROBE_SECONDS:
                return
        if (self._owes_answer and not self._unsent) or now - self._sent_at >= HEARTBEAT_SECONDS:
            self.probe()

    def _check(self) -> None:
        self.check()
        now = self._clock()
        busy = self._sent or self._owes_answer
        self._set_check(PROBE_SECONDS if busy else max(PROBE_SECONDS, self._sent_at + HEARTBEAT_SECONDS - now), now)

    def _set_check(self, seconds: float, now: float) -> None:
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._check_at = now + seconds
        self._check_timer = self._loop.call_later(seconds, self._check)

    def _awaits_answer(self, now: float) -> None:
        if self._check_at > now + PROBE_SECONDS:
            self._set_check(PROBE_SECONDS, now)

    def _ended(self) -> None:
        if self._check_timer is not None:
            self._check_timer.cancel()
        if not self.hello.done():
            self.hello.set_result(None)
        self.changed.set()
        self.closed.set_result(None)

    def _take(self, message: bytes) -> None:
        response = scheduler_pb2.LifecycleResponse.FromString(message)
        if response.draining:
            self.draining = True
            self.changed.set()
        if not self.hello.done():
            self.hello.set_result(frozenset(map(name_of, response.unknown_in_flight)))
            if response.queues_requests:
                self.linger_seconds = 0.0
        for result in response.results:
            if result.code and self._frees.pop(result.id, result) is None:
                self._frees_refused += 1
                log.debug("a request was not freed: %s", result.message)
            self._answered(result.id, result)
        while self._frees and (oldest := next(iter(self._frees))) <= self._acknowledged:
            del self._frees[oldest]

    def _age_field(self, seconds: float) -> bytes:
        return number_field(_AGE_US, int(seconds * 1e6))


def body_of(kind: str, message: Message | bytes) -> bytes:
    """Serialise an operation."""
    return bytes_field(_KINDS[kind], message if isinstance(message, bytes) else message.SerializeToString())


def name_of(ref: scheduler_pb2.RequestRef) -> Name:
    """Return a reference as a key."""
    return (
        ref.model,
        ref.tenant or DEFAULT_TENANT,
        ref.role or types_pb2.ROLE_AGGREGATED,
        ref.request_id,
        ref.attempt_id,
    )
