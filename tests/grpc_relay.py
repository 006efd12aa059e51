"""A relay in front of a real service: passes unary calls on, counts them, and holds them when it is told to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc


class Relay(grpc.GenericRpcHandler):
    """One relay; `address` is where to call it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.address = ""
        self.calls: Counter[str] = Counter()
        """Calls that came, by the rpc's name."""
        self.requests: list[tuple[str, bytes]] = []
        self._gates: dict[str, asyncio.Event] = {}

    def hold(self, rpc: str) -> None:
        """Keeps the answers to an rpc back; the service has done what was asked by then."""
        self._gates[rpc] = asyncio.Event()

    def release(self, rpc: str) -> None:
        """Lets them go."""
        self._gates.pop(rpc).set()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler for any unary rpc."""
        method: str = details.method
        name = method.rpartition("/")[2]
        onward: Any = self._channel.unary_unary(method)

        async def relay(request: bytes, context: Any) -> bytes:
            self.calls[name] += 1
            self.requests.append((name, request))
            # Not bound to this call: what the service was asked it does, even if the caller goes away.
            call = asyncio.ensure_future(self._finish(onward, request))
            try:
                answer = await asyncio.shield(call)
            except grpc.aio.AioRpcError as error:
                trailers = tuple(error.trailing_metadata() or ())
                await context.abort(error.code(), error.details(), trailing_metadata=trailers)
            gate = self._gates.get(name)
            if gate is not None:
                await gate.wait()
            return answer

        return grpc.unary_unary_rpc_method_handler(relay)

    @staticmethod
    async def _finish(onward: Any, request: bytes) -> bytes:
        answer: bytes = await onward(request)
        return answer


@asynccontextmanager
async def relaying(address: str) -> AsyncIterator[Relay]:
    """A relay to the service at an address."""
    channel = grpc.aio.insecure_channel(address)
    relay = Relay(channel)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((relay,))
    relay.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield relay
    finally:
        await server.stop(None)
        await channel.close()
