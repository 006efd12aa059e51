"""Requests to a gateway at a fixed rate, whether it keeps up or not: what `kvscout bench gateway` sends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self, cast

import grpc

from kvscout.v1 import gateway_pb2, scheduler_pb2
from kvscout_bench.gateway_engines import GAP_FIELD, LENGTH_FIELD, MODEL
from kvscout_bench.gateway_prompts import TOKENS, Prompts, token_ids
from kvscout_bench.strangers import DriverFailed
from kvscout_common.errors import KvscoutError

CALL_SECONDS = 20.0
_SERVICE = "/kvscout.v1.Gateway/"
_OK, _END = b"HTTP/1.1 200 ", b"\r\n0\r\n\r\n"

TIMER_SECONDS = 0.0015
"""By so much a timer of an event loop may be late: that is not what is measured."""

Send = Callable[[int], Awaitable[float | None]]
"""Sends request number n and returns when it is over; gives when its first output came, by `time.perf_counter`."""


@dataclass(slots=True)
class Sent:
    """Result of a run."""

    requests: int = 0
    seconds: list[float] = field(default_factory=list)
    """Duration of each request, from when it was due."""
    first_seconds: list[float] = field(default_factory=list)
    """Time to the first output of each request."""
    late: int = 0
    """Requests whose first output took longer than allowed."""


async def at_rate(
    send: Send, *, per_second: float, seconds: float, first: int = 0, give_up: float = float("inf")
) -> Sent:
    """Send requests at a rate; return when all are over.

    Args:
        send: Sends one request.
        per_second: Rate of requests, equally far apart.
        seconds: Time in which requests begin.
        first: Number of the first one.
        give_up: Longest time to a first output: no request begins after one in a hundred has taken longer.

    Raises:
        DriverFailed: A request failed.
    """
    # An event loop's own clock may be one of milliseconds.
    clock = time.perf_counter
    sent, begun = Sent(), clock()

    async def one(number: int, due: float) -> None:
        now = clock()
        since = now if now - due < TIMER_SECONDS else due
        began = await send(first + number)
        sent.seconds.append(clock() - since)
        if began is not None:
            sent.first_seconds.append(began - since)
            sent.late += began - since > give_up

    try:
        async with asyncio.TaskGroup() as running:
            for number in range(count := int(per_second * seconds)):
                if sent.late * 100 > count:
                    break
                due = begun + number / per_second
                if (wait := due - clock()) > 0:
                    await asyncio.sleep(wait)
                running.create_task(one(number, due))
                sent.requests += 1
    except* (grpc.aio.AioRpcError, KvscoutError, OSError) as failed:
        raise DriverFailed(f"a request failed: {failed.exceptions[0]!r}") from failed
    return sent


class GrpcClient:
    """Calls a gateway over gRPC, in bytes that were made before.

    Args:
        address: Address of the gateway.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._routes = [gateway_pb2.RouteRequest(model=MODEL, token_ids=one).SerializeToString() for one in token_ids()]
        self._generates = [
            gateway_pb2.GenerateRequest(model=MODEL, token_ids=one).SerializeToString() for one in token_ids()
        ]
        self._name = f"bench-{time.monotonic_ns()}"

    async def __aenter__(self) -> Self:
        await self._channel.channel_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def route(self, number: int) -> None:
        """Query the worker of a prompt."""
        await self._unary("Route", self._routes[number % len(self._routes)])

    async def life(self, number: int) -> None:
        """Book a request, report its first token, free it."""
        ref = scheduler_pb2.RequestRef(model=MODEL, request_id=f"{self._name}-{number}", attempt_id=1)
        # Messages in a row are one message.
        named = gateway_pb2.RouteRequest(request_id=ref.request_id, attempt_id=1).SerializeToString()
        await self._unary("Route", self._routes[number % len(self._routes)] + named)
        await self._unary("MarkPrefillComplete", ref.SerializeToString())
        await self._unary("Free", ref.SerializeToString())

    def generate(self, chunks: int, gap_ms: float | None = None) -> Send:
        """Return what runs a request with `chunks` chunks of output, `gap_ms` apart; None = the engine's default."""
        limits = gateway_pb2.GenerateRequest(stop_conditions=gateway_pb2.StopConditions(max_tokens=chunks))
        if gap_ms is not None:
            limits.engine_fields = json.dumps({GAP_FIELD: gap_ms})
        seconds = CALL_SECONDS + chunks * (gap_ms or 0.0) / 1e3
        suffix, clock = limits.SerializeToString(), time.perf_counter

        async def send(number: int) -> float | None:
            method: Any = self._channel.unary_stream(f"{_SERVICE}Generate")
            tokens, began = 0, None
            async for message in method(self._generates[number % len(self._routes)] + suffix, timeout=seconds):
                tokens += len(gateway_pb2.GenerateResponse.FromString(message).token_ids)
                if began is None and tokens:
                    began = clock()
            if tokens != chunks:
                raise DriverFailed(f"{tokens} tokens came of {chunks}")
            return began

        return send

    async def _unary(self, method: str, request: bytes) -> None:
        call: Any = self._channel.unary_unary(_SERVICE + method)
        await call(request, timeout=CALL_SECONDS)


class _Connection(asyncio.Protocol):
    """One connection of a `CompletionClient`: a request at a time, whose answer is read to its end.

    Bytes are only collected while an answer comes: on two cores, what a client computes is missing where it measures.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer = bytearray()
        self._ended: asyncio.Future[bytearray] | None = None
        self._began: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(DriverFailed(f"the connection broke in an answer: {bytes(self._answer[:200])!r}"))

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if self._began is None and b"data: " in self._answer:
            self._began = time.perf_counter()
        over = self._answer.endswith(_END) or not self._answer.startswith(_OK)
        if over and self._ended is not None and not self._ended.done():
            self._ended.set_result(self._answer)

    async def send(self, request: bytes) -> tuple[bytearray, float | None]:
        """Send a request; return its answer, and when its first output came."""
        self._answer.clear()
        self._began, self._ended = None, asyncio.get_running_loop().create_future()
        if self._transport is None:
            raise DriverFailed("the connection is closed")
        self._transport.write(request)
        return await self._ended, self._began

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


class CompletionClient:
    """Asks for OpenAI completions over HTTP.

    Args:
        address: Whom.
        prompts: Makes the prompt of a request.
        prompt_tokens: Their length, as the engine is to report it.
    """

    def __init__(self, address: str, prompts: Prompts, *, prompt_tokens: int = TOKENS) -> None:
        self._address = address
        self._prompts, self._prompt_tokens = prompts, prompt_tokens
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()

    def complete(self, chunks: int, gap_ms: float | None = None) -> Send:
        """Return what runs a request with `chunks` chunks of output, `gap_ms` apart; None = the engine's default."""
        fields = {"model": MODEL, "max_tokens": chunks, "stream": True, LENGTH_FIELD: self._prompt_tokens}
        if gap_ms is not None:
            fields[GAP_FIELD] = gap_ms
        fixed = json.dumps(fields).encode()[:-1]
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._address}\r\ncontent-type: application/json\r\n".encode()

        async def send(number: int) -> float | None:
            connection = self._idle.pop() if self._idle else await self._connect()
            body = b'%s, "prompt": %s}' % (fixed, self._prompts(number))
            answer, began = await connection.send(b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body))
            if not answer.startswith(_OK) or b"[DONE]" not in answer or answer.count(b"data: {") < chunks:
                raise DriverFailed(f"no {chunks} events came but {answer[:400]!r}")
            self._idle.append(connection)
            return began

        return send

    async def _connect(self) -> _Connection:
        host, _, port = self._address.rpartition(":")
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, int(port))
        return connection
