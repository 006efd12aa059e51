"""Status and metrics of many ranks: read in slices, and nothing is taken from those who read events meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from support.cpu_cost import cpu_ratio
from support.engine_events import batch, chain, prompt, stored
from support.indexer_client import MODEL, IndexerClient, local_indexer
from support.processes import eventually
from support.recorded_engine import recorded_engine
from support.zmq_publisher import Publisher

from kvscout.v1 import indexer_pb2, types_pb2
from kvscout_blocks.bytes.events import EventBatch, Stored
from kvscout_blocks.index.block_index import BlockIndex, WorkerStats
from kvscout_blocks.source.decisions import SequencedBatch
from kvscout_blocks.source.source import Source
from kvscout_common.hashing import native_available
from kvscout_common.http.metrics_server import MetricsPage, registry_of
from kvscout_common.observability.rank_series import PAUSE, RANKS_A_COLUMN
from kvscout_common.worker import ALL_TENANTS, EventEndpoint, Transport, WorkerRank, WorkerSpec
from kvscout_indexer import indexer as indexer_module
from kvscout_indexer.indexer import SOURCES_A_SLICE, Indexer
from kvscout_indexer.rpc.metrics import IndexerCollector
from kvscout_indexer.rpc.servicer import IndexerServicer
from kvscout_indexer.rpc.status import RANKS_A_SLICE

RANKS = 2 * RANKS_A_COLUMN


@pytest.fixture
async def fleet() -> AsyncIterator[tuple[IndexerClient, Indexer]]:
    """An indexer with many ranks whose publishers have not come yet."""
    async with local_indexer() as (client, core):
        for number in range(RANKS // 8):
            spec = WorkerSpec(f"w-{number}", MODEL, 16, dp_size=8, transport=Transport.GRPC)
            core.registry.register(spec)
        yield client, core


async def test_a_scrape_reads_a_few_ranks_between_two_turns_of_the_loop(
    fleet: tuple[IndexerClient, Indexer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, core = fleet
    read: Counter[int] = Counter()
    pauses = 0
    seen = Source.observed

    def counted(source: Source) -> object:
        read[pauses] += 1
        return seen.fget(source)  # type: ignore[attr-defined]  # a property

    monkeypatch.setattr(Source, "observed", property(counted))
    families = []
    for family in IndexerCollector(core).collect():
        families.append(family)
        pauses += family is PAUSE
    assert read.total() == RANKS
    assert max(read.values()) <= RANKS_A_SLICE
    live = next(family for family in families if family.name == "kvscout_source_live")
    assert [sample.value for sample in live.samples] == [0.0] * RANKS


async def test_others_go_on_while_a_page_or_the_status_of_many_ranks_is_made(
    fleet: tuple[IndexerClient, Indexer],
) -> None:
    _, core = fleet
    servicer, page = IndexerServicer(core, None), MetricsPage(registry_of(IndexerCollector(core)), 64)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(count())
    status = await servicer.GetStatus(types_pb2.GetStatusRequest(), None)
    assert len(status.sources) == RANKS
    assert turns >= RANKS // RANKS_A_SLICE
    turns = 0
    await page._read()
    assert turns >= RANKS // RANKS_A_SLICE
    others.cancel()


async def test_a_worker_that_goes_while_status_is_read_is_left_out(fleet: tuple[IndexerClient, Indexer]) -> None:
    _, core = fleet
    reading = asyncio.create_task(IndexerServicer(core, None).GetStatus(types_pb2.GetStatusRequest(), None))
    page = iter(IndexerCollector(core).collect())
    while next(page) is not PAUSE:
        pass
    await asyncio.sleep(0)
    for entry in core.registry.entries():
        core.registry.remove(entry.spec.tenant, entry.spec.worker_id)
    assert len((await reading).sources) <= RANKS_A_SLICE
    live = next(family for family in page if family.name == "kvscout_source_live")
    assert len(live.samples) <= RANKS_A_SLICE


@pytest.mark.skipif(not native_available(), reason="batches pass by Python where the extension is")
async def test_a_scrape_leaves_batches_to_the_native_path(monkeypatch: pytest.MonkeyPatch) -> None:
    in_python = 0
    on_batch = Source.on_batch

    def counted(source: Source, batch: object) -> None:
        nonlocal in_python
        in_python += 1
        on_batch(source, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Source, "on_batch", counted)
    async with local_indexer() as (client, core), recorded_engine() as engine:
        await client.register(engine)
        await engine.subscribed()
        await client.until(lambda status: status.replays >= 1 and "wait" not in status.reason)
        batches = chain(9)
        await engine.publish(*batches[:3])
        await client.until_applied(2)
        before = in_python
        for number in range(3, 9):
            await engine.publish(batches[number])
            status = await client.until_applied(number)
            families = {family.name: family for family in IndexerCollector(core).collect()}
            applied = [s.value for s in families["kvscout_events"].samples if s.labels["kind"] == "applied"]
            assert (applied, status.applied) == ([number + 1.0], number + 1)
            assert [s.value < 60 for s in families["kvscout_event_age_seconds"].samples] == [True]
        assert in_python == before


async def test_blocks_and_state_are_not_older_than_the_batch_that_a_status_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with local_indexer() as (client, core), recorded_engine() as engine:
        await client.register(engine)
        await engine.subscribed()
        await client.until(lambda status: status.replays >= 1 and "wait" not in status.reason)
        [(spec, _, source)] = core.sources(ALL_TENANTS)
        index = core.pools.get(spec.pool)
        assert source is not None
        assert index is not None
        read, arriving = type(index).worker_stats, [0]

        def overtaken(self: BlockIndex, worker: WorkerRank) -> WorkerStats | None:
            """As where the native thread applies a batch between two reads of the event loop."""
            stats = read(self, worker)
            if arriving:
                event_id = arriving.pop()
                event = Stored((1,), local_hashes=(1,), block_size=spec.block_size)
                source.on_batch(SequencedBatch(event_id, 1, EventBatch((event,)), 10))
            return stats

        monkeypatch.setattr(type(index), "worker_stats", overtaken)
        status = await client.status()
        assert (status.HasField("last_event_id"), status.applied, status.blocks) == (False, 0, 0)
        assert status.state == indexer_pb2.SOURCE_STATE_WAITING
        status = await client.status()
        assert (status.last_event_id, status.applied, status.blocks) == (0, 1, 1)
        assert status.state == indexer_pb2.SOURCE_STATE_LIVE


async def test_a_tick_looks_at_some_sources_and_lets_others_go_on(
    fleet: tuple[IndexerClient, Indexer], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fleet
    ticked: Counter[int] = Counter()
    turns = 0
    monkeypatch.setattr(Source, "tick", lambda _: ticked.update([turns]))

    async def count() -> None:
        nonlocal turns
        while ticked.total() < RANKS:
            turns += 1
            await asyncio.sleep(0)

    await asyncio.wait_for(count(), timeout=30)
    assert max(ticked.values()) <= SOURCES_A_SLICE


async def test_a_tick_looks_at_no_more_sources_of_a_larger_fleet_and_at_each_in_its_turn(
    fleet: tuple[IndexerClient, Indexer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, core = fleet
    monkeypatch.setattr(indexer_module, "SOURCES_A_SLICE", 16)
    monkeypatch.setattr(indexer_module, "SOURCES_A_TICK", 64)
    ticked: Counter[Source] = Counter()
    monkeypatch.setattr(Source, "tick", lambda source: ticked.update([source]))
    for tick in range(1, RANKS // 64 + 1):
        await core._tick_all()
        assert ticked.total() == 64 * tick
    assert (len(ticked), max(ticked.values())) == (RANKS, 1)


@pytest.mark.skipif(not native_available(), reason="batches pass by Python where the extension is")
async def test_a_tick_costs_the_same_however_many_ranks_are_read_and_leaves_them_to_the_native_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(indexer_module, "SOURCES_A_SLICE", 16)
    monkeypatch.setattr(indexer_module, "SOURCES_A_TICK", 32)
    in_python = 0
    on_batch = Source.on_batch

    def counted(source: Source, batch: object) -> None:
        nonlocal in_python
        in_python += 1
        on_batch(source, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Source, "on_batch", counted)
    batches = [batch(stored([number], prompt(1, first=4 * number)), rank=None) for number in range(1, 4)]
    async with AsyncExitStack() as entered:
        works = []
        for ranks in (40, 400):
            _, core = await entered.enter_async_context(local_indexer())
            engine = Publisher()
            entered.callback(engine.close)
            # All ranks read what one engine publishes, a connection each.
            places = tuple(EventEndpoint(rank, engine.endpoint) for rank in range(ranks))
            core.registry.register(WorkerSpec("w", MODEL, 4, dp_size=ranks, event_endpoints=places))
            for _ in range(ranks):
                await asyncio.to_thread(engine.await_subscription)
            sources = [source for _, _, source in core.sources(ALL_TENANTS) if source is not None]

            def tick(core: Indexer = core) -> None:
                for _ in range(100):
                    deque(core._tick_all().__await__(), maxlen=0)

            for number, payload in enumerate(batches):
                engine.send_payloads(number, [payload])
                await eventually(lambda: [s.observed.applied for s in sources] == [number + 1] * ranks)  # noqa: B023  # called at once
                if number == 0:
                    assert in_python == ranks
                    in_python = 0
                tick()
            assert in_python == 0
            works.append(tick)
        assert cpu_ratio(*works) <= 2
