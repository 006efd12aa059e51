"""One rank's events as an indexer would follow them over NATS, and what the engine's own bytes would have led to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Hashable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

import nats
import nats.aio.client
import nats.aio.msg
import nats.errors

from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_blocks.bytes.events import DecodedBatch
from kvscout_blocks.bytes.wire import decode_batch
from kvscout_blocks.index.backend import make_index
from kvscout_blocks.index.block_index import BlockIndex, WorkerOptions
from kvscout_blocks.source.decisions import SequencedBatch
from kvscout_blocks.source.feed import HistoryBroken, SourceInput, SourceState
from kvscout_blocks.source.published import PublishedReader
from kvscout_blocks.source.recovery import recover, recover_request
from kvscout_blocks.source.source import Source
from kvscout_common.nats.barrier import NatsBarrier
from kvscout_common.nats.link import end_if_cancelled
from kvscout_common.nats.names import NatsNames
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.worker import WorkerRank, WorkerSpec
from support.processes import eventually

LOG = logging.getLogger("tests.listener")


class Listener:
    """A feed of one rank over NATS, and the source and index behind it."""

    def __init__(self, client: nats.aio.client.Client, names: NatsNames, spec: WorkerSpec, *, stream: bool) -> None:
        self.rank = spec.ranks[0]
        self.index: BlockIndex = make_index(spec.block_size, spec.eagle)
        self.index.add_worker(self.rank, WorkerOptions.of(spec))
        self.events: list[tuple[int, int]] = []
        """(epoch, event id) of every batch that came live."""
        self.states: list[SourceState] = []
        """Every state that came live."""
        self.largest = 0
        """Bytes of the largest message that came."""
        self.address: Hashable = "listener"
        self.broken = ""
        self.can_replay = not stream
        self.rewinds = False
        self.outage = ""
        self._client = client
        self._names = names
        self._spec = spec
        self._reader = PublishedReader(self.index, self.rank, spec.pool)
        self._input: SourceInput | None = None
        self.source = Source(
            spec, self.rank, self, self.index,
            recoveries=asyncio.Semaphore(1), clock=time.monotonic, ttl_seconds=60.0,
            warnings=RateLimitedLog(LOG), incomplete=lambda incomplete: None, failed=self._failed,
        )  # fmt: skip

    def open(self, source: SourceInput) -> None:
        self._input = source

    def close(self) -> None:
        self._input = None

    def tick(self, now: float) -> None:
        pass

    async def history(self, first_id: int) -> AsyncGenerator[SequencedBatch[DecodedBatch] | SourceState, None]:
        reader = PublishedReader(self.index, self.rank, self._spec.pool)
        subject = self._names.recover(self._spec.tenant, self.rank)
        async for part in recover(
            self._client, subject, recover_request(self._spec.tenant, self.rank, first_id or None)
        ):
            item = reader.read(part.batch.SerializeToString()) if part.HasField("batch") else None
            if item is not None:
                yield item
        if reader.amid_state:
            raise HistoryBroken("broke off")

    async def on_message(self, message: nats.aio.msg.Msg) -> None:
        """A message came on the subject."""
        self.receive(message.data)

    def receive(self, data: bytes) -> None:
        """A message came."""
        self.largest = max(self.largest, len(data))
        item = self._reader.read(data)
        assert self._input is not None
        if isinstance(item, SourceState):
            self.states.append(item)
            self._input.on_state(item)
        elif item is not None:
            self.events.append((item.epoch, item.event_id))
            self._input.on_batch(item)

    def reconnected(self) -> None:
        """The connection was made again."""
        assert self._input is not None
        self._input.on_reconnect()

    @property
    def epoch(self) -> int:
        return self.source.sequence.epoch

    @property
    def incomplete(self) -> bool:
        return self.source.sequence.history_incomplete

    def dump(self) -> WorkerDump:
        """What it holds, without the epoch."""
        dump = self.index.dump(self.rank)
        assert dump is not None
        return replace(dump, epoch=0)

    async def reaches(self, payloads: Iterable[bytes]) -> None:
        """Waits until it holds what an engine's payloads, from its first on, lead to."""
        truth = truth_of(self._spec, payloads)

        async def equal() -> bool:
            self.source.tick()
            return not self.source.sequence.replaying and self.dump() == truth

        try:
            await eventually(equal, what="the engine's truth")
        except AssertionError as error:
            sequence = self.source.sequence
            raise AssertionError(f"{error}: at {sequence.epoch}.{sequence.last_id}, {sequence.counters}") from error

    def _failed(self, error: BaseException) -> None:
        raise error


def truth_of(spec: WorkerSpec, payloads: Iterable[bytes]) -> WorkerDump:
    """What an engine's own payloads lead to."""
    rank: WorkerRank = spec.ranks[0]
    index = make_index(spec.block_size, spec.eagle)
    index.add_worker(rank, WorkerOptions.of(spec))
    for event_id, payload in enumerate(payloads):
        index.apply(rank, decode_batch(payload), epoch=0, event_id=event_id)
    dump = index.dump(rank)
    assert dump is not None
    return dump


@asynccontextmanager
async def listening(url: str, names: NatsNames, spec: WorkerSpec, *, stream: bool) -> AsyncIterator[Listener]:
    """A listener for the length of a block; a stream is read from its beginning."""

    async def on_reconnected() -> None:
        if not stream:
            listener.reconnected()

    client = await nats.connect(
        url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, reconnected_cb=on_reconnected, error_cb=_quiet
    )
    listener = Listener(client, names, spec, stream=stream)
    listener.source.open()
    reading: asyncio.Task[None] | None = None
    if stream:
        reading = asyncio.create_task(_read_stream(client, names.stream(spec.tenant, spec.model), listener))
    else:
        await client.subscribe(names.core_events(spec.tenant, spec.model, listener.rank), cb=listener.on_message)
        barrier = NatsBarrier(client)
        await barrier.wait(barrier.generation, seconds=10)
        listener.reconnected()
    try:
        yield listener
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        task = listener.source.close()
        if task is not None:
            await task
        await client.close()


async def _read_stream(client: nats.aio.client.Client, stream: str, listener: Listener) -> None:
    """Reads a stream message by message from its first on, whatever becomes of the server."""
    js = client.jetstream(timeout=0.5)
    sequence = 1
    while True:
        end_if_cancelled()
        try:
            message = await js.get_msg(stream, sequence)
        except (nats.errors.Error, TimeoutError):
            await asyncio.sleep(0.02)
            continue
        listener.receive(message.data or b"")
        sequence += 1


async def _quiet(error: Exception) -> None:
    LOG.debug("NATS: %r", error)
