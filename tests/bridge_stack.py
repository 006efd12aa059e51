"""A real bridge process between a scripted engine and a real NATS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import nats
from event_listener import Listener, listening
from nats_server import NatsServer, nats_server
from processes import Running, eventually, start
from recorded_engine import RecordedEngine, recorded_engine

from kvscout.v1 import bridge_pb2, bridge_pb2_grpc, types_pb2
from kvscout_blocks.incarnation import Record
from kvscout_common.channel import call, open_channel
from kvscout_common.nats_names import NatsNames
from kvscout_common.worker import WorkerSpec

SPEC = WorkerSpec("engine.0", "org/model:1", 4)
NAMES = NatsNames("test")


@dataclass(slots=True)
class Stack:
    """An engine, NATS, and bridges that come and go."""

    nats: NatsServer
    engine: RecordedEngine
    transport: str
    payloads: list[bytes] = field(default_factory=list)
    """What the engine published in this life."""
    bridge: Running | None = None

    async def start_bridge(self, *flags: str) -> Running:
        """Starts the bridge."""
        replay = ("--replay-endpoint", self.engine.replay_endpoint) if self.engine.replay_endpoint else ()
        self.bridge = await start(
            "kvscout_bridge.main", "--nats-server", self.nats.url, "--namespace", "test",
            "--worker-id", SPEC.worker_id, "--model", SPEC.model, "--block-size", str(SPEC.block_size),
            "--event-endpoint", self.engine.endpoint, *replay, "--transport", self.transport, *flags,
        )  # fmt: skip
        return self.bridge

    async def kill_bridge(self) -> None:
        """kill -9."""
        assert self.bridge is not None
        self.bridge.process.kill()
        await self.bridge.process.wait()

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

    async def status(self) -> bridge_pb2.BridgeStatus:
        """What the bridge says of itself."""
        assert self.bridge is not None
        channel = open_channel(self.bridge.address)
        try:
            status: bridge_pb2.BridgeStatus = await call(
                bridge_pb2_grpc.BridgeStub(channel).GetStatus, types_pb2.GetStatusRequest(), timeout=10
            )
        finally:
            await channel.close()
        return status

    async def source(self) -> bridge_pb2.BridgeSource:
        """What it says of its only rank."""
        (source,) = (await self.status()).sources
        return source

    async def on_record(self) -> Record | None:
        """What is kept of its only rank in NATS, once that names a batch."""
        async with await nats.connect(self.nats.url) as client:
            bucket = await client.jetstream().key_value(NAMES.bridges_bucket)
            entry = await bucket.get(NAMES.bridge_key(SPEC.tenant, SPEC.ranks[0]))
        record = Record.decode(entry.value or b"")
        return record if record is not None and record.event_id is not None else None

    async def confirmed(self, event_id: int) -> bridge_pb2.BridgeSource:
        """Waits until NATS has everything up to a batch."""

        async def there() -> bridge_pb2.BridgeSource | None:
            source = await self.source()
            done = source.HasField("last_event_id") and source.last_event_id == event_id
            return source if done and not source.buffered_batches else None

        found: bridge_pb2.BridgeSource = await eventually(there, what=f"event {event_id} at NATS")
        return found

    def listening(self) -> AbstractAsyncContextManager[Listener]:
        """A listener; see `event_listener.listening`."""
        return listening(self.nats.url, NAMES, SPEC, stream=self.transport == "jetstream")


@asynccontextmanager
async def stacked(transport: str, *flags: str, has_replay: bool = True) -> AsyncIterator[tuple[Stack, Listener]]:
    """Engine, NATS, bridge and listener for the length of a block."""
    async with nats_server() as server, recorded_engine(has_replay=has_replay) as engine:
        stack = Stack(server, engine, transport)
        await stack.start_bridge(*flags)
        try:
            await engine.subscribed()
            await eventually(lambda: _connected(stack), what="a connected bridge")
            async with listening(server.url, NAMES, SPEC, stream=transport == "jetstream") as listener:
                yield stack, listener
        finally:
            if stack.bridge is not None and stack.bridge.process.returncode is None:
                assert await stack.bridge.stop() == 0


async def _connected(stack: Stack) -> bool:
    source = await stack.source()
    return source.epoch > 0
