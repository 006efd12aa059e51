"""An engine that is served over gRPC: its stream of KV events, with the options and omissions of the real ones.

::

    publish ─▶ Relay of the rank ─▶ history ─▶ streams      what is kept of the past is sent when a stream begins

It may keep nothing, as the Python servicers do; all batches since the engine's start, as the Rust one does for a while;
or the engine's state, as the Rust one does from then on. It is as ready to end streams: with DATA_LOSS after a restart,
with OUT_OF_RANGE where a position is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum, auto
from typing import Any, NamedTuple

import grpc

from kvscout.smg import kv_events_pb2
from kvscout_mocker.engine.kv_stream import METHODS, SERVER_OPTIONS, Relay
from support.engine_events import batch


class Keeps(Enum):
    """What a server has of the past."""

    NOTHING = auto()
    BATCHES = auto()
    STATE = auto()


class End(NamedTuple):
    """Status that ends a stream."""

    code: grpc.StatusCode
    text: str


class SubscribedEngine(grpc.GenericRpcHandler):
    """See the module; `endpoint` is where it is served.

    Args:
        ranks: How many it has.
        keeps: What it sends when a stream begins.
    """

    def __init__(self, ranks: int = 1, keeps: Keeps = Keeps.NOTHING) -> None:
        self.endpoint = ""
        self.replay_endpoint = ""
        self.keeps = keeps
        self.refusal: End | None = None
        """Answer to every call."""
        self.silent = False
        """Calls are not answered, not even with headers."""
        self.unknown_before = 0
        self.calls: list[tuple[str, int]] = []
        """Method of each call, and the position that was asked for."""
        self.metadata: list[dict[str, str | bytes]] = []
        """What came with each call."""
        self._ranks = ranks
        self._streams: set[asyncio.Queue[bytes | End]] = set()
        self.restart()

    def restart(self) -> None:
        """Begin another life: all is forgotten, numbers begin with 0, and streams end."""
        self._relays = [Relay(rank) for rank in range(self._ranks)]
        self._history: list[list[kv_events_pb2.KvEventBatch]] = [[] for _ in range(self._ranks)]
        self.end(grpc.StatusCode.DATA_LOSS, "the publisher restarted its sequence")

    @property
    def streams(self) -> int:
        """Return the number of open streams."""
        return len(self._streams)

    def publish(self, *events: dict[str, Any], rank: int = 0) -> int:
        """Publish a batch; return its number."""
        return self.publish_payload(batch(*events, rank=rank), rank)

    def publish_payload(self, payload: bytes, rank: int = 0) -> int:
        """Publish a batch as the engine's bytes; return its number."""
        message = self.make(payload, rank)
        self.send(message)
        return message.sequence_number

    def make(self, payload: bytes, rank: int = 0) -> kv_events_pb2.KvEventBatch:
        """Take a batch into the history without sending it."""
        history = self._history[rank]
        message = self._relays[rank].message(len(history), payload)
        history.append(message)
        return message

    def send(self, *messages: kv_events_pb2.KvEventBatch | bytes) -> None:
        """Send messages as they are over every stream."""
        for message in messages:
            serialised = message if isinstance(message, bytes) else message.SerializeToString()
            for queue in self._streams:
                queue.put_nowait(serialised)

    def end(self, code: grpc.StatusCode, text: str = "") -> None:
        """End every stream."""
        for queue in self._streams:
            queue.put_nowait(End(code, text))
        self._streams.clear()

    def state(self, rank: int) -> list[kv_events_pb2.KvEventBatch]:
        """Return the chunks of a rank's state: what all its batches add up to, in the order in which it came."""
        cleared = kv_events_pb2.KvCacheEvent()
        cleared.cleared.SetInParent()
        events = [event for message in self._history[rank] for event in message.events]
        # Chunks have numbers of batches: there are no more of them.
        most = max(1, -(-len(events) // max(1, len(self._history[rank]))))
        parts = [events[at : at + most] for at in range(0, len(events), most)]
        last = len(self._history[rank]) - 1
        chunks = []
        for index, part in enumerate(parts):
            chunk = kv_events_pb2.KvEventBatch(sequence_number=last - len(parts) + 1 + index, dp_rank=rank)
            chunk.events.extend([cleared, *part] if index == 0 else part)
            chunk.snapshot.index, chunk.snapshot.count = index, len(parts)
            chunk.snapshot.unknown_before = self.unknown_before
            chunks.append(chunk)
        return chunks

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of the one rpc."""
        method: str = handler_call_details.method
        if method not in METHODS:
            return None

        async def subscribe(
            request: kv_events_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[bytes]:
            self.calls.append((method, request.start_sequence_number))
            self.metadata.append(dict(context.invocation_metadata() or ()))
            async for message in self._subscribe(request, context):
                yield message

        return grpc.unary_stream_rpc_method_handler(
            subscribe, request_deserializer=kv_events_pb2.SubscribeKvEventsRequest.FromString
        )

    async def _subscribe(
        self, request: kv_events_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        if self.refusal is not None:
            await context.abort(*self.refusal)
        if request.start_sequence_number:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "begin with 0")
        queue: asyncio.Queue[bytes | End] = asyncio.Queue()
        if self.keeps is not Keeps.NOTHING:
            for rank, history in enumerate(self._history):
                for message in history if self.keeps is Keeps.BATCHES else self.state(rank):
                    queue.put_nowait(message.SerializeToString())
        self._streams.add(queue)
        try:
            if self.silent:
                await asyncio.Event().wait()
            await context.send_initial_metadata(())
            while not isinstance(item := await queue.get(), End):
                yield item
        finally:
            self._streams.discard(queue)
        if item.code is not grpc.StatusCode.OK:
            await context.abort(*item)


@asynccontextmanager
async def subscribed_engine(
    engine: SubscribedEngine, *, port: int = 0, tls: grpc.ServerCredentials | None = None
) -> AsyncIterator[SubscribedEngine]:
    """Serve an engine; with the block its server ends."""
    server = grpc.aio.server(options=(*SERVER_OPTIONS, ("grpc.max_send_message_length", -1)))
    server.add_generic_rpc_handlers((engine,))
    address = f"127.0.0.1:{port}"
    bound = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
    await server.start()
    engine.endpoint = f"{'grpc' if tls is None else 'grpcs'}://127.0.0.1:{bound}"
    try:
        yield engine
    finally:
        await server.stop(None)
