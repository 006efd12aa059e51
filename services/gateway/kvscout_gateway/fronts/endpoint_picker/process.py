"""The rpc that a proxy opens for each request: its messages → the stream's state → answers, and reports to picks.

Bytes in, bytes out: a chunk of a response is never parsed, and goes back at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from kvscout_common.errors import ResourceExhausted, Unavailable
from kvscout_common.http.http import HttpRefused
from kvscout_common.identity.identity import current_identity
from kvscout_common.rpc.answering import read_unanswered
from kvscout_gateway.fronts.client_paths import ClientPaths
from kvscout_gateway.fronts.endpoint_picker import conformance, wire
from kvscout_gateway.fronts.endpoint_picker.account import last_account
from kvscout_gateway.fronts.endpoint_picker.pick_request import PickRequest, path_of, read_request, require_path
from kvscout_gateway.fronts.endpoint_picker.picking import Pick, Picker
from kvscout_gateway.fronts.endpoint_picker.stream import (
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
from kvscout_gateway.fronts.refusals import refusal_of, refusal_of_http, shaped
from kvscout_gateway.values.dialects import errors_of

TOO_LONG = 413
FALLBACK_SECONDS = 0.5
"""For a pick by what is known here."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one stream, and of all together."""

    pick_seconds: float
    body_bytes: int
    """Bytes of one request's body."""
    held_bytes: int
    """Bytes of all bodies that wait for their picks."""
    client_paths: ClientPaths
    """Paths that clients may call."""
    ends_with_answers: bool = True
    """See `RequestStream`."""
    conformance: bool = False
    """Tests choose endpoints by headers, and answers name them: see `conformance`. They have paths of their own."""


class ExternalProcessor:
    """Serves `Process`.

    Args:
        picker: Picks.
        follow: Called for each request: decides what is done once its pick is out.
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
        """Bytes of bodies that wait for their picks."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the rpc, under Envoy's own name."""
        behaviour: Any = self.process  # grpcio's stubs want the synchronous one
        handlers: Any = {"Process": grpc.stream_stream_rpc_method_handler(behaviour)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
        server.add_registered_method_handlers(wire.SERVICE, handlers)

    async def process(self, requests: object, context: Any) -> None:
        """Follow one request.

        Raises:
            InvalidArgument: The proxy sends what is none of the protocol's messages, or not in its order.
        """
        call = _Call(self._follow(), self._limits)

        def echo(message: bytes) -> Sequence[bytes] | None:
            answer = call.stream.echo(message)
            return None if answer is None else (answer,)

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
                    return call.stream.refused(_too_long(self._limits.body_bytes, call.stream.request_headers))
                case _ if call.pick is not None:
                    call.report(call.pick, event)
        if not self._hold(call, call.stream.held_bytes):
            self._count("full")
            error = ResourceExhausted("too many requests wait for picks", retry_after_seconds=1.0)
            return call.stream.refused(_refused(error, call.stream.request_headers))
        return step

    async def _pick(self, call: _Call, wanted: PickWanted) -> Step:
        try:
            identity = current_identity()
            if not self._limits.conformance:
                require_path(wanted.headers, self._limits.client_paths)
            asked = await read_request(wanted.headers, wanted.body, wanted.subset, max_priority=identity.max_priority)
            if self._limits.conformance:
                asked = conformance.steered(asked, wanted.headers)
            call.pick = await self._picked(asked._replace(shows_output=wanted.shows_output))
        except TimeoutError:
            limit = self._limits.pick_seconds
            error: Exception = Unavailable(f"no endpoint within {limit:g} s", retry_after_seconds=1.0)
        except Exception as raised:
            error = raised
        else:
            self._count("picked")
            return call.stream.picked(call.pick.headers, asked.changed, call.pick.answer_headers)
        self._count(type(error).__name__)
        return call.stream.refused(_refused(error, wanted.headers))

    async def _picked(self, asked: PickRequest) -> Pick:
        """Return a pick in time; where an upstream hangs, or this process had no time itself, by what is known here.

        Raises:
            KvscoutError: There is none.
            TimeoutError: Not even that.
        """
        try:
            async with asyncio.timeout(self._limits.pick_seconds):
                return await self._picker.pick(asked)
        except TimeoutError:
            async with asyncio.timeout(FALLBACK_SECONDS):
                return await self._picker.pick(asked, without_upstreams=True)

    def _hold(self, call: _Call, held_bytes: int) -> bool:
        """Note what a call holds of its request's body; False if that is too much of all."""
        self.held_bytes += held_bytes - call.held_bytes
        call.held_bytes = held_bytes
        return self.held_bytes <= self._limits.held_bytes


class _Call:
    """One request, and what was picked for it."""

    def __init__(self, follow: Follow, limits: Limits) -> None:
        self.stream = RequestStream(
            follow,
            max_body_bytes=limits.body_bytes,
            ends_with_answers=limits.ends_with_answers,
            report=conformance.report if limits.conformance else None,
        )
        self.pick: Pick | None = None
        self.held_bytes = 0
        self.is_over = False

    def report(self, pick: Pick, event: Event) -> None:
        """Report to its pick what happened to the request."""
        match event:
            case Answering():
                pick.answering(event.status, event.served, event.in_chunks)
            case FirstOutput():
                pick.first_output(event.head)
            case Ended():
                self.pick = None
                pick.ended(last_account(event.tail))

    def leave(self) -> None:
        """End the stream from here."""
        self.is_over = True
        if self.pick is not None:
            self.pick.left()
            self.pick = None

    def close(self) -> None:
        """Record the end of the stream."""
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


def _refused(error: Exception, request: Mapping[str, str]) -> bytes:
    shape = errors_of(path_of(request))
    if isinstance(error, HttpRefused):
        refusal = refusal_of_http(error, shape=shape)
    else:
        refusal = refusal_of(error, shape=shape)
    headers = {name.lower(): value for name, value in refusal.headers}
    return wire.refusal_answer(refusal.status, refusal.body, headers=headers, details=f"kvscout_{type(error).__name__}")


def _too_long(body_bytes: int, request: Mapping[str, str]) -> bytes:
    message = f"the body is longer than {body_bytes} bytes"
    body = shaped(errors_of(path_of(request)), TOO_LONG, message, "invalid_request_error", param="body")
    return wire.refusal_answer(TOO_LONG, body, headers={}, details="kvscout_too_long")
