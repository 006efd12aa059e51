"""Clients of a gateway's fronts: each asks for one generation and tells how it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, Protocol

import aiohttp
import grpc

from kvscout.v1 import gateway_pb2, gateway_pb2_grpc
from kvscout_common.rpc.channel import open_channel
from kvscout_gateway.values.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES, ApiDialect

MODEL, BLOCK_SIZE = "mock", 16
CALL_SECONDS = 30.0
ENDS = {
    COMPLETIONS: (b"data: [DONE]",),
    CHAT: (b"data: [DONE]",),
    MESSAGES: (b'"message_stop"',),
    RESPONSES: (b"event: response.completed", b"event: response.incomplete"),
}
"""What the last event of a whole stream has in it."""
TAIL_BYTES = 16 * 1024
"""Last bytes of an answer, at least as many as its last event has."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, as one client makes it up."""

    prompt: list[int]
    max_tokens: int
    streams: bool
    cancelled_after: int
    """Pieces of the answer; 0 = it is read to its end."""
    model: str = MODEL
    api: ApiDialect = COMPLETIONS
    """Dialect in which it is asked for over HTTP."""

    @classmethod
    def drawn(cls, rng: Random, model: str = MODEL) -> Wanted:
        """One that shares its beginning with others more often than not."""
        topic = rng.randrange(8)
        prompt = [topic * 10_000 + position for position in range(rng.randint(1, 40) * BLOCK_SIZE)]
        prompt += [rng.randrange(100_000, 900_000) for _ in range(rng.randint(1, 64))]
        cancelled_after = rng.randint(1, 5) if rng.random() < 0.1 else 0
        api = rng.choice((COMPLETIONS, *ENDS))
        return cls(prompt, rng.randint(1, 30), rng.random() < 0.7, cancelled_after, model, api)

    @property
    def body(self) -> dict[str, Any]:
        """For the path of its dialect; where that takes no token ids, a text of as many words."""
        prompt: Any = self.prompt
        if self.api is not COMPLETIONS:
            text = " ".join(map(str, self.prompt))
            prompt = [{"role": "user", "content": text}] if self.api.prompt == "messages" else text
        limit = {self.api.limits[-1]: self.max_tokens}
        return {"model": self.model, self.api.prompt: prompt, "stream": self.streams, **limit}


class Ending(NamedTuple):
    """How a request ended."""

    outcome: str
    """"whole", "cancelled" or "failed"."""
    begun: bool = True
    """Whether the client had a part of the answer."""
    why: str = ""


class Front(Protocol):
    """One way in."""

    name: str
    through: str
    """The service that its requests cannot do without."""

    async def ask(self, wanted: Wanted) -> Ending:
        """Runs one request to its end."""
        ...

    async def close(self) -> None:
        """Closes its connections."""
        ...


class GrpcFront:
    """Generate."""

    def __init__(self, through: str, address: str) -> None:
        self.name, self.through = f"{through} grpc", through
        self._channel = open_channel(address)
        self._stub: Any = gateway_pb2_grpc.GatewayStub(self._channel)

    async def ask(self, wanted: Wanted) -> Ending:
        """See `Front`."""
        request = gateway_pb2.GenerateRequest(
            model=wanted.model,
            token_ids=wanted.prompt,
            stop_conditions=gateway_pb2.StopConditions(max_tokens=wanted.max_tokens),
        )
        running, chunks = self._stub.Generate(request, timeout=CALL_SECONDS, wait_for_ready=True), 0
        try:
            async for message in running:
                chunks += bool(message.token_ids)
                if wanted.cancelled_after and chunks >= wanted.cancelled_after:
                    running.cancel()
                    return Ending("cancelled")
        except grpc.aio.AioRpcError as error:
            return Ending("failed", chunks > 0, f"{error.code().name}: {error.details()}")
        return Ending("whole")

    async def close(self) -> None:
        """See `Front`."""
        await self._channel.close()


class HttpFront:
    """The paths of all dialects, of a gateway or of a proxy."""

    def __init__(self, name: str, through: str, url: str, *, begins_with_headers: bool) -> None:
        """A client with connections of its own.

        Args:
            name: For the report.
            through: As in `Front`.
            url: Without the path.
            begins_with_headers: A proxy passes an engine's headers on as they come, and can take nothing back then.
        """
        self.name, self.through = name, through
        self._url = url
        self._begins_with_headers = begins_with_headers
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(CALL_SECONDS))

    async def ask(self, wanted: Wanted) -> Ending:
        """See `Front`."""
        begun, tail, chunks = False, b"", 0
        try:
            async with self._http.post(self._url + wanted.api.path, json=wanted.body) as response:
                if response.status != 200:
                    return Ending("failed", False, f"{response.status}: {await response.text()}")
                begun = self._begins_with_headers
                async for chunk in response.content.iter_any():
                    begun, tail, chunks = True, tail + chunk, chunks + 1
                    if wanted.streams:
                        tail = tail[-TAIL_BYTES:]
                    if wanted.cancelled_after and chunks >= wanted.cancelled_after:
                        response.close()
                        return Ending("cancelled")
        except (aiohttp.ClientError, TimeoutError) as error:
            return Ending("failed", begun, repr(error))
        if wanted.streams:
            is_whole = any(end in tail for end in ENDS[wanted.api])
        else:
            is_whole = wanted.api.answer.usage(json.loads(tail)) is not None
        return Ending("whole") if is_whole else Ending("failed", begun, tail[-200:].decode(errors="replace"))

    async def close(self) -> None:
        """See `Front`."""
        await self._http.close()
