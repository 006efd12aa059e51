"""Requests to a gateway at a fixed rate, whether it keeps up or not: what `kvscout bench gateway` sends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self

import grpc

from kvscout.v1 import gateway_pb2, scheduler_pb2
from kvscout_bench.gateway_engines import GAP_FIELD, MODEL
from kvscout_bench.peer import DriverFailed
from kvscout_common.errors import KvscoutError
from kvscout_common.http.factory import connect
from kvscout_common.http.http import HttpFailed, HttpRequest

PROMPTS = 64
CALL_SECONDS = 20.0
_SERVICE = "/kvscout.v1.Gateway/"
_EVENTS = (("content-type", "application/json"),)

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


async def at_rate(send: Send, *, per_second: float, seconds: float, first: int = 0) -> Sent:
    """Send requests at a rate; return when all are over.

    Args:
        send: Sends one request.
        per_second: Rate of requests, equally far apart.
        seconds: Time in which requests begin.
        first: Number of the first one.

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

    try:
        async with asyncio.TaskGroup() as running:
            for number in range(int(per_second * seconds)):
                due = begun + number / per_second
                if (wait := due - clock()) > 0:
                    await asyncio.sleep(wait)
                running.create_task(one(number, due))
                sent.requests += 1
    except* (grpc.aio.AioRpcError, HttpFailed, KvscoutError, OSError) as failed:
        raise DriverFailed(f"a request failed: {failed.exceptions[0]!r}") from failed
    return sent


class GrpcClient:
    """Calls a gateway over gRPC, in bytes that were made before.

    Args:
        address: Address of the gateway.
        tokens: Tokens of each prompt.
        seed: Same seed, same prompts.
    """

    def __init__(self, address: str, *, tokens: int, seed: int) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        made = [random_tokens(tokens, seed + number) for number in range(PROMPTS)]
        self._routes = [gateway_pb2.RouteRequest(model=MODEL, token_ids=one).SerializeToString() for one in made]
        self._generates = [gateway_pb2.GenerateRequest(model=MODEL, token_ids=one).SerializeToString() for one in made]
        self._name = f"bench-{time.monotonic_ns()}"

    async def __aenter__(self) -> Self:
        await self._channel.channel_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def route(self, number: int) -> None:
        """Query the worker of a prompt."""
        await self._unary("Route", self._routes[number % PROMPTS])

    async def life(self, number: int) -> None:
        """Book a request, report its first token, free it."""
        ref = scheduler_pb2.RequestRef(model=MODEL, request_id=f"{self._name}-{number}", attempt_id=1)
        # Messages in a row are one message.
        named = gateway_pb2.RouteRequest(request_id=ref.request_id, attempt_id=1).SerializeToString()
        await self._unary("Route", self._routes[number % PROMPTS] + named)
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
            async for message in method(self._generates[number % PROMPTS] + suffix, timeout=seconds):
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


class CompletionClient:
    """Asks for OpenAI completions over HTTP.

    Args:
        address: Whom.
        tokens: Tokens of each prompt.
        seed: Same seed, same prompts.
        as_text: Prompts are words, for servers that take no token ids.
    """

    def __init__(self, address: str, *, tokens: int, seed: int, as_text: bool) -> None:
        self._url = f"http://{address}/v1/completions"
        self._prompts: list[Any] = [random_tokens(tokens, seed + number) for number in range(PROMPTS)]
        if as_text:
            self._prompts = [" ".join(map(str, prompt)) for prompt in self._prompts]
        self._client = connect()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    def complete(self, chunks: int, gap_ms: float | None = None) -> Send:
        """Return what runs a request with `chunks` chunks of output, `gap_ms` apart; None = the engine's default."""
        fields: dict[str, Any] = {"model": MODEL, "max_tokens": chunks, "stream": True}
        if gap_ms is not None:
            fields[GAP_FIELD] = gap_ms
        bodies = [json.dumps({**fields, "prompt": prompt}).encode() for prompt in self._prompts]
        clock = time.perf_counter

        async def send(number: int) -> float | None:
            request = HttpRequest(self._url, headers=_EVENTS, body=bodies[number % PROMPTS])
            answer = await self._client.send(request, connect_seconds=CALL_SECONDS)
            parts: list[bytes] = []
            began = None
            async for part in answer.chunks():
                began = began or clock()
                parts.append(part)
            body = b"".join(parts)
            if answer.status != 200 or b"[DONE]" not in body or body.count(b"data: {") < chunks:
                raise DriverFailed(f"no {chunks} events came but status {answer.status}: {body[:200]!r}")
            return began

        return send


def random_tokens(count: int, seed: int) -> Sequence[int]:
    """Return token ids below 2^15."""
    return Random(seed).choices(range(1 << 15), k=count)
