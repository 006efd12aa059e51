"""A source and the states it is given: live, replayed, of others; wanted or not, whole or broken."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import pytest

from kvscout_blocks.bytes.codec import encode_dump
from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_blocks.bytes.events import DecodedBatch, EventBatch, Removed, Stored, Tier
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_blocks.source import peer_search
from kvscout_blocks.source.decisions import SequencedBatch
from kvscout_blocks.source.feed import HistoryBroken, NoHistory, SourceInput, SourceState
from kvscout_blocks.source.peer_search import PeerLookup
from kvscout_blocks.source.source import Source
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.worker import WorkerRank, WorkerSpec

SPEC = WorkerSpec("w", "m", 4)
RANK = WorkerRank("w", 0)

Batch = SequencedBatch[DecodedBatch]
Reply = Batch | SourceState | Exception


def batch(event_id: int, *, epoch: int = 1, life: str = "a", remove: int | None = None) -> Batch:
    """Batch `event_id`: stores block `event_id` + 1, a prompt of its own, or removes one."""
    number = event_id + 1
    event: Stored | Removed = Stored((number,), None, block_size=4, local_hashes=(hash((life, number)) % 2**63,))
    if remove is not None:
        event = Removed((remove,), Tier.DEVICE, 0)
    digest = hash((life, event_id, remove)) % 2**64
    return SequencedBatch(event_id, digest, EventBatch((event,), 0.0, 0), 10, epoch=epoch)


def state(
    last_id: int | None, *, epoch: int = 1, life: str = "a", blocks: int | None = None, **fields: Any
) -> SourceState:
    """What batches 0..last_id lead to."""
    index = ReferenceIndex(4)
    index.add_worker(RANK, WorkerOptions())
    for number in range(blocks if blocks is not None else (last_id or 0) + 1):
        content = batch(number, life=life).content
        assert isinstance(content, EventBatch)
        index.apply(RANK, content)
    dump = index.dump(RANK)
    assert dump is not None
    messages = encode_dump(SPEC.pool, replace(dump, epoch=epoch, last_event_id=last_id))
    return SourceState(epoch, last_id, [m.SerializeToString() for m in messages], **fields)


class ScriptedFeed:
    """Replays what it is told to, one script a request."""

    def __init__(self, *scripts: list[Reply], can_replay: bool = True) -> None:
        self.address = "scripted"
        self.can_replay = can_replay
        self.rewinds = False
        self.broken = self.outage = ""
        self.asked: list[int] = []
        self.go = asyncio.Event()
        self.go.set()
        self._scripts = list(scripts)

    def open(self, source: SourceInput) -> None:
        pass

    def close(self) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    async def history(self, first_id: int) -> AsyncGenerator[Batch | SourceState, None]:
        self.asked.append(first_id)
        await self.go.wait()
        for reply in self._scripts.pop(0) if self._scripts else []:
            if isinstance(reply, Exception):
                raise reply
            yield reply


class World:
    """A source, its index, and a clock that moves when it is told to."""

    def __init__(self, feed: ScriptedFeed, *, peer_lookup: PeerLookup | None = None) -> None:
        self.now = 0.0
        self.index = ReferenceIndex(4)
        self.index.add_worker(RANK, WorkerOptions())
        self.defects: list[BaseException] = []
        self.feed = feed
        self.source = Source(
            SPEC,
            RANK,
            feed,
            self.index,
            recoveries=asyncio.Semaphore(1),
            clock=lambda: self.now,
            ttl_seconds=120,
            warnings=RateLimitedLog(logging.getLogger("test")),
            incomplete=lambda incomplete: None,
            failed=self.defects.append,
            peer_lookup=peer_lookup,
        )
        self.source.open()

    def cursor(self) -> tuple[int, int | None]:
        return self.source.cursor

    def searching(self) -> bool:
        return self.source.peers.running

    def incomplete(self) -> bool:
        return self.source.incomplete

    def blocks(self) -> set[int]:
        dump: WorkerDump | None = self.index.dump(RANK)
        assert dump is not None
        return {block.engine_hash for block in dump.blocks if block.engine_hash is not None}

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not reached():
                await asyncio.sleep(0)
        assert not self.defects, self.defects

    async def settled(self) -> None:
        """No replay is running, retries included."""
        async with asyncio.timeout(30):
            while self.source.replaying:
                self.now += 1.0
                self.source.tick()
                await asyncio.sleep(0)
        assert not self.defects, self.defects


async def test_a_replayed_state_stands_for_all_before_it_and_held_batches_follow() -> None:
    world = World(ScriptedFeed([state(4)]))
    world.source.on_batch(batch(5))
    world.source.on_batch(batch(6, remove=1))
    await world.settled()
    assert world.blocks() == {2, 3, 4, 5, 6}
    assert world.cursor() == (1, 6)
    assert world.source.sequence.counters["states"] == 1


async def test_after_a_state_events_of_the_same_answer_go_on() -> None:
    world = World(ScriptedFeed([state(4), batch(4), batch(5), batch(6)]))
    world.source.on_reconnect()
    await world.settled()
    assert world.cursor() == (1, 6)
    assert world.blocks() == set(range(1, 8))


async def test_a_live_state_ends_a_replay_and_what_it_lacks_is_requested() -> None:
    feed = ScriptedFeed([batch(4), batch(5), batch(6)])
    feed.go.clear()
    world = World(feed)
    world.source.on_batch(batch(7))
    await world.until(lambda: feed.asked == [0])
    world.source.on_state(state(4))
    feed.go.set()
    await world.settled()
    assert feed.asked[-1] == 4
    assert world.cursor() == (1, 7)
    assert world.blocks() == set(range(1, 9))


async def test_a_live_state_that_is_older_changes_nothing() -> None:
    world = World(ScriptedFeed())
    for number in range(5):
        world.source.on_batch(batch(number))
    world.source.on_state(state(3))
    world.source.on_state(state(9, epoch=0))
    assert world.cursor() == (1, 4)
    assert world.blocks() == set(range(1, 6))
    assert world.source.sequence.counters["states"] == 0


async def test_a_state_of_a_higher_epoch_is_a_restart() -> None:
    world = World(ScriptedFeed())
    for number in range(5):
        world.source.on_batch(batch(number))
    world.source.on_state(state(1, epoch=2, life="b"))
    assert world.cursor() == (2, 1)
    assert world.blocks() == {1, 2}
    world.source.on_batch(batch(5))
    assert world.source.sequence.counters["stale"] == 1


async def test_a_state_without_a_cursor_is_taken_live_and_not_as_an_answer_to_what_came_after_ours() -> None:
    world = World(ScriptedFeed([state(None, blocks=0)]))
    for number in range(3):
        world.source.on_batch(batch(number))
    world.source.on_reconnect()
    await world.settled()
    assert world.cursor() == (1, 2)
    assert world.blocks() == {1, 2, 3}
    world.source.on_state(state(None, blocks=0))
    assert world.cursor() == (1, None)
    assert world.blocks() == set()


async def test_a_state_with_a_past_that_is_lost_says_so_and_the_next_whole_one_ends_it() -> None:
    world = World(ScriptedFeed())
    world.source.on_state(state(4, history_incomplete=True))
    assert world.incomplete()
    assert world.source.sequence.missing == "what came before the state that was loaded"
    world.source.on_state(state(5))
    assert not world.incomplete()


@pytest.mark.parametrize("damage", ["foreign", "cut short", "garbage", "none"])
async def test_a_replayed_state_that_cannot_be_loaded_is_requested_again(damage: str) -> None:
    broken = state(4)
    if damage == "foreign":
        other = replace(SPEC, worker_id="x")
        dump = WorkerDump(other.ranks[0], 1, 4, (), (), ())
        broken = replace(broken, messages=[m.SerializeToString() for m in encode_dump(other.pool, dump)])
    elif damage == "cut short":
        broken = replace(broken, messages=[broken.messages[0][:-3]])
    else:
        broken = replace(broken, messages=[b"\xff"] if damage == "garbage" else [])
    world = World(ScriptedFeed([broken], [state(4)]))
    world.source.on_batch(batch(5))
    await world.settled()
    assert world.feed.asked == [0, 0]
    assert world.source.malformed_frames == 1
    assert not world.incomplete()
    assert world.blocks() == set(range(1, 7))


async def test_no_history_is_not_requested_again() -> None:
    feed = ScriptedFeed([NoHistory("it keeps none")])
    world = World(feed)
    world.source.on_reconnect()
    await world.settled()
    # Nothing was known: the first batch tells whether anything is missing.
    assert not world.incomplete()
    world.source.on_batch(batch(0))
    assert world.cursor() == (1, 0)
    feed._scripts = [[NoHistory("it keeps none")]]
    world.source.on_batch(batch(5))
    await world.settled()
    assert feed.asked == [0, 0]
    assert world.incomplete()
    assert world.source.sequence.counters["demotions"] == 1
    assert world.cursor() == (1, 5)


async def test_history_that_heals_is_replaced_and_one_that_does_not_stays() -> None:
    feed = ScriptedFeed([NoHistory("")], [HistoryBroken("")], [state(4)])
    world = World(feed)
    world.source.on_batch(batch(0))
    world.source.on_batch(batch(5))
    await world.settled()
    assert world.incomplete()
    for expected in (True, False):
        world.source.heal()
        if expected:
            world.source.on_batch(batch(6))
        await world.settled()
        # Once refused, and once older than what is known by then: neither costs anything.
        assert world.incomplete()
        assert world.source.sequence.counters["demotions"] == 1
        assert world.cursor() == (1, 6)
    feed._scripts = [[state(6)]]
    world.source.heal()
    await world.settled()
    assert not world.incomplete()
    assert world.blocks() == set(range(1, 8))
    world.source.heal()
    assert not world.source.replaying


async def elsewhere_of(found: SourceState | None, go: asyncio.Event) -> SourceState | None:
    await go.wait()
    return found


@pytest.mark.parametrize("can_replay", [True, False])
async def test_a_state_of_others_comes_first_and_the_source_confirms_it(
    monkeypatch: pytest.MonkeyPatch, *, can_replay: bool
) -> None:
    monkeypatch.setattr(peer_search, "CONNECT_SECONDS", 0.0)
    go = asyncio.Event()
    found = state(4, epoch=0, last_digest=batch(4).digest)
    feed = ScriptedFeed([batch(4, epoch=0), batch(5, epoch=0)], can_replay=can_replay)
    world = World(feed, peer_lookup=lambda spec, rank: elsewhere_of(found, go))
    world.source.on_batch(batch(6, epoch=0))
    assert world.searching()
    assert world.source.sequence.held == 1
    go.set()
    await world.settled()
    assert not world.searching()
    assert world.source.peers.over.is_set()
    assert world.cursor() == (0, 6)
    assert feed.asked == ([4] if can_replay else [])
    # Without a replay batch 5 is lost, and what was held becomes a prediction.
    assert world.incomplete() is not can_replay
    assert world.blocks() == (set(range(1, 8)) if can_replay else {7})


async def test_a_state_of_others_from_a_former_life_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_search, "CONNECT_SECONDS", 0.0)
    go = asyncio.Event()
    go.set()
    found = state(4, epoch=0, last_digest=batch(4).digest)
    lived = [batch(number, epoch=0, life="b") for number in range(7)]
    feed = ScriptedFeed([*lived[4:]], [*lived])
    world = World(feed, peer_lookup=lambda spec, rank: elsewhere_of(found, go))
    await world.settled()
    assert feed.asked == [4, 0]
    assert world.source.resets == 1
    assert world.cursor() == (0, 6)


async def test_a_reconnect_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_search, "CONNECT_SECONDS", 0.0)
    go = asyncio.Event()
    asked = 0

    async def peer_lookup(spec: WorkerSpec, rank: WorkerRank) -> SourceState | None:
        nonlocal asked
        asked += 1
        return await elsewhere_of(state(4), go)

    feed = ScriptedFeed([batch(4), batch(5)])
    world = World(feed, peer_lookup=peer_lookup)
    for _ in range(3):
        await asyncio.sleep(0)
        world.source.on_reconnect()
    await world.until(lambda: asked == 1)
    go.set()
    await world.settled()
    assert (asked, feed.asked) == (1, [4])
    assert world.cursor() == (1, 5)


@pytest.mark.parametrize("found", [None, "incomplete"])
async def test_where_others_know_nothing_better_the_source_is_asked_from_the_start(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    monkeypatch.setattr(peer_search, "CONNECT_SECONDS", 0.0)
    go = asyncio.Event()
    go.set()
    of_others = state(4, history_incomplete=True) if found else None
    feed = ScriptedFeed([batch(number) for number in range(4)])
    world = World(feed, peer_lookup=lambda spec, rank: elsewhere_of(of_others, go))
    await world.settled()
    assert feed.asked == [0]
    assert world.cursor() == (1, 3)
    assert not world.incomplete()


async def test_a_reset_on_request_leaves_the_search_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_search, "CONNECT_SECONDS", 0.0)
    go = asyncio.Event()
    feed = ScriptedFeed(can_replay=False)
    world = World(feed, peer_lookup=lambda spec, rank: elsewhere_of(state(4, epoch=0), go))
    world.source.on_batch(batch(5, epoch=0))
    world.source.recover()
    world.source.on_batch(batch(6, epoch=0))
    go.set()
    await world.settled()
    assert world.cursor() == (0, 6)


async def test_a_source_that_is_closed_ends_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(ScriptedFeed(), peer_lookup=lambda spec, rank: elsewhere_of(None, asyncio.Event()))
    await asyncio.sleep(0)
    task = world.source.close()
    assert task is not None
    await task
    assert world.source.peers.over.is_set()
    assert not world.defects
