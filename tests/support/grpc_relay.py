"""A relay in front of a real scheduler: passes calls on, counts them, and holds their answers on request.

Operations of a Lifecycle stream are counted and held one by one, under the name of the unary rpc that does
the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvscout.v1 import scheduler_pb2

RPCS = {
    "select": "Select",
    "select_and_reserve": "SelectAndReserve",
    "reserve": "Reserve",
    "prefill_complete": "MarkPrefillComplete",
    "add_output": "AddOutput",
    "free": "Free",
    "renew": "Renew",
}


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
        """Hold the answers to an rpc back; the service has carried it out by then."""
        self._gates[rpc] = asyncio.Event()

    def release(self, rpc: str) -> None:
        """Release the answers to an rpc."""
        self._gates.pop(rpc).set()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return a handler for any unary rpc, and for Lifecycle."""
        method: str = details.method
        name = method.rpartition("/")[2]
        if name == "Lifecycle":
            return grpc.stream_stream_rpc_method_handler(self._lifecycle)
        onward: Any = self._channel.unary_unary(method)

        async def relay(request: bytes, context: Any) -> bytes:
            self.calls[name] += 1
            self.requests.append((name, request))
            # Not bound to this call: the service carries it out even if the caller goes away.
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

    async def _lifecycle(self, requests: AsyncIterator[bytes], context: Any) -> None:
        onward: Any = self._channel.stream_stream("/kvscout.v1.Scheduler/Lifecycle")()
        self.calls["Lifecycle"] += 1
        names: dict[int, str] = {}
        answering: set[asyncio.Task[None]] = set()

        async def forward() -> None:
            async for raw in requests:
                message = scheduler_pb2.LifecycleRequest.FromString(raw)
                for operation in message.operations:
                    kind = operation.WhichOneof("operation")
                    assert kind is not None
                    names[operation.id] = name = RPCS[kind]
                    self.calls[name] += 1
                    self.requests.append((name, getattr(operation, kind).SerializeToString()))
                await onward.write(raw)
            await onward.done_writing()

        async def later(gate: asyncio.Event, result: scheduler_pb2.LifecycleResult) -> None:
            await gate.wait()
            await context.write(scheduler_pb2.LifecycleResponse(results=[result]).SerializeToString())

        forwarding = asyncio.create_task(forward())
        try:
            async for raw in onward:
                response = scheduler_pb2.LifecycleResponse.FromString(raw)
                results = list(response.results)
                del response.results[:]
                for result in results:
                    gate = self._gates.get(names.pop(result.id))
                    if gate is None:
                        response.results.append(result)
                    else:
                        answering.add(asyncio.create_task(later(gate, result)))
                await context.write(response.SerializeToString())
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())
        finally:
            onward.cancel()
            for task in (forwarding, *answering):
                task.cancel()
            await asyncio.gather(forwarding, *answering, return_exceptions=True)

    @staticmethod
    async def _finish(onward: Any, request: bytes) -> bytes:
        answer: bytes = await onward(request)
        return answer


@asynccontextmanager
async def relaying(address: str) -> AsyncIterator[Relay]:
    """Relay calls to the service at an address."""
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
