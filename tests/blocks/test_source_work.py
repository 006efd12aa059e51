"""A source whose rank has many blocks: what comes while a state is loaded, blocks are demoted or a cut is taken."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator

import pytest

from kvscout_blocks.bytes.codec import encode_dump
from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_blocks.bytes.events import DecodedBatch, EventBatch, Stored
from kvscout_blocks.index.backend import make_index
from kvscout_blocks.index.block_index import SLICE, Loading, WorkerOptions
from kvscout_blocks.source.decisions import SequencedBatch
from kvscout_blocks.source.feed import SourceInput, SourceState
from kvscout_blocks.source.held import HELD_BYTES
from kvscout_blocks.source.source import Source
from kvscout_common.hashing import native_available
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.worker import WorkerRank, WorkerSpec

SPEC = WorkerSpec("w", "m", 4)
RANK = WorkerRank("w", 0)
NATIVE_ONLY = pytest.mark.skipif(not native_available(), reason="the reference does all at once")
BLOCKS = 128 * SLICE


class Feed:
    """Delivers what the test does."""

    def __init__(self, *, can_replay: bool = False) -> None:
        self.address = "test"
        self.can_replay = can_replay
        self.rewinds = False
        self.broken = self.outage = ""
        self.asked: list[int] = []

    def open(self, source: SourceInput) -> None:
        pass

    def close(self) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    async def history(self, first_id: int) -> AsyncGenerator[SequencedBatch[DecodedBatch] | SourceState, None]:
        self.asked.append(first_id)
        await asyncio.Event().wait()
        yield batch(0)


class World:
    """A source of a rank, and what became of it in order."""

    def __init__(self, *, can_replay: bool = False) -> None:
        self.index = make_index(4)
        self.index.add_worker(RANK, WorkerOptions())
        self.defects: list[BaseException] = []
        self.received: list[object] = []
        self.feed = Feed(can_replay=can_replay)
        self.source = Source(
            SPEC,
            RANK,
            self.feed,
            self.index,
            recoveries=asyncio.Semaphore(1),
            clock=lambda: 0.0,
            ttl_seconds=120,
            warnings=RateLimitedLog(logging.getLogger("test")),
            incomplete=lambda incomplete: None,
            failed=self.defects.append,
            observer=self,
        )
        self.source.open()

    def applied(self, batch: SequencedBatch[DecodedBatch]) -> None:
        self.received.append(batch.event_id)

    def reset(self) -> None:
        self.received.append("reset")

    def demoted(self, missing: str) -> None:
        self.received.append("demoted")

    def loaded(self) -> None:
        self.received.append("loaded")

    async def turns_until_idle(self) -> int:
        """Turns that the loop gave to others meanwhile."""
        turns = 0
        async with asyncio.timeout(30):
            while self.source.replaying:
                await asyncio.sleep(0)
                turns += 1
        assert not self.defects, self.defects
        return turns

    def found(self, *hashes: int) -> tuple[int, int]:
        row = self.index.find_matches(hashes, now=0.0).by_worker().get(RANK)
        return (row.device, row.predicted) if row is not None else (0, 0)


def batch(event_id: int, *hashes: int, size_bytes: int = 10) -> SequencedBatch[DecodedBatch]:
    event = Stored(hashes, local_hashes=hashes, block_size=4)
    return SequencedBatch(event_id, 1000 + event_id, EventBatch((event,)), size_bytes)


def many(first: int, blocks: int = BLOCKS) -> tuple[int, ...]:
    return tuple(range(first, first + blocks))


def state(first: int, last_id: int) -> SourceState:
    """One prompt of many blocks."""
    index = make_index(4)
    index.add_worker(RANK, WorkerOptions())
    content = batch(last_id, *many(first)).content
    assert isinstance(content, EventBatch)
    index.apply(RANK, content, event_id=last_id)
    dump = index.dump(RANK)
    assert dump is not None
    return SourceState(0, last_id, [message.SerializeToString() for message in encode_dump(SPEC.pool, dump)])


@pytest.mark.slow
async def test_what_comes_while_a_live_state_is_loaded_is_applied_after_it_in_order() -> None:
    world = World()
    world.source.on_batch(batch(0, 5, 6))
    world.source.on_state(state(100, 7))
    for number in (8, 9, 10):
        world.source.on_batch(batch(number, number))
    assert world.received == [0], "nothing overtakes it"
    assert world.found(5, 6) == (2, 2), "what was known is answered with until then"
    assert await world.turns_until_idle() > 1
    assert world.received == [0, "loaded", 8, 9, 10]
    assert (world.found(5, 6), world.found(*many(100)[:3]), world.found(10)) == ((0, 0), (3, 3), (1, 1))
    assert world.source.cursor == (0, 10)


@pytest.mark.slow
@NATIVE_ONLY
async def test_a_demotion_of_many_blocks_gives_the_loop_away_and_later_batches_wait_for_it() -> None:
    world = World()
    world.source.on_batch(batch(0, *many(1)))
    world.source.on_batch(batch(5, 7_000_000))
    world.source.on_batch(batch(6, 7_000_001))
    assert world.received == [0]
    assert world.source.incomplete
    assert await world.turns_until_idle() > 1
    assert world.received == [0, "demoted", 5, 6]
    assert world.found(*many(1)) == (0, BLOCKS)
    assert (world.found(7_000_000), world.found(7_000_001)) == ((1, 1), (1, 1))


@pytest.mark.slow
@NATIVE_ONLY
async def test_a_cut_of_many_blocks_is_of_its_beginning_and_later_batches_wait_for_it() -> None:
    world = World()
    world.source.on_batch(batch(0, *many(1, 4 * BLOCKS)))
    expected = world.index.dump(RANK)
    cutting = asyncio.ensure_future(world.source.cut())
    await asyncio.sleep(0)
    world.source.on_batch(batch(1, 7_000_000))
    assert world.received == [0]
    taken = await cutting
    assert taken is not None
    assert taken.last_digest == 1000
    assert await world.turns_until_idle() >= 0
    assert (taken.cut.dump(), world.received) == (expected, [0, 1])


@pytest.mark.slow
@NATIVE_ONLY
async def test_a_source_that_is_closed_amid_work_leaves_nothing_behind() -> None:
    for what in (state(100, 7), batch(5, 1)):
        world = World()
        world.source.on_batch(batch(0, *many(1)))
        if isinstance(what, SourceState):
            world.source.on_state(what)
        else:
            world.source.on_batch(what)
        await asyncio.sleep(0)
        world.source.on_batch(batch(8, 8))
        ended = world.source.close()
        assert ended is not None
        await ended
        world.index.remove_rank(RANK)
        while world.index.maintain(now=0.0):
            pass
        assert (world.received, world.index.stats().blocks) == ([0], 0)
        world.index.check_invariants()


async def test_more_than_may_wait_ends_a_load_and_history_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(can_replay=True)
    world.source.on_batch(batch(0, 5, 6))
    # The load runs in another thread, which may be through before this one goes on: its first step is held.
    may_step, step = threading.Event(), Loading.step

    def held_step(loading: Loading) -> bool:
        may_step.wait()
        return step(loading)

    monkeypatch.setattr(Loading, "step", held_step)
    try:
        world.source.on_state(state(100, 7))
        await asyncio.sleep(0)
        world.source.on_batch(batch(8, 8, size_bytes=HELD_BYTES))
        world.source.on_batch(batch(9, 9, size_bytes=HELD_BYTES))
        async with asyncio.timeout(30):
            while not world.feed.asked:
                await asyncio.sleep(0)
    finally:
        may_step.set()
    assert (world.feed.asked[0], world.received[:1], "loaded" in world.received) == (0, [0], False)
    assert not world.defects


async def test_a_state_that_cannot_be_loaded_costs_itself() -> None:
    world = World()
    world.source.on_batch(batch(0, 5, 6))
    broken = state(100, 1)
    dump = WorkerDump(RANK, last_event_id=1, incompatible="so")
    more = [message.SerializeToString() for message in encode_dump(SPEC.pool, dump)]
    world.source.on_state(SourceState(0, 1, [*broken.messages, *more]))
    world.source.on_batch(batch(1, 7))
    await world.turns_until_idle()
    assert (world.received, world.source.malformed_frames) == ([0, 1], 1)
    assert world.found(5, 6) == (2, 2)


@pytest.mark.slow
async def test_a_reset_by_hand_comes_after_the_work_that_is_under_way() -> None:
    world = World()
    world.source.on_batch(batch(0, 5, 6))
    world.source.on_state(state(100, 7))
    world.source.recover(any_epoch=True)
    await world.turns_until_idle()
    assert world.received[:3] == [0, "loaded", "reset"]
    assert world.found(*many(100)[:3]) == (0, 0)
