"""One scheduler as the gateway calls it: over its Lifecycle stream while that is open, else by unary rpcs.

What the gateway runs itself is booked over the stream, where it has no lease: it ends with this gateway. What Route
books for others, and what is booked while there is no stream, has a lease.

A booking may wait in line at the scheduler. It does not count as slow then: the deadline is the line's. What waits has
its overlaps refreshed: the same attempt is sent again and takes over its own place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from google.protobuf.message import Message

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.channel import call, to_error
from kvscout_common.errors import (
    DeadlineExceeded,
    Draining,
    KvscoutError,
    ResourceExhausted,
    Unavailable,
    from_status,
)
from kvscout_gateway.failover import is_member_fault
from kvscout_gateway.scheduler_client.lifecycle import LifecycleStream, Operation, body_of

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


@dataclass(slots=True)
class Line:
    """How one request waits in line."""

    ends_at: float
    """On the monotonic clock: it is given up then."""
    refresh: Callable[[], Awaitable[scheduler_pb2.SelectRequest]]
    """The request with overlaps of now."""
    waited: bool = False
    """It was in line."""
    sent: scheduler_pb2.SelectRequest | None = None
    """What was sent last: on its overlaps the decision is made."""


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

    def tell(self, kind: str, message: Any) -> Operation | None:
        """Sends an operation over the stream; None = there is none."""
        stream = self.stream
        return stream.tell(kind, message) if stream is not None else None

    async def place(
        self,
        request: scheduler_pb2.SelectRequest,
        *,
        line: Line,
        books: bool,
        owned: bool,
        timeout: float,
        given_up: Sequence[scheduler_pb2.RequestRef] = (),
    ) -> Reserved:
        """Select, or SelectAndReserve.

        Args:
            request: What wants a worker.
            line: How it waits.
            books: It is to be booked.
            owned: For this gateway, as long as that is connected; else for a caller, with a lease.
            timeout: Longest wait in seconds for a sign that the scheduler has seen to it.
            given_up: Attempts of the request at other schedulers, of which this one may have heard: freed first.

        Raises:
            WaitedTooLong: There was no room.
            LeftInLine: The scheduler was gone before there was.
            KvscoutError: As the scheduler answers, or it does not.
        """
        line.sent = request
        deadline = time.monotonic() + timeout
        try:
            if not books:
                return Reserved(await self._ask("select", request, timeout, self.Select), leased=False)
            await asyncio.gather(*(self.free(ref, timeout=timeout) for ref in given_up))
            if owned:
                return await self._reserve(request, line, _left(deadline))
            return Reserved(await self._lease(request, line, _left(deadline)), leased=True)
        except grpc.aio.AioRpcError as error:
            failed = to_error(error)
        except KvscoutError as error:
            failed = error
        if line.waited and is_member_fault(failed):
            line.waited = False
            raise LeftInLine(str(failed)) from failed
        raise failed

    async def prefill_complete(
        self, ref: scheduler_pb2.RequestRef, *, timeout: float
    ) -> scheduler_pb2.MarkPrefillCompleteResponse:
        """MarkPrefillComplete."""
        answer: scheduler_pb2.MarkPrefillCompleteResponse = await self._ask(
            "prefill_complete", ref, timeout, self.MarkPrefillComplete
        )
        return answer

    async def free(self, ref: scheduler_pb2.RequestRef, *, timeout: float) -> scheduler_pb2.FreeResponse:
        """Free."""
        answer: scheduler_pb2.FreeResponse = await self._ask("free", ref, timeout, self.Free)
        return answer

    async def _ask(self, kind: str, message: Message, timeout: float, unary: Callable[..., Any]) -> Any:
        """The answer to an operation over the stream; to the unary rpc if there is none, or it ends."""
        deadline = time.monotonic() + timeout
        stream = self.stream
        if stream is not None:
            result = await stream.ask(body_of(kind, message), timeout)
            if result is not None:
                return getattr(_checked(result, stream), kind)
        return await unary(message, timeout=_left(deadline))

    async def _reserve(self, request: scheduler_pb2.SelectRequest, line: Line, timeout: float) -> Reserved:
        deadline = time.monotonic() + timeout
        stream = self.stream
        if stream is not None:
            result = await self._reserve_over(stream, request, line, timeout)
            if result is not None:
                return Reserved(_checked(result, stream).select, leased=False)
            if line.waited:
                raise Unavailable("the stream ended while the request waited in line")
        return Reserved(await self._lease(request, line, _left(deadline)), leased=True)

    async def _lease(
        self, request: scheduler_pb2.SelectRequest, line: Line, timeout: float
    ) -> scheduler_pb2.SelectResponse:
        """By a unary call. What waits in line keeps its overlaps."""
        calling: Any = self.SelectAndReserve(request, timeout=_left(line.ends_at))
        watches: list[asyncio.Task[None]] = []
        stuck = False

        async def watch() -> None:
            nonlocal stuck
            while await self._alive(timeout / 2):
                line.waited = True
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
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and line.waited and not _left(line.ends_at):
                raise _waited_too_long() from None
            raise
        finally:
            start.cancel()
            for task in watches:
                task.cancel()

    async def _reserve_over(
        self, stream: LifecycleStream, request: scheduler_pb2.SelectRequest, line: Line, timeout: float
    ) -> scheduler_pb2.LifecycleResult | None:
        operation = stream.tell("select_and_reserve", request)
        try:
            if await operation.within(timeout / 2):
                return operation.answer.result()
            stream.probe()
            if await operation.within(timeout / 2):
                return operation.answer.result()
            if not stream.carried_out(operation):
                raise DeadlineExceeded("no answer on the stream")
            line.waited = True
            pause = max(0.0, REFRESH_SECONDS - timeout)
            next_pause = REFRESH_SECONDS
            while not await operation.within(min(pause, _left(line.ends_at))):
                if not _left(line.ends_at):
                    stream.tell("free", ref_of(request))
                    raise _waited_too_long()
                fresh = await line.refresh()
                if not operation.answer.done():
                    stream.drop(operation)
                    operation = stream.tell("select_and_reserve", fresh)
                    line.sent = fresh
                pause, next_pause = next_pause, min(2 * next_pause, MAX_REFRESH_SECONDS)
            return operation.answer.result()
        finally:
            stream.drop(operation)

    async def ask_status(self, timeout: float) -> scheduler_pb2.SchedulerStatus:
        """Asks what every scheduler answers, whatever else it does.

        Raises:
            KvscoutError: As it answers, or it does not.
        """
        return await call(self.GetStatus, types_pb2.GetStatusRequest(tenant="*"), timeout=timeout)

    async def _alive(self, timeout: float) -> bool:
        try:
            await self.ask_status(timeout)
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


def ref_of(request: scheduler_pb2.SelectRequest) -> scheduler_pb2.RequestRef:
    """The name of the booking that a request asks for."""
    return scheduler_pb2.RequestRef(
        model=request.model,
        tenant=request.tenant,
        role=request.role,
        request_id=request.request_id,
        attempt_id=request.attempt_id,
    )


def _waited_too_long() -> WaitedTooLong:
    return WaitedTooLong("no worker had room for the request in time", retry_after_seconds=RETRY_SECONDS)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
