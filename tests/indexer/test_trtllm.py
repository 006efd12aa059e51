"""TensorRT-LLM's pushed events, from an engine with its queue, its sockets and its omissions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from support.engine_events import prompt
from support.free_ports import first_of_free_ports
from support.indexer_client import IndexerClient, local_indexer
from support.processes import eventually
from support.trtllm_engine import TrtllmEngine

from kvscout.v1 import indexer_pb2, workers_pb2

TRTLLM = workers_pb2.ENGINE_KIND_TRTLLM
LIVE = indexer_pb2.SOURCE_STATE_LIVE
INCOMPLETE = indexer_pb2.SOURCE_STATE_INCOMPLETE


@pytest.fixture(params=["intake", "loop"])
async def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[IndexerClient]:
    """An indexer whose sockets a native thread reads, or the event loop."""
    if request.param == "loop":
        monkeypatch.setattr("kvscout_blocks.source.zmq_reader.make_intake", lambda **_: None)
    async with local_indexer() as (started, _):
        yield started


@pytest.fixture
def engines() -> Iterator[list[TrtllmEngine]]:
    """Engines to be closed."""
    started: list[TrtllmEngine] = []
    yield started
    for engine in started:
        engine.close()


def start(engines: list[TrtllmEngine], ranks: int = 1, **options: int) -> list[TrtllmEngine]:
    """Start the ranks of an engine."""
    base = first_of_free_ports(2 * ranks)
    begun = [TrtllmEngine(base, rank, replay_offset=ranks, **options) for rank in range(ranks)]
    engines += begun
    return begun


async def sent(engine: TrtllmEngine) -> bool:
    """Return whether nothing waits to be published."""
    return not engine.waiting


async def test_each_rank_is_read_at_its_own_port(client: IndexerClient, engines: list[TrtllmEngine]) -> None:
    first, second = start(engines, ranks=2)
    await client.register(first, second, engine=TRTLLM)
    first.store(prompt(4))
    second.store(prompt(6))
    for engine in (first, second):
        engine.flush()
    await client.until_applied(0, dp_rank=0)
    await client.until_applied(0, dp_rank=1)
    assert await client.overlaps(prompt(8)) == {("w", 0): 4, ("w", 1): 6}


async def test_evicted_blocks_go_and_come_again_once_each(client: IndexerClient, engines: list[TrtllmEngine]) -> None:
    (engine,) = start(engines)
    await client.register(engine, engine=TRTLLM)
    hashes = engine.store(prompt(4))
    engine.flush()
    engine.store(prompt(4))  # nothing new: nothing is announced
    engine.flush()
    engine.evict(*hashes[2:])
    engine.flush()
    await client.until_applied(1)
    assert await client.overlap(prompt(4)) == 2
    engine.store(prompt(4))
    engine.flush()
    assert (await client.until_applied(2)).blocks == 4
    assert await client.overlap(prompt(4)) == 4


async def test_a_batch_that_its_queue_dropped_is_lost_with_the_first_replay(
    client: IndexerClient, engines: list[TrtllmEngine]
) -> None:
    (engine,) = start(engines, max_queue_size=2)
    await client.register(engine, engine=TRTLLM)
    for blocks in (1, 2):
        engine.store(prompt(blocks))
        engine.flush()
    await client.until_applied(1)
    engine.running.clear()
    while not engine.dropped:
        engine.store(prompt(1, first=1000 + 100 * engine.waiting))
        engine.flush()
    engine.running.set()
    # The next batch shows the hole; the engine's answer to the request for it is that it is not there.
    await client.until(lambda s: s.last_event_id >= 2)
    await eventually(lambda: sent(engine), what="an empty queue")
    engine.store(prompt(3))
    engine.flush()
    status = await client.until(lambda s: s.state == INCOMPLETE)
    assert status.reason.startswith("events are missing: ")
    assert (status.demotions, status.gaps) == (1, 1)
    # On connecting, and for the hole: no round was in vain.
    assert status.replays <= 3
    matches = await client.matches(prompt(3))
    assert matches.lower_bound


async def test_what_a_full_queue_dropped_before_anybody_read_is_lost_too(
    client: IndexerClient, engines: list[TrtllmEngine]
) -> None:
    (engine,) = start(engines, max_queue_size=2)
    engine.store(prompt(1))
    engine.flush()
    engine.running.clear()
    while not engine.dropped:
        engine.store(prompt(1, first=1000 + 100 * engine.waiting))
        engine.flush()
    engine.running.set()
    await eventually(lambda: sent(engine), what="an empty queue")
    engine.store(prompt(2))
    engine.flush()
    await client.register(engine, engine=TRTLLM)
    status = await client.until(lambda s: s.state == INCOMPLETE)
    assert status.demotions == 1
    assert status.replays <= 3


async def test_a_restarted_engine_begins_anew(client: IndexerClient, engines: list[TrtllmEngine]) -> None:
    (engine,) = start(engines)
    await client.register(engine, engine=TRTLLM)
    engine.store(prompt(5))
    engine.flush()
    await client.until_applied(0)
    engines.remove(engine)
    engine.close()
    port = int(engine.endpoint.rpartition(":")[2])
    again = TrtllmEngine(port, replay_offset=1)
    engines.append(again)
    again.store(prompt(2, first=100))
    again.flush()
    await client.until(lambda s: s.resets == 1 and s.blocks == 2)
    assert await client.overlap(prompt(5)) == 0
    assert await client.overlap(prompt(2, first=100)) == 2


async def test_blocks_of_a_salt_or_an_adapter_are_never_counted_for_a_request_that_has_one(
    client: IndexerClient, engines: list[TrtllmEngine]
) -> None:
    # The events name neither: these blocks look alike, and only that of a plain request is one of a plain request.
    (engine,) = start(engines)
    await client.register(engine, engine=TRTLLM)
    engine.store(prompt(3))
    engine.store(prompt(5), salt="tenant-a")
    engine.store(prompt(4), lora_id=7)
    engine.flush()
    await client.until_applied(0)
    assert await client.overlap(prompt(5), cache_salt="tenant-a") == 0
    assert await client.overlap(prompt(5), lora_name="sql") == 0
    # Each of the copies goes by itself.
    engine.evict(*engine.store(prompt(5), salt="tenant-a"))
    engine.flush()
    await client.until_applied(1)
    assert await client.overlap(prompt(5)) == 4
    engine.evict(*engine.store(prompt(4), lora_id=7))
    engine.flush()
    await client.until_applied(2)
    assert await client.overlap(prompt(5)) == 3
