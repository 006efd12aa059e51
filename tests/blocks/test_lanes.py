"""Sockets that the native thread reads: what is left to the event loop, in which order, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest
import zmq
from engine_events import BLOCK_SIZE, batch, prompt, stored
from zmq_publisher import Publisher

from kvscout_blocks.bytes.wire import Message
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.index.native import NativeIndex
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_blocks.source import lanes as lanes_module
from kvscout_blocks.source.lanes import Lanes, LaneSubscription, libzmq_addresses, make_lanes
from kvscout_blocks.source.sequence import digest
from kvscout_common.hashing import native_available
from kvscout_common.worker import EventEndpoint, WorkerRank

pytestmark = pytest.mark.skipif(not native_available(), reason="lanes are native")

RANK = WorkerRank("w", 0)
DEADLINE_SECONDS = 30.0


class World:
    """One source: its sockets, its index, and what was told of it."""

    def __init__(self) -> None:
        self.defects: list[BaseException] = []
        made = make_lanes(failed=self.defects.append)
        assert made is not None
        self.lanes: Lanes = made
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.index = NativeIndex(BLOCK_SIZE)
        self.index.add_worker(RANK, WorkerOptions(total_kv_blocks=0))
        self.publisher = Publisher()
        self.told: list[str | int] = []
        self.during: Callable[[Message], None] = lambda _: None

    def subscribe(self) -> LaneSubscription:
        subscription = self.lanes.subscribe(
            self.context,
            EventEndpoint(0, self.publisher.endpoint),
            RANK,
            self.index,
            on_message=self._on_message,
            on_malformed=self.told.append,
            on_connected=lambda: self.told.append("connected"),
            on_unconnected=lambda _: None,
        )
        assert subscription is not None
        self.publisher.await_subscription()
        return subscription

    def _on_message(self, message: Message) -> None:
        self.told.append(message.seq)
        self.during(message)

    def lend(self, subscription: LaneSubscription, last_id: int, payload: bytes = b"") -> bool:
        return subscription.lend(last_id, [(last_id, digest(payload))], lambda: self.told.append("stopped"))

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not reached():
                await asyncio.sleep(0.001)

    async def until_told(self, count: int) -> None:
        await self.until(lambda: len(self.told) >= count)

    def close(self) -> None:
        self.lanes.close()
        self.context.destroy(linger=0)
        self.publisher.close()
        assert not self.defects


@pytest.fixture
async def world() -> Iterator[World]:  # type: ignore[misc]  # an async generator, for the running loop
    world = World()
    yield world
    world.close()


def usual(number: int) -> bytes:
    """A batch of one block that nobody else has."""
    return batch(stored([number + 1], prompt(1, first=100 * number)))


async def test_what_is_usual_is_applied_beside_the_event_loop(world: World) -> None:
    subscription = world.subscribe()
    await world.until_told(1)
    assert world.lend(subscription, 0)
    world.publisher.send_payloads(1, [usual(number) for number in range(100)])
    # The loop stands still meanwhile.
    while world.index.cursor(RANK) != (0, 100):
        assert not world.defects
    taken = subscription.take()
    assert taken is not None
    assert (taken.last_id, taken.applied, taken.over_capacity, taken.incompatible) == (100, 100, False, "")
    assert list(taken.digests) == [(number + 1, digest(usual(number))) for number in range(36, 100)]
    assert taken.age_seconds is not None
    assert subscription.take() is None
    subscription.close()
    assert world.told == ["connected"]


async def test_what_is_not_usual_comes_to_the_loop_and_all_after_it(world: World) -> None:
    subscription = world.subscribe()
    await world.until_told(1)
    assert world.lend(subscription, 0)
    payloads = [usual(1), usual(2), b"\xc1", usual(4), usual(5)]
    world.publisher.send_payloads(1, payloads)
    await world.until_told(4)
    assert world.told == ["connected", 3, 4, 5]
    taken = subscription.take()
    assert taken is not None
    assert (taken.last_id, taken.applied) == (2, 2)
    subscription.close()


async def test_a_cursor_is_not_lent_while_something_waits(world: World) -> None:
    subscription = world.subscribe()
    await world.until_told(1)
    lent: list[bool] = []
    world.during = lambda message: lent.append(world.lend(subscription, message.seq))
    world.publisher.send_payloads(1, [usual(number) for number in range(5)])
    # All five are there before the first of them is delivered.
    await asyncio.to_thread(lambda: None)
    await world.until(lambda: bool(lent) and lent[-1])
    assert lent == [False] * (len(lent) - 1) + [True]
    await world.until(lambda: (world.index.cursor(RANK) or (0, 0))[1] in (5, None))
    subscription.close()


async def test_more_than_waits_for_a_busy_loop_stays_in_the_socket_and_comes_in_order(world: World) -> None:
    subscription = world.subscribe()
    await world.until_told(1)
    count = 2_000
    world.publisher.send(0, count)
    await world.until_told(1 + count)
    subscription.close()
    assert world.told == ["connected", *range(count)]


async def test_malformed_frames_are_told_with_their_lengths(world: World) -> None:
    subscription = world.subscribe()
    await world.until_told(1)
    assert world.lend(subscription, 0)
    for frames in ([b"topic"], [b"topic", b"1234567", b""], [b"a"] * 10):
        world.publisher.send_frames(frames)
    await world.until_told(4)
    wanted = "frames: want topic, 8 bytes of seq, payload; got frames of"
    assert world.told[1:] == [f"{wanted} [5] bytes", f"{wanted} [5, 7, 0] bytes", f"{wanted} {[1] * 8} bytes"]
    subscription.close()


async def test_a_connection_is_told_of_before_its_first_batch_and_ends_the_loan(world: World) -> None:
    subscription = world.subscribe()
    await world.until_told(1)
    assert world.lend(subscription, 0)
    world.publisher.send_payloads(1, [usual(1)])
    await world.until(lambda: world.index.cursor(RANK) == (0, 1))
    world.publisher.reopen()
    world.publisher.await_subscription()
    # It continues what was lent, and is of another connection.
    world.publisher.send_payloads(2, [usual(2)])
    await world.until_told(3)
    assert world.told == ["connected", "connected", 2]
    assert world.index.cursor(RANK) == (0, 1)
    subscription.close()


async def test_a_lane_stops_by_itself_over_capacity(world: World) -> None:
    world.index.add_worker(RANK, WorkerOptions(total_kv_blocks=1))
    subscription = world.subscribe()
    await world.until_told(1)
    assert world.lend(subscription, 0)
    world.publisher.send_payloads(1, [usual(1), usual(2), usual(3)])
    await world.until_told(3)
    assert world.told == ["connected", "stopped", 3]
    taken = subscription.take()
    assert taken is not None
    assert (taken.last_id, taken.over_capacity) == (2, True)
    subscription.close()


async def test_nothing_is_told_or_applied_after_close(world: World) -> None:
    subscription = world.subscribe()
    await world.until_told(1)
    world.during = lambda message: subscription.close() if message.seq == 2 else None
    world.publisher.send(0, 50)
    await world.until_told(4)
    subscription.close()
    other = Publisher()
    try:
        world.publisher, first = other, world.publisher
        first.close()
        again = world.subscribe()
        await world.until_told(5)
        assert world.told == ["connected", 0, 1, 2, "connected"]
        assert not subscription.lend(0, [], lambda: None)
        again.close()
    finally:
        other.close()


async def test_a_defect_in_a_callback_is_told_and_the_rest_goes_on(world: World) -> None:
    subscription = world.subscribe()
    await world.until_told(1)

    def fail(message: Message) -> None:
        if message.seq == 0:
            raise RuntimeError("a defect")

    world.during = fail
    world.publisher.send(0, 2)
    await world.until_told(3)
    assert [str(defect) for defect in world.defects] == ["a defect"]
    world.defects.clear()
    subscription.close()


async def test_an_endpoint_that_cannot_be_used_leaves_no_socket_behind(world: World) -> None:
    with pytest.raises(zmq.ZMQError):
        world.lanes.subscribe(
            world.context,
            EventEndpoint(0, "tcp://no port here"),
            RANK,
            world.index,
            on_message=world._on_message,
            on_malformed=world.told.append,
            on_connected=lambda: None,
            on_unconnected=lambda _: None,
        )
    world.context.term()  # would wait for an open socket for ever


async def test_another_index_than_the_native_one_has_no_lane(world: World) -> None:
    subscription = world.lanes.subscribe(
        world.context,
        EventEndpoint(0, world.publisher.endpoint),
        RANK,
        ReferenceIndex(BLOCK_SIZE),
        on_message=world._on_message,
        on_malformed=world.told.append,
        on_connected=lambda: None,
        on_unconnected=lambda _: None,
    )
    assert subscription is None


async def test_without_the_functions_of_libzmq_there_are_no_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(libzmq_addresses()) == 7
    monkeypatch.setattr(lanes_module, "_FUNCTIONS", ("no_such_function",))
    addresses: Sequence[int] = libzmq_addresses()
    assert addresses == ()
    assert make_lanes(failed=lambda _: None) is None
