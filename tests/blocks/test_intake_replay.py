"""Replays that the native thread reads: what it applies, what it leaves to the event loop, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest
import zmq
import zmq.asyncio
from support.engine_events import CLEARED, batch, prompt, stored
from support.free_ports import free_ports
from support.intake_world import DEADLINE_SECONDS, RANK, IntakeWorld, packed
from support.recorded_engine import END_OF_REPLAY
from support.zmq_bind import bind

from kvscout_blocks.bytes.frames import Message
from kvscout_blocks.source import subscriber
from kvscout_blocks.source.decisions import digest
from kvscout_blocks.source.feed import HistoryBroken
from kvscout_blocks.source.intake import IntakeReplay
from kvscout_common.hashing import native_available

pytestmark = pytest.mark.skipif(not native_available(), reason="the intake is native")


class World(IntakeWorld):
    """One whose engine replays what a test has it replay, through libzmq."""

    def __init__(self, threads: int = 1) -> None:
        super().__init__(threads)
        self._context = zmq.asyncio.Context()
        (port,) = free_ports(1)
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.open()

    def open(self) -> None:
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set_hwm(0)
        bind(self._router, self.endpoint)

    def stop(self) -> None:
        self._router.close(linger=0)

    def request(self, first_id: int = 0) -> IntakeReplay:
        replay = self.intake.replay(self.endpoint, RANK, self.index, first_id)
        assert replay is not None
        return replay

    async def requested(self) -> int:
        """Waits for a request; returns its first id."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            self._identity, empty, first_id = await self._router.recv_multipart()
        assert empty == b""
        return int.from_bytes(first_id, "big")

    async def reply(self, numbers: Iterable[int], *, end: bool = False) -> None:
        for number in numbers:
            await self.send(b"", number.to_bytes(8, "big"), usual(number))
        if end:
            await self.send(b"", END_OF_REPLAY, b"")

    async def send(self, *frames: bytes) -> None:
        await self._router.send_multipart([self._identity, *frames])

    def close(self) -> None:
        super().close()
        self._context.destroy(linger=0)


@pytest.fixture(params=[1, 3])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made = World(threads=request.param)
    yield made
    made.close()


def usual(number: int) -> bytes:
    """A batch of one block that nobody else has."""
    return batch(stored([number + 1], prompt(1, first=100 * number)))


async def reply_after(replies: AsyncIterator[Message]) -> int:
    """Returns the id of the next reply that comes to the event loop."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        return (await anext(replies)).seq


@pytest.mark.parametrize("count", [100, 1_000])
async def test_however_long_a_replay_is_the_reply_before_the_position_was_lent_alone_comes_to_the_loop(
    world: World, count: int
) -> None:
    replay = world.request(7)
    assert await world.requested() == 7
    # All of them can be read before the first one was dealt with.
    await world.reply(range(7, 7 + count), end=True)
    replies = replay.replies()
    assert await reply_after(replies) == 7
    assert replay.lend(7, None, lambda: None)
    assert [message async for message in replies] == []
    taken = replay.take()
    assert taken is not None
    assert (taken.last_id, taken.applied) == (6 + count, count - 1)
    assert taken.digests == packed(digest(usual(number)) for number in range(8, 7 + count))
    replay.close()


async def test_replies_from_where_live_batches_are_held_come_to_the_loop(world: World) -> None:
    replay = world.request()
    await world.requested()
    await world.reply([0])
    replies = replay.replies()
    assert await reply_after(replies) == 0
    assert replay.lend(0, 40, lambda: None)
    await world.reply(range(1, 50), end=True)
    assert [message.seq async for message in replies] == list(range(40, 50))
    taken = replay.take()
    assert taken is not None
    assert (taken.last_id, taken.applied) == (39, 39)
    replay.close()


@pytest.mark.parametrize("odd", [b"\xc1", batch(CLEARED), batch(rank=3)], ids=["malformed", "cleared", "rank"])
async def test_what_is_not_usual_comes_to_the_loop_and_all_after_it_until_it_is_lent_again(
    world: World, odd: bytes
) -> None:
    replay = world.request()
    await world.requested()
    await world.reply([0])
    replies = replay.replies()
    assert await reply_after(replies) == 0
    assert replay.lend(0, None, lambda: None)
    await world.reply([1])
    await world.send(b"", (2).to_bytes(8, "big"), odd)
    await world.reply([3])
    assert await reply_after(replies) == 2
    assert await reply_after(replies) == 3
    assert replay.lend(3, None, lambda: None)
    await world.reply([4, 5], end=True)
    assert [message async for message in replies] == []
    replay.close()


async def test_more_than_the_loop_reads_stays_in_the_socket_and_comes_in_order(world: World) -> None:
    count = 2_000
    replay = world.request()
    await world.requested()
    await world.reply(range(count), end=True)
    # Nothing is lost, and no silence is seen, while nobody takes what was read.
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert [message.seq async for message in replay.replies()] == list(range(count))
    replay.close()


@pytest.mark.parametrize("frames", [[b"", b"short", b""], [b"1", b"2", b"3", b"4", b"5"], [b"alone"]])
async def test_a_reply_that_is_none_breaks_the_replay(world: World, frames: list[bytes]) -> None:
    replay = world.request()
    await world.requested()
    await world.send(*frames)
    with pytest.raises(HistoryBroken, match="want seq and payload at the end"):
        await reply_after(replay.replies())
    replay.close()


async def test_an_engine_that_never_answers_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "REPLAY_IDLE_SECONDS", 0.05)
    replay = world.request()
    with pytest.raises(HistoryBroken, match=r"silent for 0\.05 s"):
        await reply_after(replay.replies())
    replay.close()


async def test_an_engine_that_falls_silent_amidst_its_replies_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "REPLAY_IDLE_SECONDS", DEADLINE_SECONDS)
    monkeypatch.setattr(subscriber, "REPLAY_PAUSE_SECONDS", 0.05)
    replay = world.request()
    await world.requested()
    await world.reply([0, 1])
    replies = replay.replies()
    assert [await reply_after(replies), await reply_after(replies)] == [0, 1]
    with pytest.raises(HistoryBroken, match=r"silent for 0\.05 s"):
        await reply_after(replies)
    replay.close()


async def test_an_engine_that_comes_a_moment_later_is_asked_then(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "REPLAY_IDLE_SECONDS", DEADLINE_SECONDS)
    world.stop()
    replay = world.request()
    await asyncio.to_thread(lambda: None)
    world.open()
    await world.requested()
    await world.reply([0], end=True)
    assert [message.seq async for message in replay.replies()] == [0]
    replay.close()


async def test_an_engine_that_dies_amidst_its_replies_breaks_the_replay_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "REPLAY_PAUSE_SECONDS", 2 * DEADLINE_SECONDS)
    replay = world.request()
    await world.requested()
    await world.reply([0])
    replies = replay.replies()
    assert await reply_after(replies) == 0
    world.stop()
    with pytest.raises(HistoryBroken, match="the connection ended"):
        await reply_after(replies)
    replay.close()
