"""One request on its way past the picker: what the proxy says → what to answer, and what happened. Pure.

::

    headers ─▶ body ─▶ PickWanted ──picked()──▶ response headers ─▶ chunks ─▶ end
                           └─────refused()──▶ over

The proxy says at first how it passes bodies on (`protocol_config`), and the answers follow it:

==================== ========================================= ==========================================
body mode            of the request                            of the response
==================== ========================================= ==========================================
NONE                 picked by the headers alone               headers, then the end of the stream
BUFFERED             headers pass, the pick is in the answer   one chunk
                     to the body
STREAMED             picked by the headers alone; or, if the   a chunk is answered with nothing
                     body comes without waiting, once it is
                     whole
FULL_DUPLEX_STREAMED headers and body go back once it is       a chunk goes back as it came
                     whole, in chunks
==================== ========================================= ==========================================

A proxy that says nothing is answered as in FULL_DUPLEX_STREAMED, and is expected to show the request only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple, TypeAlias

from kvscout.ext_proc.v3 import ext_proc_pb2 as pb
from kvscout_common.errors import InvalidArgument
from kvscout_common.rpc.handlers import read_message
from kvscout_gateway.fronts.endpoint_picker import wire
from kvscout_gateway.fronts.endpoint_picker.pick_request import path_of
from kvscout_gateway.values.dialects import API_DIALECTS

TAIL_CHUNKS: Final = 4
"""The last chunks of a response that are kept: usage, the stream's closing event, the end, and what usage began in."""

HEAD_BYTES: Final = 4096
"""First bytes of a response that are kept until its first output."""


class Follow(Enum):
    """Handling of the stream after the pick."""

    PROXY = auto()
    """Watch the parts of the response that the proxy passes on."""
    MESSAGES = auto()
    """And where it would pass on no bodies, it is asked to."""
    LEAVE = auto()
    """The stream is ended: the proxy goes on alone. In FULL_DUPLEX_STREAMED a proxy loses what it has shown of the
    response by then: there it is followed instead where the end may come after the pick."""


@dataclass(frozen=True, slots=True)
class PickWanted:
    """An endpoint is to be picked: `picked` or `refused` follows."""

    headers: Mapping[str, str]
    body: bytes
    """Empty if there is none, or the proxy passes none on."""
    subset: tuple[str, ...] | None
    """The endpoints that it may be; None = any."""
    shows_output: bool = True
    """The proxy will show the response's body, as far as is known."""


@dataclass(frozen=True, slots=True)
class BodyTooLong:
    """The request is to be refused: `refused` follows."""


@dataclass(frozen=True, slots=True)
class Answering:
    """An engine answers, or the proxy in its place."""

    status: int
    served: str
    """Its endpoint; "" = the proxy does not report it."""
    in_chunks: bool | None = None
    """True = its output comes as it is generated, so that the first chunk shows when the prompt was computed; None =
    it does not show it."""

    @property
    def ok(self) -> bool:
        """Tell whether it runs the request."""
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class FirstOutput:
    """The first output in the response's body came by."""

    head: bytes
    """First bytes of the body."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The response is whole."""

    tail: bytes
    """Its last bytes; empty where the proxy passes no bodies on."""


Event: TypeAlias = PickWanted | BodyTooLong | Answering | FirstOutput | Ended


class Step(NamedTuple):
    """Result of a message."""

    answers: tuple[bytes, ...] = ()
    """To be sent, in order."""
    events: tuple[Event, ...] = ()
    close: bool = False
    """And then the stream is to be ended, in peace."""


Report: TypeAlias = Callable[[pb.ProcessingRequest, str], Mapping[str, str]]
_NOTHING: Final = Step()
_PASSED: Final = Step((wire.ANSWER_RESPONSE_CHUNK,))


class Close(Enum):
    """Meaning of a stream's end."""

    IDLE = auto()
    """Nothing: no pick is out, or the response was seen to its end."""
    OVER = auto()
    """The response has ended or was given up, which look the same."""
    ABORTED = auto()
    """The response will not be whole."""
    LEFT = auto()
    """The proxy wanted the pick, and shows nothing of what becomes of it."""


class _Phase(Enum):
    HEADERS = auto()
    BODY = auto()
    PICKING = auto()
    PICKED = auto()
    RESPONDING = auto()
    OVER = auto()


_BUFFERED = frozenset({pb.BODY_MODE_BUFFERED, pb.BODY_MODE_BUFFERED_PARTIAL})


class RequestStream:
    """See the module.

    Args:
        follow: What is done once the pick is out.
        max_body_bytes: A longer body of a request is refused.
        ends_with_answers: Whether the end of the stream reaches the proxy together with the answers before it.
        report: Says which headers a response gets, from its own as they come and the picked endpoints; None = none.
    """

    def __init__(
        self, follow: Follow, *, max_body_bytes: int, ends_with_answers: bool = True, report: Report | None = None
    ) -> None:
        self._follow = follow
        self._report = report
        self._picked = ""
        self._answer_headers = wire.NO_HEADERS
        self._ends_with_answers = ends_with_answers
        self._max_body_bytes = max_body_bytes
        self._phase = _Phase.HEADERS
        self._configured = False
        """The proxy says how it passes bodies on: it shows the response, too."""
        self._request_mode: int = pb.BODY_MODE_FULL_DUPLEX_STREAMED
        self._response_mode: int = pb.BODY_MODE_FULL_DUPLEX_STREAMED
        self._headers: Mapping[str, str] = {}
        self._subset: tuple[str, ...] | None = None
        self._headers_answered = False
        self._chunks: list[bytes] = []
        self.held_bytes = 0
        """Bytes of the request's body, until its pick is out."""
        self._is_whole = False
        self._trailers: list[bytes] = []
        """The answer to the request's trailers, if they came before the pick."""
        self._ok = False
        self._has_output = False
        self._head = b""
        """First bytes of the response's body."""
        self._mark = b""
        """Bytes that stand in its first output; empty = any."""
        self._tail: deque[bytes] = deque(maxlen=TAIL_CHUNKS)

    @property
    def request_headers(self) -> Mapping[str, str]:
        """Return the headers of the request, by their lower-case names; empty = they have not come."""
        return self._headers

    @property
    def _shows_output(self) -> bool:
        if not self._configured or self._follow is Follow.LEAVE:
            return False
        return self._follow is Follow.MESSAGES or self._response_mode != pb.BODY_MODE_NONE

    @property
    def _response_is_duplex(self) -> bool:
        return self._response_mode == pb.BODY_MODE_FULL_DUPLEX_STREAMED

    def receive(self, message: bytes) -> Step:  # noqa: PLR0911  # a state machine
        """Take a message of the proxy.

        Raises:
            InvalidArgument: It is none, or comes at the wrong time.
        """
        if self._phase is _Phase.RESPONDING:
            chunk = wire.response_chunk(message)
            if chunk is not None:
                return self._response_chunk(chunk)
        request = read_message(pb.ProcessingRequest.FromString, message)
        kind = request.WhichOneof("request")
        match kind, self._phase:
            case "request_headers", _Phase.HEADERS:
                return self._request_headers(request)
            case "request_body", _Phase.BODY:
                return self._request_chunk(request.request_body)
            case "request_body", _Phase.PICKED | _Phase.RESPONDING | _Phase.OVER:
                return Step((wire.ANSWER_REQUEST_CHUNK,))
            case "request_trailers", _Phase.BODY:
                self._trailers.append(wire.ANSWER_REQUEST_TRAILERS)
                return self._want_pick()
            case "request_trailers", _Phase.PICKING:
                self._trailers.append(wire.ANSWER_REQUEST_TRAILERS)
                return _NOTHING
            case "request_trailers", _Phase.PICKED | _Phase.RESPONDING | _Phase.OVER:
                return Step((wire.ANSWER_REQUEST_TRAILERS,))
            case "response_headers", _Phase.PICKED:
                return self._response_headers(request)
            case "response_body", _Phase.RESPONDING:
                body = request.response_body
                body.DiscardUnknownFields()
                return self._response_chunk(wire.chunk_of(body.SerializeToString()))
            case "response_trailers", _Phase.RESPONDING:
                return Step((wire.ANSWER_RESPONSE_TRAILERS,), self._end())
        raise InvalidArgument(f"{kind or 'nothing'} came in phase {self._phase.name.lower()}", field="request")

    def echo(self, message: bytes) -> bytes | None:
        """Return the answer to a chunk in the middle of a response; None = another message, for `receive`."""
        if not self._has_output or self._phase is not _Phase.RESPONDING:
            return None
        chunk = wire.response_chunk(message)
        if chunk is None or chunk.last or chunk.body_bytes > wire.CHUNK_BYTES:
            return None
        if chunk.body_bytes:
            self._tail.append(chunk.fields)
        if self._response_is_duplex:
            return wire.duplex_response_answer(chunk.fields)
        return wire.ANSWER_RESPONSE_CHUNK

    def picked(
        self, headers: Mapping[str, str], body: bytes | None = None, answer_headers: Mapping[str, str] = wire.NO_HEADERS
    ) -> Step:
        """Let the request go where it was picked to go.

        Args:
            headers: To set, `wire.DESTINATION` among them.
            body: Goes on in place of the one that came; None = as it came.
            answer_headers: To set in the response.
        """
        assert self._phase is _Phase.PICKING
        self._answer_headers = answer_headers
        self._phase = _Phase.PICKED
        self._picked = headers[wire.DESTINATION]
        override = None if self._headers_answered else self._override()
        with_body = self._headers_answered
        buffered = body if with_body else None
        answers = [wire.pick_answer(headers, with_body=with_body, came=self._headers, body=buffered, override=override)]
        if self._chunks and self._request_mode == pb.BODY_MODE_FULL_DUPLEX_STREAMED:
            whole = b"".join(self._chunks) if body is None else body
            answers += wire.duplex_request_answers(whole, end=self._is_whole)
        elif self._request_mode == pb.BODY_MODE_STREAMED:
            chunks = len(self._chunks)
            if body is not None and chunks:
                answers += wire.changed_chunk_answers(body, chunks)
            else:
                answers += [wire.ANSWER_REQUEST_CHUNK] * chunks
        answers += self._trailers
        self._drop_body()
        return Step(tuple(answers), close=self._follow is Follow.LEAVE)

    def refused(self, answer: bytes) -> Step:
        """Answer the client in the engine's place.

        Args:
            answer: Of `wire.refusal_answer`.
        """
        self._phase = _Phase.OVER
        self._drop_body()
        return Step((answer,), close=True)

    def closed(self) -> Close:
        """Record the end of the stream."""
        phase, self._phase = self._phase, _Phase.OVER
        self._drop_body()
        match phase:
            case _Phase.PICKED:
                return Close.ABORTED if self._configured else Close.LEFT
            case _Phase.RESPONDING:
                return Close.OVER if self._response_mode == pb.BODY_MODE_NONE else Close.ABORTED
        return Close.IDLE

    def _request_headers(self, request: pb.ProcessingRequest) -> Step:
        if request.observability_mode:
            return Step(close=True)  # no pick can be made here: whoever shows only gets no answers
        unwaited = False
        if request.HasField("protocol_config"):
            self._configured, config = True, request.protocol_config
            self._request_mode, self._response_mode = config.request_body_mode, config.response_body_mode
            unwaited = config.send_body_without_waiting_for_header_response
            if self._follow is Follow.LEAVE and self._response_is_duplex and not self._ends_with_answers:
                self._follow = Follow.PROXY
        self._headers = wire.header_map(request.request_headers.headers)
        self._subset = wire.subset_hint(request)
        by_headers = self._request_mode == pb.BODY_MODE_NONE or (
            self._request_mode == pb.BODY_MODE_STREAMED and not unwaited
        )
        if by_headers or request.request_headers.end_of_stream:
            return self._want_pick()
        self._phase = _Phase.BODY
        if self._request_mode not in _BUFFERED:
            return _NOTHING
        self._headers_answered = True
        return Step((wire.headers_answer(self._override()),))

    def _override(self) -> pb.ProcessingMode | None:
        """Return what to ask of a proxy that would pass on no bodies. (In FULL_DUPLEX_STREAMED it ignores that.)"""
        if self._follow is not Follow.MESSAGES or self._response_mode != pb.BODY_MODE_NONE:
            return None
        mode = pb.ProcessingMode(response_body_mode=pb.BODY_MODE_STREAMED)
        mode.request_body_mode = self._request_mode  # type: ignore[assignment]  # an open enum: as it came
        return mode

    def _request_chunk(self, body: pb.HttpBody) -> Step:
        self.held_bytes += len(body.body)
        if self.held_bytes > self._max_body_bytes:
            return Step(events=(BodyTooLong(),))
        self._chunks.append(body.body)
        self._is_whole = body.end_of_stream
        # What is buffered comes at once, if trailers follow it or not.
        return self._want_pick() if body.end_of_stream or self._request_mode in _BUFFERED else _NOTHING

    def _want_pick(self) -> Step:
        self._phase = _Phase.PICKING
        wanted = PickWanted(self._headers, b"".join(self._chunks), self._subset, self._shows_output)
        return Step(events=(wanted,))

    def _drop_body(self) -> None:
        self._chunks = []
        self.held_bytes = 0

    def _response_headers(self, request: pb.ProcessingRequest) -> Step:
        self._phase = _Phase.RESPONDING
        headers = wire.header_map(request.response_headers.headers)
        status = headers.get(":status", "")
        kind = headers.get("content-type")
        in_chunks = None if kind is None else kind.lower().startswith("text/event-stream")
        answering = Answering(int(status) if status.isdecimal() else 0, wire.served_endpoint(request), in_chunks)
        self._ok = answering.ok
        api = API_DIALECTS.get(path_of(self._headers))
        if api is not None and in_chunks is not False:
            self._mark = api.output_mark
        ended = self._end() if request.response_headers.end_of_stream else ()
        answer = wire.ANSWER_RESPONSE_HEADERS
        if self._answer_headers:
            answer = wire.response_headers_answer(self._answer_headers)
        if self._report is not None:
            answer = wire.response_headers_answer(self._report(request, self._picked))
        return Step((answer,), (answering, *ended))

    def _response_chunk(self, chunk: wire.Chunk) -> Step:
        events: tuple[Event, ...] = ()
        if chunk.body_bytes:
            self._tail.append(chunk.fields)
            if not self._has_output:
                self._head = self._head or chunk.body[:HEAD_BYTES]
                self._has_output = self._mark in chunk.body
                events = (FirstOutput(self._head),) if self._ok and self._has_output else ()
        duplex = self._response_is_duplex
        if self._response_mode == pb.BODY_MODE_NONE:
            self._response_mode = pb.BODY_MODE_STREAMED  # it was asked to
        if chunk.last:
            events = (*events, *self._end())
        elif not events and not duplex:
            return _PASSED
        if not duplex:
            return Step((wire.ANSWER_RESPONSE_CHUNK,), events)
        if chunk.body_bytes <= wire.CHUNK_BYTES:
            return Step((wire.duplex_response_answer(chunk.fields),), events)
        return Step(tuple(wire.duplex_response_answers(chunk.body, end=chunk.last)), events)

    def _end(self) -> tuple[Event, ...]:
        self._phase = _Phase.OVER
        return (Ended(b"".join(wire.chunk_of(fields).body for fields in self._tail)),)
