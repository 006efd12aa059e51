"""A publisher of one rank's events, and what it knows to be true: what a bridge would send, without the bridge.

::

    engine payload ─▶ ScriptedPublisher (index, ring of batches) ─▶ message ─▶ a channel that may lose or repeat it
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import nats

from kvscout.v1 import bridge_pb2_grpc, events_pb2, indexer_pb2, indexer_pb2_grpc
from kvscout_blocks.bytes.codec import DumpReader, encode_events
from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_blocks.bytes.messages import parse_batch
from kvscout_blocks.bytes.wire import decode_batch
from kvscout_blocks.index.backend import make_index
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.publish.history import PublishedHistory
from kvscout_blocks.source.recovery import serve_recovery
from kvscout_common.errors import KvscoutError
from kvscout_common.nats.config import DEFAULT_NAMESPACE, NatsConfig
from kvscout_common.nats.names import NatsNames
from kvscout_common.registry.registry import Source
from kvscout_common.rpc.channel import to_error
from kvscout_common.rpc.guard import Guard
from kvscout_common.worker import DEFAULT_TENANT, PoolKey, Transport, WorkerRank, WorkerSpec
from kvscout_indexer.config import IndexerConfig
from kvscout_indexer.indexer import Indexer
from kvscout_indexer.rpc.servicer import IndexerServicer
from support.engine_events import BLOCK_SIZE, CLEARED, batch, removed, stored
from support.grpc_server import serving
from support.indexer_client import MODEL, IndexerClient, local_indexer
from support.processes import DEADLINE_SECONDS

NAMES = NatsNames(DEFAULT_NAMESPACE)


class ScriptedPublisher:
    """Turns engine payloads into messages, and keeps what recovery needs.

    Args:
        worker_id: Whose events it publishes.
        dp_rank: Of which rank.
        block_size: Of its blocks.
        epoch: First incarnation; 0 = it has none.
        ring: Batches that a recovery can have.
        adapters: LoRA number → name.
    """

    def __init__(
        self,
        worker_id: str = "w",
        dp_rank: int = 0,
        *,
        block_size: int = BLOCK_SIZE,
        epoch: int = 1,
        ring: int = 1024,
        adapters: dict[int, str] | None = None,
    ) -> None:
        self.rank = WorkerRank(worker_id, dp_rank)
        self.pool = PoolKey(MODEL, DEFAULT_TENANT, block_size, False)
        self.epoch = epoch
        self.next_id = 0
        self.index = make_index(block_size)
        self.index.add_worker(self.rank, WorkerOptions())
        self.local = PublishedHistory(
            self.rank, self.pool, self.index, history_incomplete=lambda: False, max_batches=ring
        )
        self.local.restart(epoch)
        self._adapters = adapters or {}

    @property
    def last_id(self) -> int:
        """Of the newest batch; -1 = none."""
        return self.next_id - 1

    def make(self, payload: bytes) -> bytes:
        """The message of the next batch."""
        content = decode_batch(payload)
        message = encode_events(
            self.pool, self._adapters, self.rank, content, epoch=self.epoch, event_id=self.next_id
        ).SerializeToString()
        published = self.index.decode_message(message)
        self.index.apply(self.rank, published.batch, epoch=self.epoch, event_id=self.next_id)
        self.local.add(self.next_id, message)
        self.next_id += 1
        return message

    def restart(self) -> None:
        """The engine starts anew, in its next incarnation."""
        self.index.reset(self.rank)
        self.epoch += 1
        self.next_id = 0
        self.local.restart(self.epoch)

    async def again(self, first_id: int) -> Sequence[bytes]:
        """What can be sent again from an event on: batches, or the state."""
        return (await self.local.recover(first_id, None)).messages

    def truth(self) -> WorkerDump:
        """What a reader must know, incarnation aside."""
        dump = self.index.dump(self.rank)
        assert dump is not None
        return replace(dump, epoch=0)


class Life:
    """Random events of an engine: blocks stored below one another, removed, sometimes all cleared."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._held: dict[int, int | None] = {}
        self._next_hash = 1

    def payload(self) -> bytes:
        """The next batch."""
        rng = self._rng
        events: list[dict[str, Any]] = []
        for _ in range(rng.randint(1, 3)):
            kind = rng.random()
            if kind < 0.7 or not self._held:
                parent = rng.choice([None, *self._held]) if self._held else None
                number = rng.randint(1, 4)
                hashes = list(range(self._next_hash, self._next_hash + number))
                self._next_hash += number
                tokens = [rng.randrange(1000) for _ in range(number * BLOCK_SIZE)]
                events.append(stored(hashes, tokens, parent=parent))
                self._held.update(dict.fromkeys(hashes))
            elif kind < 0.99:
                gone = rng.sample(list(self._held), min(len(self._held), rng.randint(1, 5)))
                for number in gone:
                    del self._held[number]
                events.append(removed(gone))
            else:
                events.append(CLEARED)
                self._held.clear()
        return batch(*events)


class FaultyChannel:
    """Loses and repeats what goes through it, by a seed that the test prints."""

    def __init__(self, rng: random.Random, *, loss: float = 0.05, repeats: float = 0.05) -> None:
        self._rng = rng
        self.loss = loss
        self.repeats = repeats
        self.lost = 0

    def through(self, message: bytes) -> list[bytes]:
        """What arrives of a message."""
        if self._rng.random() < self.loss:
            self.lost += 1
            return []
        return [message] * (2 if self._rng.random() < self.repeats else 1)


class CorePublisher:
    """A publisher on NATS core; made by `core_publisher`."""

    def __init__(self, client: Any, publisher: ScriptedPublisher, channel: FaultyChannel | None) -> None:
        self.client = client
        self.publisher = publisher
        self.recovery: Any = None
        self._channel = channel
        self.subject = NAMES.core_events(DEFAULT_TENANT, MODEL, publisher.rank)

    async def publish(self, *payloads: bytes) -> None:
        """Publishes batches; whether they arrive is the channel's."""
        for payload in payloads:
            message = self.publisher.make(payload)
            for arriving in self._channel.through(message) if self._channel else [message]:
                await self.client.publish(self.subject, arriving)

    def lose(self, *payloads: bytes) -> None:
        """Batches that are lost on the way."""
        for payload in payloads:
            self.publisher.make(payload)

    async def serve(self) -> None:
        """Answers recovery requests from now on."""
        subject = NAMES.recover(DEFAULT_TENANT, self.publisher.rank)
        self.recovery = await serve_recovery(self.client, subject, self.publisher.local.answer)
        await self.client.flush()


@asynccontextmanager
async def core_publisher(
    url: str, publisher: ScriptedPublisher, *, channel: FaultyChannel | None = None, recovers: bool = True
) -> AsyncIterator[CorePublisher]:
    """A publisher that is connected to NATS, with or without a local index that answers."""
    client = await nats.connect(url, reconnect_time_wait=0.1, max_reconnect_attempts=-1, error_cb=_ignore)
    core = CorePublisher(client, publisher, channel)
    try:
        if recovers:
            await core.serve()
        yield core
    finally:
        if core.recovery is not None:
            await core.recovery.close()
        await client.close()


async def _ignore(error: Exception) -> None:
    """Connections that end are what these tests are about."""


async def dumped(stub: Any, worker_id: str = "w", dp_rank: int = 0) -> WorkerDump:
    """What an indexer knows of a rank, incarnation aside."""
    reader = DumpReader()
    done = None
    async for message in stub.Dump(indexer_pb2.DumpRequest(worker_id=worker_id, dp_rank=dp_rank)):
        done = reader.feed(message)
    assert done is not None
    return replace(done.dump, epoch=0)


def read_dump(messages: Sequence[bytes]) -> WorkerDump:
    """A dump from its serialised messages, incarnation aside."""
    reader = DumpReader()
    done = None
    for message in messages:
        done = reader.feed(parse_batch(message))
    assert done is not None
    return replace(done.dump, epoch=0)


@asynccontextmanager
async def served_indexer(
    config: IndexerConfig | None = None,
) -> AsyncIterator[tuple[IndexerClient, Indexer, indexer_pb2_grpc.IndexerStub]]:
    """An indexer on the running loop behind a real gRPC server."""
    async with local_indexer(config) as (client, indexer):
        raw = IndexerServicer(indexer, indexer.queries)
        async with serving(raw.add_to) as channel:
            yield client, indexer, indexer_pb2_grpc.IndexerStub(channel)


@asynccontextmanager
async def address_of(indexer: Indexer) -> AsyncIterator[str]:
    """Where other processes could call an indexer of this loop."""
    server = grpc.aio.server(interceptors=(Guard(),))
    IndexerServicer(indexer, indexer.queries).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def greeting(publisher: ScriptedPublisher, **fields: Any) -> events_pb2.KvEventBatch:
    """A message that only names the source."""
    header: dict[str, Any] = {
        "version": 1, "worker_id": publisher.rank.worker_id, "dp_rank": publisher.rank.dp_rank, "model": MODEL,
        "block_size": publisher.pool.block_size, "epoch": publisher.epoch,
    }  # fmt: skip
    return events_pb2.KvEventBatch(**{**header, **fields})


class Pushing:
    """One stream of `PublishEvents`."""

    def __init__(self, stub: indexer_pb2_grpc.IndexerStub, publisher: ScriptedPublisher | None = None) -> None:
        publish: Any = stub.PublishEvents
        self.call = publish()
        self.answers: list[indexer_pb2.PublishEventsResponse] = []
        self.error: KvscoutError | None = None
        self._publisher = publisher
        self._sending = asyncio.Lock()
        self._came = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for answer in self.call:
                self.answers.append(answer)
                self._came.set()
                if self._publisher is not None and answer.HasField("resend_from"):
                    async with self._sending:
                        await self._write(*await self._publisher.again(answer.resend_from), greeting(self._publisher))
        except grpc.aio.AioRpcError as error:
            self.error = to_error(error)
        self._came.set()

    async def _write(self, *messages: bytes | events_pb2.KvEventBatch) -> None:
        for message in messages:
            await self.call.write(parse_batch(message) if isinstance(message, bytes) else message)

    async def send(self, *messages: bytes | events_pb2.KvEventBatch) -> None:
        """Sends messages, one after the other."""
        async with self._sending:
            await self._write(*messages)

    async def answer(
        self, reached: Callable[[indexer_pb2.PublishEventsResponse], bool]
    ) -> indexer_pb2.PublishEventsResponse:
        """Waits for an answer that meets a condition."""
        return (await self._those(reached, times=1))[0]

    async def asked(self, resend_from: int, *, times: int = 1) -> None:
        """Waits until it has been asked so often to go back to an event."""
        await self._those(lambda a: a.HasField("resend_from") and a.resend_from == resend_from, times=times)

    async def _those(
        self, reached: Callable[[indexer_pb2.PublishEventsResponse], bool], *, times: int
    ) -> list[indexer_pb2.PublishEventsResponse]:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(those := [answer for answer in self.answers if reached(answer)]) < times:
                assert self.error is None, self.error
                self._came.clear()
                await self._came.wait()
        return those

    async def ended(self) -> KvscoutError | None:
        """Waits for the end of the stream; returns why."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self._reading
        return self.error

    async def finish(self) -> KvscoutError | None:
        """Ends it in order."""
        await self.call.done_writing()
        return await self.ended()

    async def close(self) -> None:
        """Breaks it off."""
        self.call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@asynccontextmanager
async def pushing(stub: indexer_pb2_grpc.IndexerStub, publisher: ScriptedPublisher) -> AsyncIterator[Pushing]:
    """A stream that sends again what it is asked for."""
    stream = Pushing(stub, publisher)
    try:
        yield stream
    finally:
        await stream.close()


def nats_config(url: str, **fields: Any) -> IndexerConfig:
    """An indexer that uses NATS."""
    return IndexerConfig(nats=NatsConfig((url,)), **fields)


@asynccontextmanager
async def bridge_at(servicer: bridge_pb2_grpc.BridgeServicer) -> AsyncIterator[str]:
    """The address of a bridge's rpcs."""
    server = grpc.aio.server(interceptors=(Guard(),))
    bridge_pb2_grpc.add_BridgeServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def follow(
    indexer: Indexer, transport: Transport, *, worker_id: str = "w", block_size: int = BLOCK_SIZE, **fields: Any
) -> WorkerSpec:
    """Has an indexer follow a worker, as if its file named it: nothing but the indexer itself is needed."""
    spec = WorkerSpec(worker_id, MODEL, block_size, transport=transport, **fields).validate()
    indexer.registry.register(spec, source=Source.FILE)
    return spec


def forget(indexer: Indexer, worker_id: str = "w") -> None:
    """Ends it."""
    indexer.registry.remove(DEFAULT_TENANT, worker_id, source=Source.FILE)
