"""One scheduler as the gateway calls it: over its Lifecycle stream while that is open, else by unary rpcs.

What the gateway runs itself is booked over the stream, where it has no lease: it ends with this gateway. What Route
books for others, and what is booked while there is no stream, has a lease.

A booking may wait in line at the scheduler. It does not count as slow then: the deadline is the line's. What waits has
its overlaps refreshed: the same attempt is sent again and takes over its own place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from google.protobuf.message import Message

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.errors import (
    DeadlineExceeded,
    Draining,
    KvscoutError,
    ResourceExhausted,
    Unavailable,
)
from kvscout_common.observability import tracing
from kvscout_common.rpc.channel import call, to_error
from kvscout_common.rpc.request_names import free_request
from kvscout_common.transport.statuses import from_status
from kvscout_common.transport.wire_fields import number_field
from kvscout_gateway.upstreams.failover import is_member_fault
from kvscout_gateway.upstreams.indexer.overlaps import Found
from kvscout_gateway.upstreams.scheduler.lifecycle import LifecycleStream, Operation, body_of

REFRESH_SECONDS = 1.0
"""Wait after which overlaps are refreshed; doubles each time, up to the next."""
MAX_REFRESH_SECONDS = 8.0
ALIVE_SECONDS = 1.0
"""Between two signs of life of a scheduler at which a unary call waits in line."""
RETRY_SECONDS = 1.0
"""What callers are told where the stream does not say when to try again."""

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
_CODES = {code.value[0]: code for code in grpc.StatusCode}

if TYPE_CHECKING:
    _Stub = scheduler_pb2_grpc.SchedulerAsyncStub
else:
    _Stub = scheduler_pb2_grpc.SchedulerStub


class WaitedTooLong(ResourceExhausted):
    """A request stood in line until its time was over."""


class LeftInLine(ResourceExhausted):
    """A request stood in line at a scheduler that is gone, and has to be asked for anew, with all the time for that."""


class Selection(NamedTuple):
    """What wants a worker, and what is known of it now."""

    fields: bytes
    """A serialised `SelectRequest` without its attempt."""
    found: Found
    """The overlaps in it."""


@dataclass(slots=True, eq=False)
class PendingReservation:
    """One request that wants a worker, as schedulers are asked one after the other."""

    selection: Selection
    """What was sent last."""
    ref: scheduler_pb2.RequestRef
    """Its name, and the attempt that is made now."""
    ends_at: float
    """On the monotonic clock: it is not left in line for longer."""
    refresh: Callable[[], Awaitable[Selection]]
    """The same with overlaps of now."""
    books: bool = True
    """It is to be booked."""
    owned: bool = True
    """For this gateway, as long as that is connected; else for a caller, with a lease."""
    waited: bool = False
    """It was in line."""
    given_up: list[scheduler_pb2.RequestRef] = field(default_factory=list)
    """Attempts at other schedulers, of which the next one may have heard: freed first."""

    def message(self) -> bytes:
        """The serialised `SelectRequest`."""
        attempt = scheduler_pb2.SelectRequest.ATTEMPT_ID_FIELD_NUMBER
        return self.selection.fields + number_field(attempt, self.ref.attempt_id)


class Reserved(NamedTuple):
    """A booking that was made."""

    response: scheduler_pb2.SelectResponse
    leased: bool
    """It has a lease; else it is this gateway's as long as that is connected."""


class SchedulerLink(_Stub):
    """A scheduler's stub, and its stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)
        self.open_lifecycle: Callable[[], Any] = channel.stream_stream(f"/{SERVICE}/Lifecycle")
        """Opens the stream, over bytes."""
        read = scheduler_pb2.SelectResponse.FromString
        self._select: Any = channel.unary_unary(f"/{SERVICE}/Select", response_deserializer=read)
        self._select_and_reserve: Any = channel.unary_unary(f"/{SERVICE}/SelectAndReserve", response_deserializer=read)
        # Its fields are those of the reference that names the request.
        self._prefill_complete: Any = channel.unary_unary(
            f"/{SERVICE}/MarkPrefillComplete",
            request_serializer=scheduler_pb2.RequestRef.SerializeToString,
            response_deserializer=scheduler_pb2.MarkPrefillCompleteResponse.FromString,
        )
        self._free: Any = channel.unary_unary(
            f"/{SERVICE}/Free",
            request_serializer=scheduler_pb2.FreeRequest.SerializeToString,
            response_deserializer=scheduler_pb2.FreeResponse.FromString,
        )
        self._stream: LifecycleStream | None = None
        self._operations = 0
        self._messages = 0
        self.connects = 0
        """Streams that were opened."""
        self.rebooked = 0
        """Running requests that were booked here because this scheduler did not know them."""

    @property
    def stream(self) -> LifecycleStream | None:
        """The stream, while it is open and the scheduler does not drain."""
        stream = self._stream
        return stream if stream is not None and not stream.ended else None

    @property
    def operations(self) -> int:
        """Operations of all its streams."""
        return self._operations + (self._stream.operations if self._stream is not None else 0)

    @property
    def messages(self) -> int:
        """Messages of all its streams."""
        return self._messages + (self._stream.messages if self._stream is not None else 0)

    def use(self, stream: LifecycleStream) -> None:
        """Calls go over this stream from now on."""
        self.drop_stream()
        self._stream = stream
        self.connects += 1

    def drop_stream(self) -> LifecycleStream | None:
        """Calls go by unary rpcs from now on; returns what they went over."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._operations += stream.operations
            self._messages += stream.messages
        return stream

    def tell(self, kind: str, message: Any, output_tokens: int = 0) -> Operation | None:
        """Sends an operation over the stream for whose answer nobody waits; None = there is no stream."""
        stream = self.stream
        return stream.tell(kind, message, awaited=False, output_tokens=output_tokens) if stream is not None else None

    async def place(self, asking: PendingReservation, *, timeout: float) -> Reserved:
        """Select, or SelectAndReserve.

        Args:
            asking: What wants a worker.
            timeout: Longest wait in seconds for a sign that the scheduler has seen to it.

        Raises:
            WaitedTooLong: There was no room.
            LeftInLine: The scheduler was gone before there was.
            KvscoutError: As the scheduler answers, or it does not.
        """
        deadline = time.monotonic() + timeout
        try:
            if not asking.books:
                return Reserved(await self._ask("select", asking.message(), timeout, self._select), leased=False)
            if asking.given_up:
                await asyncio.gather(*(self.free(free_request(ref), timeout=timeout) for ref in asking.given_up))
            if asking.owned:
                return await self._reserve(asking, _left(deadline))
            return Reserved(await self._lease(asking, _left(deadline)), leased=True)
        except grpc.aio.AioRpcError as error:
            failed = to_error(error)
        except KvscoutError as error:
            failed = error
        if asking.waited and is_member_fault(failed):
            asking.waited = False
            raise LeftInLine(str(failed)) from failed
        raise failed

    async def prefill_complete(
        self, ref: scheduler_pb2.RequestRef, *, timeout: float
    ) -> scheduler_pb2.MarkPrefillCompleteResponse:
        """MarkPrefillComplete."""
        answer: scheduler_pb2.MarkPrefillCompleteResponse = await self._ask(
            "prefill_complete", ref, timeout, self._prefill_complete
        )
        return answer

    async def free(self, request: scheduler_pb2.FreeRequest, *, timeout: float) -> scheduler_pb2.FreeResponse:
        """Free."""
        answer: scheduler_pb2.FreeResponse = await self._ask(
            "free", request, timeout, self._free, output_tokens=request.output_tokens
        )
        return answer

    async def _ask(
        self,
        kind: str,
        message: Message | bytes,
        timeout: float,
        unary: Callable[..., Any],
        *,
        output_tokens: int = 0,
    ) -> Any:
        """The answer to an operation over the stream; to the unary rpc if there is none, or it ends."""
        deadline = time.monotonic() + timeout
        stream = self.stream
        if stream is not None:
            result = await stream.ask(body_of(kind, message, output_tokens), timeout)
            if result is not None:
                return getattr(_checked(result, stream), kind)
        return await unary(message, timeout=_left(deadline), **tracing.call_options())

    async def _reserve(self, asking: PendingReservation, timeout: float) -> Reserved:
        deadline = time.monotonic() + timeout
        stream = self.stream
        if stream is not None:
            result = await self._reserve_over(stream, asking, timeout)
            if result is not None:
                return Reserved(_checked(result, stream).select, leased=False)
            if asking.waited:
                raise Unavailable("the stream ended while the request waited in line")
        return Reserved(await self._lease(asking, _left(deadline)), leased=True)

    async def _lease(self, asking: PendingReservation, timeout: float) -> scheduler_pb2.SelectResponse:
        """By a unary call. What waits in line keeps its overlaps."""
        calling: Any = self._select_and_reserve(
            asking.message(), timeout=_left(asking.ends_at), **tracing.call_options()
        )
        watches: list[asyncio.Task[None]] = []
        stuck = False

        async def watch() -> None:
            nonlocal stuck
            while await self._alive(timeout / 2):
                asking.waited = True
                await asyncio.sleep(ALIVE_SECONDS)
            stuck = True
            calling.cancel()

        loop = asyncio.get_running_loop()
        start = loop.call_later(timeout / 2, lambda: watches.append(loop.create_task(watch(), name="alive")))
        try:
            response: scheduler_pb2.SelectResponse = await calling
            return response
        except asyncio.CancelledError:
            if not stuck:
                raise
            raise DeadlineExceeded(f"no answer within {timeout:.3g} s") from None
        except grpc.aio.AioRpcError as error:
            # The deadline is the line's. A scheduler may see it pass a moment before it does here.
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and asking.waited:
                raise _waited_too_long() from None
            raise
        finally:
            start.cancel()
            for task in watches:
                task.cancel()

    async def _reserve_over(
        self, stream: LifecycleStream, asking: PendingReservation, timeout: float
    ) -> scheduler_pb2.LifecycleResult | None:
        operation = stream.tell("select_and_reserve", asking.message())
        try:
            if await operation.within(timeout / 2):
                return operation.answer.result()
            stream.probe()
            if await operation.within(timeout / 2):
                return operation.answer.result()
            if not stream.carried_out(operation):
                raise DeadlineExceeded("no answer on the stream")
            asking.waited = True
            pause = max(0.0, REFRESH_SECONDS - timeout)
            next_pause = REFRESH_SECONDS
            while not await operation.within(min(pause, _left(asking.ends_at))):
                if not _left(asking.ends_at):
                    stream.tell("free", asking.ref)
                    raise _waited_too_long()
                fresh = await asking.refresh()
                if not operation.answer.done():
                    stream.drop(operation)
                    asking.selection = fresh
                    operation = stream.tell("select_and_reserve", asking.message())
                pause, next_pause = next_pause, min(2 * next_pause, MAX_REFRESH_SECONDS)
            return operation.answer.result()
        finally:
            stream.drop(operation)

    async def get_status(self, timeout: float) -> scheduler_pb2.SchedulerGetStatusResponse:
        """Asks what every scheduler answers, whatever else it does.

        Raises:
            KvscoutError: As it answers, or it does not.
        """
        return await call(self.GetStatus, types_pb2.GetStatusRequest(tenant="*"), timeout=timeout)

    async def _alive(self, timeout: float) -> bool:
        try:
            await self.get_status(timeout)
        except KvscoutError as error:
            return error.answered
        return True


def error_of(result: scheduler_pb2.LifecycleResult, *, draining: bool = False) -> KvscoutError:
    """The error that a result stands for.

    Args:
        result: Its code is not 0.
        draining: The scheduler has said that it drains.
    """
    code = _CODES.get(result.code, grpc.StatusCode.INTERNAL)
    soon = None
    if result.HasField("retry_after_seconds"):
        soon = result.retry_after_seconds
    elif code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        soon = RETRY_SECONDS
    raised = Draining.__name__ if draining and code is grpc.StatusCode.UNAVAILABLE else ""
    error = from_status(code, result.message, retry_after_seconds=soon, raised=raised)
    error.answered = True
    return error


def _checked(result: scheduler_pb2.LifecycleResult, stream: LifecycleStream) -> scheduler_pb2.LifecycleResult:
    if result.code:
        raise error_of(result, draining=stream.draining)
    return result


def _waited_too_long() -> WaitedTooLong:
    return WaitedTooLong("no worker had room for the request in time", retry_after_seconds=RETRY_SECONDS)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
