"""A bridge between a scripted engine and a real NATS: within the test's process, or as one of its own to be killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import nats

from kvscout.v1 import bridge_pb2, bridge_pb2_grpc, types_pb2
from kvscout_blocks.publish.incarnation import Record
from kvscout_bridge.bridge import Bridge
from kvscout_bridge.config import BridgeConfig
from kvscout_bridge.servicer import BridgeServicer
from kvscout_common.nats.config import NatsConfig
from kvscout_common.nats.names import NatsNames
from kvscout_common.rpc.channel import call, open_channel
from kvscout_common.worker import EventEndpoint, Transport, WorkerSpec
from support.event_listener import Listener, listening
from support.nats_server import NatsServer, nats_server
from support.processes import Running, eventually, start
from support.recorded_engine import RecordedEngine, recorded_engine

SPEC = WorkerSpec("engine.0", "org/model:1", 4)
NAMES = NatsNames("test")


class AnyBridge(Protocol):
    """A running bridge."""

    async def status(self) -> bridge_pb2.BridgeGetStatusResponse:
        """What it says of itself."""

    async def stop(self) -> None:
        """Ends it as SIGTERM does."""


class BridgeHere:
    """A bridge in this process."""

    def __init__(self, config: BridgeConfig) -> None:
        self.bridge = Bridge(config)
        self._tasks = [asyncio.create_task(make(), name=name) for name, make in self.bridge.tasks().items()]

    async def status(self) -> bridge_pb2.BridgeGetStatusResponse:
        failed = [task for task in self._tasks if task.done()]
        for task in failed:
            task.result()
        return await BridgeServicer(self.bridge).GetStatus(types_pb2.GetStatusRequest(), None)

    async def stop(self) -> None:
        async with asyncio.timeout(30):
            await self.bridge.drain()
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bridge.close()
        assert all(isinstance(error, asyncio.CancelledError) for error in ended), ended


@dataclass(slots=True)
class BridgeProcess:
    """A bridge in a process of its own."""

    running: Running

    async def status(self) -> bridge_pb2.BridgeGetStatusResponse:
        channel = open_channel(self.running.address)
        try:
            stub = bridge_pb2_grpc.BridgeStub(channel)
            status: bridge_pb2.BridgeGetStatusResponse = await call(
                stub.GetStatus, types_pb2.GetStatusRequest(), timeout=10
            )
        finally:
            await channel.close()
        return status

    async def stop(self) -> None:
        assert await self.running.stop() == 0

    async def kill(self) -> None:
        """kill -9."""
        self.running.process.kill()
        await self.running.process.wait()


@dataclass(slots=True)
class Stack:
    """An engine, NATS, and bridges that come and go."""

    nats: NatsServer
    engine: RecordedEngine
    transport: str
    payloads: list[bytes] = field(default_factory=list)
    """What the engine published in this life."""
    bridge: AnyBridge | None = None

    def start_bridge(self, *, max_buffered_bytes: int = 1 << 26, local_indexer: bool = True) -> None:
        """Starts a bridge here."""
        endpoint = EventEndpoint(0, self.engine.endpoint, self.engine.replay_endpoint)
        self.bridge = BridgeHere(
            BridgeConfig(
                nats=NatsConfig((self.nats.url,), "test"),
                worker=replace(SPEC, event_endpoints=(endpoint,)),
                transport=Transport(self.transport),
                max_buffered_bytes=max_buffered_bytes,
                local_indexer=local_indexer,
                lease_seconds=1,
            )
        )

    async def start_process(self, *flags: str) -> BridgeProcess:
        """Starts a bridge as a process."""
        running = await start(
            "kvscout_bridge.main", "--nats-server", self.nats.url, "--namespace", "test",
            "--worker-id", SPEC.worker_id, "--model", SPEC.model, "--block-size", str(SPEC.block_size),
            "--event-endpoint", self.engine.endpoint, "--replay-endpoint", self.engine.replay_endpoint,
            "--transport", self.transport, *flags,
        )  # fmt: skip
        self.bridge = process = BridgeProcess(running)
        return process

    async def publish(self, *payloads: bytes) -> None:
        """The engine publishes."""
        self.payloads.extend(payloads)
        await self.engine.publish(*payloads)

    async def restart_engine(self, *payloads: bytes) -> None:
        """The engine lives anew and has published something before anybody is connected again."""
        await self.engine.stop()
        self.engine.forget()
        self.payloads = list(payloads)
        self.engine.lose(*payloads)
        await self.engine.start()

    async def source(self) -> bridge_pb2.BridgeSource:
        """What the bridge says of its only rank."""
        assert self.bridge is not None
        (source,) = (await self.bridge.status()).sources
        return source

    async def connected(self) -> None:
        """Waits until the engine's incarnation is known and on its way."""

        async def begun() -> bool:
            return (await self.source()).epoch > 0

        await eventually(begun, what="a connected bridge")

    async def confirmed(self, event_id: int) -> bridge_pb2.BridgeSource:
        """Waits until NATS has everything up to a batch."""

        async def there() -> bridge_pb2.BridgeSource | None:
            source = await self.source()
            done = source.HasField("last_event_id") and source.last_event_id == event_id
            return source if done and not source.buffered_batches else None

        found: bridge_pb2.BridgeSource = await eventually(there, what=f"event {event_id} at NATS")
        return found

    async def recorded(self) -> Record:
        """Waits until what is kept of the only rank in NATS names a batch."""

        async def named() -> Record | None:
            async with await nats.connect(self.nats.url) as client:
                bucket = await client.jetstream().key_value(NAMES.bridges_bucket)
                entry = await bucket.get(NAMES.bridge_key(SPEC.tenant, SPEC.ranks[0]))
            record = Record.decode(entry.value or b"")
            return record if record is not None and record.event_id is not None else None

        found: Record = await eventually(named, what="a record in NATS")
        return found

    def listening(self) -> AbstractAsyncContextManager[Listener]:
        """A listener; see `event_listener.listening`."""
        return listening(self.nats.url, NAMES, SPEC, stream=self.transport == "jetstream")


@asynccontextmanager
async def stacked(
    transport: str,
    *,
    process: bool = False,
    has_replay: bool = True,
    max_buffered_bytes: int = 1 << 26,
    local_indexer: bool = True,
    jetstream: bool = True,
) -> AsyncIterator[tuple[Stack, Listener]]:
    """Engine, NATS, bridge and listener for the length of a block."""
    async with nats_server(jetstream=jetstream) as server, recorded_engine(has_replay=has_replay) as engine:
        stack = Stack(server, engine, transport)
        if process:
            await stack.start_process()
        else:
            stack.start_bridge(max_buffered_bytes=max_buffered_bytes, local_indexer=local_indexer)
        try:
            await engine.subscribed()
            await stack.connected()
            async with stack.listening() as listener:
                yield stack, listener
        finally:
            if stack.bridge is not None:
                await stack.bridge.stop()
