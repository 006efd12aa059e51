"""HTTP/1.1 as the rest of kvscout sees it: a client for engines, a server for clients, and a pump between the two.

::

    engine ──▶ HttpAnswer ──relay──▶ Sink: an HttpCall of our server, or the context of a gRPC handler
                              │
                              └─ StreamReport: what was noticed on the way (first output, usage, finish, error)

Python decides, the transport moves bytes: the caller gets one event for the head of an answer, one when output begins
and one at the end. `factory` makes clients and servers of the transport that `--rpc-transport` names.

Nothing is unpacked, followed or kept: no redirects, no compression, no cookies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol, TypeAlias

from kvscout_common.http.dialect import Dialect, Usage
from kvscout_common.identity.pem import Pem
from kvscout_common.process.endings import NobodyWaits

Headers: TypeAlias = Sequence[tuple[str, str]]
"""Names in any case, in the order in which they travel; those of ours that frame a message are the transport's."""

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""A longer event is no output: the first one repeats the prompt's token ids, 7 bytes each."""
MAX_ID_CHARACTERS = 256
"""Characters of an answer's name; a longer one is none."""
MAX_WITHHELD_BYTES = 64 * 1024
"""Bytes withheld of a stream that has said nothing yet, such as comments; more of it is passed on."""
TRAILER_SECONDS = 1.0
"""Longest wait for the end of a body whose last event came; after it the connection can be used again."""
IDLE_SECONDS = 4.0
"""Idle connections are kept this long: below the 5 s after which uvicorn, and so vLLM, closes them. A request written
to a connection that the engine is just closing would count as a failure of the engine."""

VANISHED_SECONDS = 60.0
"""A peer whose kernel acknowledges nothing for so long is gone, though it never said so: neither engine nor client
holds its connection for longer. One that is merely slow acknowledges."""
FULL = "%d connections are open, as many as may be: idle ones of clients without a token are closed, or else new ones"
"""The log line; `kvscout_http_refused_total` and `kvscout_rpc_refused_total` count them."""


class FailureKind(StrEnum):
    """Kind of a failure below HTTP."""

    UNREACHABLE = "unreachable"
    """There is no connection: refused, no such name, no valid certificate, too slow."""
    BROKEN = "broken"
    """The connection was lost before the answer was whole."""
    PROTOCOL = "protocol"
    """The answer is not valid, or larger than is taken."""
    RESOURCES = "resources"
    """This process has no descriptors or no memory left."""


class HttpFailed(Exception):
    """There is no answer, or not all of it."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind


class HttpRefused(Exception):
    """A request that cannot be taken, with the status and text of its answer; the server sends it if nobody else
    does."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class SinkGone(NobodyWaits):
    """The receiver of the bytes is gone."""


class SinkStalled(Exception):
    """The receiver of the bytes takes none."""


class Form(Enum):
    """Form in which an engine's body is passed on."""

    BYTES = "bytes"
    """Unchanged, byte for byte."""
    WITHOUT_USAGE = "without usage"
    """The same but for the event that carries nothing but usage, which the client has not requested."""
    MESSAGES = "messages"
    """`GenerateResponse` messages; what comes together is one message."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """Request to an engine."""

    url: str
    """Absolute, http or https."""
    method: str = "POST"
    headers: Headers = ()
    body: bytes = b""


@dataclass(slots=True)
class StreamReport:
    """Observations of a pump until now; times are the loop's, 0 = not yet. Of a body without events only `passed`,
    `done` and `listening_since` are known."""

    events: int = 0
    """Server-sent events that carry a document."""
    outputs: int = 0
    """Events with a token, text, reasoning or a call of a tool."""
    tokens: int = 0
    """Token ids in them; one for each output that has none."""
    prompt_tokens: int | None = None
    """Tokens of the prompt, as last reported; None = not reported."""
    cached_tokens: int | None = None
    output_tokens: int = 0
    finish: str = ""
    """The last finish reason."""
    answer_id: str = ""
    """Name of the answer; "" = it has none, or one of over `MAX_ID_CHARACTERS`."""
    error: bytes = b""
    """Error that the engine reports inside the stream, in JSON. It was passed on if something had been before it, and
    if the form has a place for it; otherwise the stream ends with it."""
    done: bool = False
    """The stream said that it is done; a body without events: it came to its end. False behind a relay that raised
    nothing: the engine broke its stream off, if it is one that says when it is done."""
    overrun: bool = False
    """The engine went on past the end of what was requested, which was left out; the stream is done all the same."""
    first_output_at: float = 0.0
    last_output_at: float = 0.0
    progress_at: float = 0.0
    """When something last brought the end nearer: output, finish or usage. Empty events come without end, too."""
    listening_since: float = 0.0
    """Since when the engine's output is read; infinity while the sink takes nothing, and the engine has to wait."""
    passed: int = 0
    """Bytes given to the sink."""

    @property
    def usage(self) -> Usage | None:
        """Return the usage reported until now; None = nothing of the prompt."""
        if self.prompt_tokens is None:
            return None
        return Usage(self.prompt_tokens, self.cached_tokens, self.output_tokens)


class Sink(Protocol):
    """Takes what a pump moves."""

    async def write(self, data: bytes) -> None:
        """Take some bytes, or one message; return when it can take more.

        Raises:
            SinkGone: Nobody is there to take it.
        """


class PrefixedSink:
    """A sink with bytes of its own, which go out before the first that is passed on, and in the same chunk: messages
    behind one another are one message. They stay here if nothing is passed on.

    Args:
        sink: Where to.
        first: These.
    """

    __slots__ = ("first", "sink")

    def __init__(self, sink: Sink, first: bytes) -> None:
        self.sink = sink
        self.first = first

    async def write(self, data: bytes) -> None:
        """See `Sink`."""
        first, self.first = self.first, b""
        await self.sink.write(first + data)


class HttpAnswer(Protocol):
    """An engine's answer whose head has come; whoever has it reads all of it or aborts it."""

    status: int
    headers: Headers

    @property
    def report(self) -> StreamReport:
        """Return the report of its relay, also while that runs: as of now."""

    async def read(self, limit: int) -> bytes:
        """Return all of the body.

        Raises:
            HttpFailed: It broke, or is longer than that.
        """

    def chunks(self) -> AsyncIterator[bytes]:
        """Return the body as it comes; leaving early aborts it. Raises as `read`."""

    async def relay(
        self,
        sink: Sink,
        form: Form,
        dialect: Dialect,
        *,
        on_first_output: Callable[[], None] | None = None,
        max_tokens: int | None = None,
        write_seconds: float = 60.0,
    ) -> StreamReport:
        """Move the whole body; while the sink takes nothing, nothing is read.

        As long as an event stream has said nothing (comments, chunks without content) nothing of it is passed on: who
        has it relayed can still turn to another engine. With an error as its first word it ends, nothing passed.

        Args:
            sink: Where to; its client gone, or this cancelled, the engine's connection is closed immediately.
            form: What becomes of it.
            dialect: Of its events.
            on_first_output: Called when output begins.
            max_tokens: Tokens at which the output ends, whatever the engine sends; None = the engine knows when.
            write_seconds: Longest wait for the sink.

        Raises:
            HttpFailed: The engine's body broke off, or was no stream of events.
            SinkGone: The sink's client has gone.
            SinkStalled: It took nothing for `write_seconds`.
        """

    def abort(self) -> None:
        """Close the connection immediately, unless the body is over; who waits for the body gets BROKEN."""


class HttpClient(Protocol):
    """Asks engines; connections are used again."""

    async def send(self, request: HttpRequest, *, connect_seconds: float) -> HttpAnswer:
        """Send a request and wait for the head of its answer, as long as the caller does: cancel it to abort it.

        Args:
            request: What to send.
            connect_seconds: Longest wait for a connection, its name's resolution included.

        Raises:
            HttpFailed: There is no answer.
        """

    async def close(self) -> None:
        """Close every connection."""


class Charge(Protocol):
    """Share of a budget that one request holds until it is released or collected."""

    @property
    def bytes(self) -> int:
        """Return the bytes charged now."""

    def grow(self, bytes: int, /) -> tuple[int, str] | None:
        """Charge for bytes that came; the HTTP status and text of a refusal if there is no room for them."""

    def look(self, bytes: int, /) -> tuple[int, str] | None:
        """Check the same and charge nothing: for bytes that are to come."""

    def release(self) -> None:
        """Release all of it."""


class HttpCall(Sink, Protocol):
    """One request of a client of ours; it begins when its head has come."""

    method: str
    path: str
    """As it came, without the query."""
    query: str
    """Behind the question mark; "" = there is none."""
    headers: Headers
    peer: str
    """The client's address."""
    answer_headers: Headers
    """Go with every answer, beside its own; empty until somebody sets them."""
    ends_with_answer: bool
    """True: all that is written is an engine's answer, and may be ended with it where it is done and has reported no
    error. False until somebody sets it."""

    async def body(self, charge: Charge | None = None) -> bytes:
        """Return all of the body, for who asks first: it is not kept here.

        Args:
            charge: Grows with what comes; whoever has the body keeps it for as long. None = nothing is charged.

        Raises:
            HttpRefused: It is too long, comes too slowly, or there is no room for it.
            SinkGone: The client has gone before its end.
        """

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer with a body, also instead of what was started, as long as nothing of that was written."""

    async def start(self, status: int, headers: Headers) -> None:
        """Begin an answer whose body is written in chunks; its head leaves with the first one, or the end."""

    def trust(self) -> None:
        """Mark the client as known: its connection is not closed to make room for others."""

    async def end(self) -> None:
        """End what was started. A handler that returns or raises without it breaks the connection off."""


HttpHandler: TypeAlias = Callable[[HttpCall], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of what clients may cost."""

    connections: int = 10_000
    """Open at once. Above, idle ones of clients without a token are closed, first those that have sent no request, of
    them the longest idle; if there is none, the new one is."""
    header_bytes: int = 32 * 1024
    """Bytes of a request's head, its line included."""
    headers: int = 128
    body_bytes: int = 64 * 1024 * 1024
    idle_seconds: float = 60.0
    """From the connection, or the end of an answer, to the end of a request's head."""
    body_seconds: float = 60.0
    """For a whole body."""
    body_window_seconds: float = 10.0
    """In each of these periods `body_window_bytes` of a body have to come."""
    body_window_bytes: int = 10 * 1024
    write_seconds: float = 60.0
    """Longest wait for a client that reads nothing."""


class HttpServer(Protocol):
    """Runs a handler in a task for each request that comes; cancels it when the client goes.

    A client that has sent all and closed its side only is still there. It looks like one that has gone until something
    is sent to it; so it is sent an interim answer, `100 Continue`, which a client that has gone answers with a reset.
    """

    async def listen(self, host: str, port: int, pem: Pem | None = None) -> int:
        """Bind an address; return the port.

        Raises:
            ConfigError: The certificates cannot be used.
            OSError: It cannot be bound.
        """

    def renew(self, pem: Pem) -> None:
        """Use other certificates for new connections."""

    async def stop(self, grace: float) -> None:
        """Accept no connection, wait these seconds for what runs, then close what is left. Requests that come in
        the first moments, on connections that are open, are served as the last of theirs."""

    def stats(self) -> dict[str, int]:
        """`connections` open now; `connections_refused` and `connections_evicted`, idle ones, since it began."""
