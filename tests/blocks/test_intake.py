"""Sockets that the native thread reads: what is left to the event loop, in which order, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.engine_events import BLOCK_SIZE, batch, prompt, stored
from support.free_ports import free_ports
from support.intake_world import RANK, IntakeWorld, packed
from support.zmq_publisher import Publisher

from kvscout_blocks.bytes.frames import Message
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_blocks.source.decisions import digest
from kvscout_blocks.source.intake import IntakeSubscription
from kvscout_blocks.source.sequence import DIGESTS_KEPT
from kvscout_common.hashing import block_hashes, native_available
from kvscout_common.worker import EventEndpoint, WorkerRank

pytestmark = pytest.mark.skipif(not native_available(), reason="the intake is native")


class World(IntakeWorld):
    """One whose engine publishes through libzmq."""

    def __init__(self, threads: int = 1) -> None:
        super().__init__(threads)
        self.publisher = Publisher()

    def connect(self) -> IntakeSubscription:
        subscription = self.subscribe(self.publisher.endpoint)
        self.publisher.await_subscription()
        return subscription

    def close(self) -> None:
        super().close()
        self.publisher.close()


@pytest.fixture(params=[1, 3])
async def world(request: pytest.FixtureRequest) -> Iterator[World]:  # type: ignore[misc]  # an async generator, for the running loop
    world = World(threads=request.param)
    yield world
    world.close()


@dataclass
class Engine:
    """One of several."""

    rank: WorkerRank
    publisher: Publisher
    subscription: IntakeSubscription = field(init=False)


def usual(number: int) -> bytes:
    """A batch of one block that nobody else has."""
    return batch(stored([number + 1], prompt(1, first=100 * number)))


async def test_what_is_usual_is_applied_beside_the_event_loop(world: World) -> None:
    subscription = world.connect()
    await world.until_told(1)
    assert world.lend(subscription, 0)
    world.publisher.send_payloads(1, [usual(number) for number in range(100)])
    # The loop stands still meanwhile.
    while world.index.cursor(RANK) != (0, 100):
        assert not world.defects
    taken = subscription.take()
    assert taken is not None
    assert (taken.last_id, taken.applied, taken.over_capacity, taken.incompatible) == (100, 100, False, "")
    assert taken.digests == packed(digest(usual(number)) for number in range(36, 100))
    assert taken.age_seconds is not None
    assert subscription.take() is None
    subscription.close()
    assert world.told == ["connected"]


async def test_what_is_not_usual_comes_to_the_loop_and_all_after_it(world: World) -> None:
    subscription = world.connect()
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
    subscription = world.connect()
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
    subscription = world.connect()
    await world.until_told(1)
    count = 2_000
    world.publisher.send(0, count)
    await world.until_told(1 + count)
    subscription.close()
    assert world.told == ["connected", *range(count)]


async def test_what_comes_while_a_source_is_paused_stays_in_the_socket_and_comes_afterwards(world: World) -> None:
    subscription = world.connect()
    await world.until_told(1)
    subscription.pause(paused=True)
    world.publisher.send(0, 20)
    other = world.subscribe(world.publisher.endpoint)
    await world.until_told(2)
    world.publisher.await_subscription()
    assert world.told == ["connected"] * 2
    subscription.pause(paused=False)
    await world.until_told(2 + 20)
    assert world.told[2:] == list(range(20))
    subscription.close()
    other.close()


async def test_malformed_frames_are_reported_with_their_lengths(world: World) -> None:
    subscription = world.connect()
    await world.until_told(1)
    assert world.lend(subscription, 0)
    for frames in ([b"topic"], [b"topic", b"1234567", b""], [b"a"] * 10):
        world.publisher.send_frames(frames)
    await world.until_told(4)
    wanted = "frames: want topic, 8 bytes of seq, payload; got frames of"
    assert world.told[1:] == [f"{wanted} [5] bytes", f"{wanted} [5, 7, 0] bytes", f"{wanted} {[1] * 8} bytes"]
    subscription.close()


async def test_a_connection_is_reported_before_its_first_batch_and_ends_the_loan(world: World) -> None:
    subscription = world.connect()
    await world.until_told(1)
    assert world.lend(subscription, 0)
    world.publisher.send_payloads(1, [usual(1)])
    await world.until(lambda: world.index.cursor(RANK) == (0, 1))
    world.publisher.reopen()
    world.publisher.await_subscription()
    # It continues what was lent, and is of another connection.
    world.publisher.send_payloads(2, [usual(2)])
    await world.until_told(4)
    assert world.told == ["connected", "unconnected", "connected", 2]
    assert world.index.cursor(RANK) == (0, 1)
    subscription.close()


async def test_a_bypass_stops_by_itself_over_capacity(world: World) -> None:
    world.index.add_worker(RANK, WorkerOptions(total_kv_blocks=1))
    subscription = world.connect()
    await world.until_told(1)
    assert world.lend(subscription, 0)
    world.publisher.send_payloads(1, [usual(1), usual(2), usual(3)])
    await world.until_told(3)
    assert world.told == ["connected", "stopped", 3]
    taken = subscription.take()
    assert taken is not None
    assert (taken.last_id, taken.over_capacity) == (2, True)
    subscription.close()


async def test_nothing_is_reported_or_applied_after_close(world: World) -> None:
    subscription = world.connect()
    await world.until_told(1)
    world.during = lambda message: subscription.close() if message.seq == 2 else None
    world.publisher.send(0, 50)
    await world.until_told(4)
    subscription.close()
    other = Publisher()
    try:
        world.publisher, first = other, world.publisher
        first.close()
        again = world.connect()
        await world.until_told(5)
        assert world.told == ["connected", 0, 1, 2, "connected"]
        assert not subscription.lend(0, b"", lambda: None)
        again.close()
    finally:
        other.close()


async def test_a_defect_in_a_callback_is_reported_and_the_rest_goes_on(world: World) -> None:
    subscription = world.connect()
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


async def test_an_address_that_libzmq_alone_understands_is_left_to_it(world: World) -> None:
    for endpoint in ("tcp://localhost:5557", "tcp://eth0:5557", "tcp://127.0.0.1:no", "ipc://", "inproc://engine"):
        assert world.intake.subscribe(EventEndpoint(0, endpoint), RANK, world.index, world.callbacks) is None


async def test_another_index_than_the_native_one_has_no_bypass(world: World) -> None:
    endpoint = EventEndpoint(0, world.publisher.endpoint)
    assert world.intake.subscribe(endpoint, RANK, ReferenceIndex(BLOCK_SIZE), world.callbacks) is None


async def test_an_engine_that_is_away_is_reported_once_and_read_when_it_is_there(world: World) -> None:
    world.publisher.close()
    subscription = world.subscribe(world.publisher.endpoint)
    await world.until_told(1)
    again = Publisher(world.publisher.endpoint)
    try:
        again.await_subscription()
        again.send(0, 1)
        await world.until_told(3)
    finally:
        again.close()
    await world.until_told(4)
    subscription.close()
    assert world.told == ["unconnected", "connected", 0, "unconnected"]


@pytest.mark.parametrize("place", ["tcp://[::1]:*", "ipc://{folder}/engine", "ipc://@kvscout-{folder}"])
async def test_engines_are_read_over_ipv6_and_over_sockets_of_the_machine(
    world: World, place: str, tmp_path: Path
) -> None:
    publisher = Publisher(place.format(folder=tmp_path))
    try:
        subscription = world.subscribe(publisher.endpoint)
        publisher.await_subscription()
        publisher.send(0, 2)
        await world.until_told(3)
    finally:
        publisher.close()
    subscription.close()
    assert world.told[:3] == ["connected", 0, 1]


@pytest.mark.parametrize("place", ["tcp://127.0.0.1:{port}", "tcp://*:{port}", "ipc://{folder}/ours"])
async def test_engines_connect_to_an_address_that_we_bind(world: World, place: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    endpoint = place.format(port=port, folder=tmp_path)
    subscription = world.subscribe(endpoint, bind=True)
    if endpoint.startswith("tcp"):
        with pytest.raises(OSError, match="Address already in use"):
            world.subscribe(endpoint, bind=True)
    first, second = (Publisher(endpoint.replace("*", "127.0.0.1"), connect=True) for _ in range(2))
    try:
        first.await_subscription()
        second.await_subscription()
        first.send(0, 1)
        await world.until(lambda: 0 in world.told)
        second.send(1, 1)
        await world.until(lambda: 1 in world.told)
    finally:
        first.close()
        second.close()
    await world.until(lambda: world.told[-1] == "unconnected")
    assert sorted(map(str, world.told)) == ["0", "1", "connected", "connected", "unconnected"]
    subscription.close()
    # Free at once.
    world.subscribe(endpoint, bind=True).close()
    assert not (tmp_path / "ours").exists()


@asynccontextmanager
async def several_engines(count: int, *, threads: int) -> AsyncIterator[tuple[World, list[Engine]]]:
    """A world with engines of which each has its rank, is connected, and has had its position lent."""
    world = World(threads)
    engines = [Engine(WorkerRank(f"w-{number}", 0), Publisher()) for number in range(count)]
    try:
        for engine in engines:
            world.index.add_worker(engine.rank, WorkerOptions(total_kv_blocks=0))
            where = EventEndpoint(engine.rank.dp_rank, engine.publisher.endpoint)
            subscription = world.intake.subscribe(where, engine.rank, world.index, world.callbacks)
            assert subscription is not None
            engine.subscription = subscription
            engine.publisher.await_subscription()
        await world.until_told(count)
        for engine in engines:
            assert world.lend(engine.subscription, 0)
        yield world, engines
        for engine in engines:
            engine.subscription.close()
        assert world.told == ["connected"] * count
    finally:
        for engine in engines:
            engine.publisher.close()
        world.close()


async def test_sources_of_several_threads_are_applied_each_in_its_order_while_queries_are_answered() -> None:
    count = 400
    async with several_engines(9, threads=3) as (world, engines):
        for engine in engines:
            engine.publisher.send_payloads(1, [usual(number) for number in range(count)])
        hashes = block_hashes(prompt(1, first=100 * (count - 1)), BLOCK_SIZE)
        await world.until(lambda: len(world.index.find_matches(hashes, now=0.0).workers) == len(engines))
        for engine in engines:
            taken = engine.subscription.take()
            assert taken is not None
            assert (taken.last_id, taken.applied) == (count, count), engine.rank
            assert taken.digests == packed(digest(usual(number)) for number in range(count - DIGESTS_KEPT, count))
            stats = world.index.worker_stats(engine.rank)
            assert stats is not None
            assert stats.blocks == count
        world.index.check_invariants()


def reading_seconds() -> dict[str, float]:
    """CPU time of each thread of this process that reads engines' sockets."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "ingest":
            found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


async def busiest_seconds(threads: int) -> float:
    """CPU time of the busiest of so many threads for the same messages: the least of some runs."""
    count, runs = 500, []
    others = reading_seconds().keys()
    async with several_engines(8, threads=threads) as (world, engines):
        for first in range(0, 6 * count, count):
            before = {task: used for task, used in reading_seconds().items() if task not in others}
            assert len(before) == threads
            for engine in engines:
                engine.publisher.send_payloads(first + 1, [usual(number) for number in range(first, first + count)])
            last = (0, first + count)
            await world.until(lambda last=last: all(world.index.cursor(one.rank) == last for one in engines))  # type: ignore[misc]  # its type is the tuple's
            after = reading_seconds()
            runs.append(max(after[task] - used for task, used in before.items()))
    return min(runs)


async def test_messages_are_divided_among_threads() -> None:
    # A quarter each, and what it takes to wait for one another.
    assert await busiest_seconds(4) <= 0.5 * await busiest_seconds(1)
