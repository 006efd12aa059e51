"""One scheduler as the gateway calls it: its stub, and its Lifecycle stream while that is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc
from kvscout_common.errors import Draining, KvscoutError
from kvscout_common.transport.statuses import from_status
from kvscout_gateway.upstreams.failover import Failover, Member
from kvscout_gateway.upstreams.scheduler.lifecycle import LifecycleStream

RETRY_SECONDS = 1.0
"""Seconds after which callers try again, where the stream names no time."""

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
_CODES = {code.value[0]: code for code in grpc.StatusCode}

if TYPE_CHECKING:
    _Stub = scheduler_pb2_grpc.SchedulerAsyncStub
else:
    _Stub = scheduler_pb2_grpc.SchedulerStub


class SchedulerLink(_Stub):
    """A scheduler's stub, and its stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)
        self.open_lifecycle: Callable[[], Any] = channel.stream_stream(f"/{SERVICE}/Lifecycle")
        """Opens the stream, over bytes."""
        self.select_and_reserve: Any = channel.unary_unary(
            f"/{SERVICE}/SelectAndReserve", response_deserializer=scheduler_pb2.SelectResponse.FromString
        )
        """Books with a lease; takes a serialised `SelectRequest`."""
        self._stream: LifecycleStream | None = None
        self._operations = 0
        self._messages = 0
        self.connects = 0
        """Streams that were opened."""
        self.rebooked = 0
        """Running requests that were booked here because this scheduler did not know them."""

    @property
    def stream(self) -> LifecycleStream | None:
        """The stream, while it is open."""
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

    @property
    def waiting(self) -> int:
        """Requests that wait in line over the stream."""
        return self.stream.waiting if self.stream is not None else 0

    def use(self, stream: LifecycleStream) -> None:
        """Take a stream that has just been opened."""
        self.drop_stream()
        self._stream = stream
        self.connects += 1

    def drop_stream(self) -> LifecycleStream | None:
        """Give up the stream; return it."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._operations += stream.operations
            self._messages += stream.messages
        return stream


Schedulers: TypeAlias = "Failover[SchedulerLink]"
SchedulerMember: TypeAlias = "Member[SchedulerLink]"


def error_of(result: scheduler_pb2.LifecycleResult, *, draining: bool = False) -> KvscoutError:
    """Return the error that a result stands for.

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
    error = from_status(code, result.message, retry_after_seconds=soon, raised=raised, cause=result.cause)
    error.answered = True
    return error
