"""A JetStream stream of events for tests: publishers of its sources, and what indexers say of them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import nats
from nats.aio.client import Client
from nats.js import JetStreamContext

from kvscout.v1 import events_pb2, indexer_pb2, workers_pb2
from kvscout_blocks.bytes.messages import VERSION
from kvscout_blocks.publish.event_stream import MSG_ID, ensure_stream, message_id
from kvscout_common.errors import KvscoutError, Unavailable
from kvscout_common.nats.config import NatsConfig
from kvscout_common.nats.names import NatsNames
from kvscout_common.worker import WorkerRank
from support.indexer_client import MODEL, IndexerClient
from support.nats_server import NatsServer, nats_server
from support.processes import DEADLINE_SECONDS

NAMESPACE = "test"
TENANT = "default"
BLOCK_SIZE = 4
NAMES = NatsNames(NAMESPACE)
STREAM = NAMES.stream(TENANT, MODEL)
BUCKET = NAMES.snapshots_bucket(TENANT, MODEL)


def stored(hashes: Sequence[int], parent: int | None = None) -> events_pb2.KvEvent:
    """Blocks whose local hashes are their engine hashes."""
    blocks = events_pb2.BlocksStored(engine_hashes=hashes, local_hashes=hashes, parent_engine_hash=parent)
    return events_pb2.KvEvent(stored=blocks)


def removed(hashes: Sequence[int]) -> events_pb2.KvEvent:
    """Blocks that are gone."""
    return events_pb2.KvEvent(removed=events_pb2.BlocksRemoved(engine_hashes=hashes))


CLEARED = events_pb2.KvEvent(cleared=events_pb2.CacheCleared())
RESET = events_pb2.KvEvent(reset=events_pb2.SourceReset())


def state_events(hashes: Sequence[int], *, chunks: int = 1) -> list[events_pb2.KvEvent]:
    """The chunks of a state with one chain of blocks."""
    size = -(-len(hashes) // chunks)
    events = []
    for index in range(chunks):
        part = hashes[index * size : (index + 1) * size]
        run = events_pb2.StateRun(local_hashes=part, engine_hashes=part)
        groups = [] if index else [events_pb2.CacheGroup(attention_kind=events_pb2.ATTENTION_KIND_FULL)]
        if index:
            run.parent_position = index * size - 1
        chunk = events_pb2.StateChunk(index=index, last=index == chunks - 1, groups=groups, runs=[run])
        events.append(events_pb2.KvEvent(state=chunk))
    return events


@dataclass
class Publisher:
    """What a bridge publishes of one worker rank."""

    js: JetStreamContext
    worker_id: str = "w"
    epoch: int = 1
    next_id: int = 0
    blocks: int = 0
    """Length of the chain that `grow` stored."""
    subject: str = field(init=False)

    def __post_init__(self) -> None:
        self.rank = WorkerRank(self.worker_id, 0)
        self.subject = NAMES.stream_events(TENANT, MODEL, self.rank)

    def message(self, *events: events_pb2.KvEvent, event_id: int | None = None) -> events_pb2.KvEventBatch:
        """A batch; its id is the next one unless told."""
        if event_id is None:
            event_id, self.next_id = self.next_id, self.next_id + 1
        return events_pb2.KvEventBatch(
            version=VERSION,
            worker_id=self.worker_id,
            model=MODEL,
            block_size=BLOCK_SIZE,
            epoch=self.epoch,
            event_id=event_id,
            events=events,
        )

    async def publish(self, *events: events_pb2.KvEvent) -> int:
        """Publishes a batch; returns its stream sequence."""
        event_id = self.next_id
        return await self.send(self.message(*events).SerializeToString(), event_id)

    async def send(self, data: bytes, event_id: int) -> int:
        """Publishes bytes as a batch's."""
        headers = {MSG_ID: message_id(self.rank, self.epoch, event_id)}
        return (await self.js.publish(self.subject, data, headers=headers)).seq

    async def state(self, hashes: Sequence[int], *, chunks: int = 1) -> list[bytes]:
        """The messages of a state with one chain of blocks, which contains everything published so far."""
        chunk_events = state_events(hashes, chunks=chunks)
        return [self.message(event, event_id=self.next_id - 1).SerializeToString() for event in chunk_events]

    async def publish_state(self, hashes: Sequence[int], *, chunks: int = 1) -> int:
        """Publishes that state; returns the last stream sequence."""
        sequence = 0
        for message in await self.state(hashes, chunks=chunks):
            sequence = (await self.js.publish(self.subject, message)).seq
        return sequence

    async def grow(self, blocks: int) -> int:
        """Stores the next blocks of the chain 1, 2, 3, ..., one a batch; returns the last stream sequence."""
        sequence = 0
        for _ in range(blocks):
            self.blocks += 1
            sequence = await self.publish(stored([self.blocks], self.blocks - 1 or None))
        return sequence


@dataclass
class World:
    """A NATS server with the stream, and a connection of the test's own."""

    server: NatsServer
    client: Client

    @property
    def js(self) -> JetStreamContext:
        """Its JetStream."""
        return self.client.jetstream()

    @property
    def config(self) -> NatsConfig:
        """How indexers connect."""
        return NatsConfig((self.server.url,), NAMESPACE)

    @property
    def flags(self) -> tuple[str, ...]:
        """The same on a command line."""
        return ("--nats-server", self.server.url, "--namespace", NAMESPACE)

    def publisher(self, worker_id: str = "w", **fields: Any) -> Publisher:
        """Publishes events of a worker."""
        return Publisher(self.js, worker_id, **fields)

    async def snapshots(self) -> list[int]:
        """S of every complete snapshot, in order."""
        prefix = f"$O.{BUCKET}.M."
        try:
            info = await self.js.stream_info(f"OBJ_{BUCKET}", subjects_filter=prefix + ">")
        except nats.js.errors.NotFoundError:
            return []
        names = [
            base64.urlsafe_b64decode(subject.removeprefix(prefix)).decode() for subject in info.state.subjects or ()
        ]
        return sorted(int(name.split("-")[1]) for name in names)

    async def first_sequence(self) -> int:
        """Of the stream's first message."""
        return (await self.js.stream_info(STREAM)).state.first_seq

    async def consumers(self) -> list[str]:
        """Names of the stream's consumers."""
        return [info.name for info in await self.js.consumers_info(STREAM)]


@asynccontextmanager
async def stream_world() -> AsyncIterator[World]:
    """A server of its own with an empty stream."""
    async with nats_server() as server:
        client = await nats.connect(server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=_quiet)
        await ensure_stream(client.jetstream(), NAMES, TENANT, MODEL)
        try:
            yield World(server, client)
        finally:
            await client.close()


async def _quiet(error: Exception) -> None:
    """Servers are killed here on purpose."""


async def register(client: IndexerClient, worker_id: str = "w", **fields: Any) -> None:
    """Registers a worker whose events come over JetStream, once the indexer is connected."""
    fields = {"block_size": BLOCK_SIZE, "transport": workers_pb2.EVENT_TRANSPORT_JETSTREAM, **fields}
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            try:
                await client.register(worker_id=worker_id, **fields)
                return
            except Unavailable:
                await asyncio.sleep(0.01)


async def unregister(client: IndexerClient, worker_id: str = "w") -> None:
    """Removes a worker."""
    await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id=worker_id))


async def overlap(client: IndexerClient, blocks: int, worker_id: str = "w") -> int:
    """How many blocks of the chain 1, 2, 3, ... a worker holds."""
    request = indexer_pb2.FindMatchesRequest(model=MODEL, block_hashes=range(1, blocks + 1))
    found = (await client.rpc("FindMatches", request)).overlaps
    held: dict[str, int] = dict(zip(found.worker_ids, found.device_blocks, strict=True))
    return held.get(worker_id, 0)


async def until_overlap(client: IndexerClient, blocks: int, worker_id: str = "w") -> None:
    """Waits until a worker holds exactly this number of blocks of the chain; one more is queried."""

    async def reached() -> int | None:
        try:
            return await overlap(client, blocks + 1, worker_id)
        except KvscoutError:  # the model is not known yet
            return None

    await until(reached, blocks)


async def until(read: Callable[[], Awaitable[Any]], expected: Any) -> None:
    """Waits until something has a value."""
    last: Any = None
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (last := await read()) != expected:
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"expected {expected!r}, it stays {last!r}") from None
