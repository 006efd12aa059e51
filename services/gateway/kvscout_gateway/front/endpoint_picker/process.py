"""The rpc that a proxy opens for each request: its messages → the stream's state → answers, and picks that are told.

Bytes in, bytes out: a piece of a response is never parsed, and goes back at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from kvscout_common.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    KvscoutError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unimplemented,
)
from kvscout_common.transport.answering import read_unanswered
from kvscout_gateway.front.endpoint_picker import wire
from kvscout_gateway.front.endpoint_picker.account import last_account
from kvscout_gateway.front.endpoint_picker.asked import asked_of
from kvscout_gateway.front.endpoint_picker.picking import Pick, Picker
from kvscout_gateway.front.endpoint_picker.stream import (
    Answering,
    BodyTooLong,
    Close,
    Ended,
    Event,
    FirstOutput,
    Follow,
    PickWanted,
    RequestStream,
    Step,
)

log = logging.getLogger("kvscout.gateway")

STATUSES: dict[type[KvscoutError], int] = {
    InvalidArgument: 400,
    Unauthenticated: 401,
    PermissionDenied: 403,
    NotFound: 404,
    AlreadyExists: 409,
    ResourceExhausted: 429,
    InternalError: 500,
    Unimplemented: 501,
    # No endpoint is ready for it, now or in time.
    KvscoutError: 503,
}
"""The protocol's own are 429 (shed) and 503 (no endpoint)."""
TOO_LONG = 413


@dataclass(frozen=True, slots=True)
class Limits:
    """What one stream, and all of them, may take."""

    pick_seconds: float
    body_bytes: int
    """Of one request's body."""
    held_bytes: int
    """Of all bodies that wait for their picks."""


class ExternalProcessor:
    """Serves `Process`.

    Args:
        picker: Picks.
        follow: Asked for each request: what is done once its pick is out.
        limits: Bounds.
        count: Told of each request's outcome: "picked", or the error's name.
    """

    def __init__(
        self, picker: Picker, follow: Callable[[], Follow], limits: Limits, count: Callable[[str], object]
    ) -> None:
        self._picker = picker
        self._follow = follow
        self._limits = limits
        self._count = count
        self.held_bytes = 0
        """Of bodies that wait for their picks."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the rpc, under Envoy's own name."""
        behaviour: Any = self.process  # grpcio's stubs want the synchronous one
        handlers: Any = {"Process": grpc.stream_stream_rpc_method_handler(behaviour)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
        server.add_registered_method_handlers(wire.SERVICE, handlers)

    async def process(self, requests: object, context: Any) -> None:
        """Follows one request.

        Raises:
            InvalidArgument: The proxy sends what is none of the protocol's messages, or not in its order.
        """
        call = _Call(self._follow(), self._limits)
        echo = call.stream.echo
        try:
            while not call.is_over and (message := await read_unanswered(context, echo)) is not grpc.aio.EOF:
                step = await self._taken(call, message)
                for answer in step.answers:
                    await context.write(answer)
                if step.close:
                    call.leave()
        finally:
            self._hold(call, 0)
            call.close()

    async def _taken(self, call: _Call, message: bytes) -> Step:
        step = call.stream.receive(message)
        for event in step.events:
            match event:
                case PickWanted():
                    try:
                        return await self._pick(call, event)
                    finally:
                        self._hold(call, 0)
                case BodyTooLong():
                    self._count("too long")
                    too_long = ResourceExhausted(f"is longer than {self._limits.body_bytes} bytes", field="body")
                    return call.stream.refused(_refusal(too_long, TOO_LONG))
                case _:
                    call.hear(event)
        if not self._hold(call, call.stream.held_bytes):
            self._count("full")
            error = ResourceExhausted("too much waits for picks already", retry_after_seconds=1.0)
            return call.stream.refused(_refusal(error))
        return step

    async def _pick(self, call: _Call, wanted: PickWanted) -> Step:
        limit = self._limits.pick_seconds
        try:
            asked = asked_of(wanted.headers, wanted.body, wanted.subset)
            async with asyncio.timeout(limit):
                call.pick = await self._picker.pick(asked)
        except TimeoutError:
            error: KvscoutError = DeadlineExceeded(f"no endpoint within {limit:g} s", retry_after_seconds=1.0)
        except Cancelled:
            raise
        except KvscoutError as raised:
            error = raised
        except Exception:
            log.exception("unexpected error in a pick")
            error = InternalError("internal error; the service's log has the details")
        else:
            self._count("picked")
            return call.stream.picked(call.pick.headers)
        self._count(type(error).__name__)
        return call.stream.refused(_refusal(error))

    def _hold(self, call: _Call, held_bytes: int) -> bool:
        """Notes what a call holds of its request's body; False if that is too much of all."""
        self.held_bytes += held_bytes - call.held_bytes
        call.held_bytes = held_bytes
        return self.held_bytes <= self._limits.held_bytes


class _Call:
    """One request, and what was picked for it."""

    def __init__(self, follow: Follow, limits: Limits) -> None:
        self.stream = RequestStream(follow, max_body_bytes=limits.body_bytes)
        self.pick: Pick | None = None
        self.held_bytes = 0
        self.is_over = False

    def hear(self, event: Event) -> None:
        """Passes on what happened to the request."""
        pick = self.pick
        assert pick is not None
        match event:
            case Answering():
                pick.answering(event.status, event.served)
            case FirstOutput():
                pick.first_output()
            case Ended():
                self.pick = None
                pick.ended(last_account(event.tail))

    def leave(self) -> None:
        """The stream is ended from here."""
        self.is_over = True
        if self.pick is not None:
            self.pick.left()
            self.pick = None

    def close(self) -> None:
        """The stream has ended."""
        what = self.stream.closed()
        pick, self.pick = self.pick, None
        if pick is None:
            return
        match what:
            case Close.OVER:
                pick.ended(None)
            case Close.LEFT:
                pick.left()
            case _:
                pick.aborted()


def _refusal(error: KvscoutError, status: int = 0) -> bytes:
    """An error as clients of OpenAI's API read it."""
    status = status or next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    body = {"error": {"message": str(error), "type": type(error).__name__, "param": error.field, "code": status}}
    wait = error.retry_after_seconds
    headers = {} if wait is None else {"retry-after": str(max(1, round(wait)))}
    return wire.refusal_answer(
        status, json.dumps(body).encode(), headers=headers, details=f"kvscout_{type(error).__name__}"
    )
