"""What an owner lists that opens a stream, a slice at a time: what may happen between two slices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
import pytest
from support.grpc_server import serving
from support.scheduler_builders import MODEL, ManualClock, key, loads, owner, reservation, scheduler
from support.scheduler_invariants import check_scheduler
from support.seeds import test_seed

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc
from kvscout_common.errors import Cancelled, FailedPrecondition
from kvscout_common.registry.backends import Backends
from kvscout_common.registry.registry import Registry
from kvscout_common.settings.config import ServerConfig
from kvscout_scheduler.bookings.takeover import SLICE_REQUESTS
from kvscout_scheduler.rpc.servicer import SchedulerServicer
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.reservation import EndReason, FreeOutcome

GATEWAY = owner("gateway-1")
MANY = 20 * SLICE_REQUESTS
DEADLINE_SECONDS = 20.0


def booked(number: int, clock: ManualClock, **settings: Any) -> tuple[Scheduler, list[str], int]:
    """A scheduler with bookings of the gateway, and the session of its stream."""
    made = scheduler("w0", "w1", clock=clock, **settings)
    session, _ = made.connect_owner(GATEWAY, [])
    names = [f"r{each}" for each in range(number)]
    for name in names:
        made.reserve(reservation(name, "w0", 10, attempt_id=1), owner=GATEWAY)
    return made, names, session


def attempts(names: list[str]) -> list[tuple[Any, int]]:
    return [(key(name), 1) for name in names]


def test_what_is_freed_before_it_is_looked_at_is_unknown_and_books_no_more() -> None:
    made, names, _ = booked(6, ManualClock())
    takeover = made.begin_takeover(GATEWAY, attempts(names))
    assert not takeover.advance(made.clock(), 2)
    assert made.free(key("r0"), 1) is FreeOutcome.FREED
    assert made.free(key("r5"), 1) is FreeOutcome.FREED
    while not takeover.advance(made.clock(), 2):
        pass
    assert takeover.unknown == attempts(["r5"])
    with pytest.raises(Cancelled):
        made.reserve(reservation("r5", "w0", 10, attempt_id=1), owner=GATEWAY)
    assert loads(made)["w0"][0] == 4
    assert takeover.advance(made.clock(), 2), "it is over once"
    check_scheduler(made)


def test_nothing_that_was_not_looked_at_yet_ends_and_all_that_is_not_listed_ends_afterwards() -> None:
    clock = ManualClock()
    made, names, session = booked(8, clock)
    made.connect_owner(GATEWAY, attempts(names[:7]))
    assert made.stats.ended == {EndReason.OWNER_FORGOT: 1}
    made.disconnect_owner(GATEWAY, session)
    takeover = made.begin_takeover(GATEWAY, attempts(names[:4]))
    assert not takeover.advance(made.clock(), 2)
    clock.advance(60.0)
    assert made.expire() == 0, "its owner is connected, and has not said all"
    made.reserve(reservation("new", "w1", 10, attempt_id=1), owner=GATEWAY)
    while not takeover.advance(made.clock(), 2):
        assert made.stats.ended == {EndReason.OWNER_FORGOT: 1}
    assert made.stats.ended == {EndReason.OWNER_FORGOT: 4}
    assert (loads(made)["w0"][0], loads(made)["w1"][0]) == (4, 1), "what was booked since stays"
    check_scheduler(made)


def test_what_is_asked_for_again_while_its_owner_lists_what_it_has_stays() -> None:
    made, names, _ = booked(4, ManualClock())
    takeover = made.begin_takeover(GATEWAY, attempts(names[:3]))
    assert not takeover.advance(made.clock(), 1)
    # A booking call whose answer was lost; its owner did not know of the booking.
    made.reserve(reservation("r3", "w0", 10, attempt_id=1), owner=GATEWAY)
    assert takeover.advance(made.clock())
    assert len(made.bookings) == 4


def test_what_was_forgotten_and_is_listed_by_the_next_stream_does_not_end_before_that_has_been_looked_at() -> None:
    made, names, _ = booked(600, ManualClock())
    made.connect_owner(GATEWAY, [])
    left = len(made.bookings)
    assert left == 600 - 256, "the rest of what it forgot is still to end"
    takeover = made.begin_takeover(GATEWAY, attempts(names))
    assert not takeover.advance(made.clock(), 10)
    assert made.expire() == 0
    while not takeover.advance(made.clock(), 100):
        assert made.expire() == 0
    assert made.expire() == 0
    assert len(made.bookings) == left


def test_a_later_stream_of_the_same_owner_makes_the_earlier_one_out_of_date() -> None:
    made, names, _ = booked(6, ManualClock())
    takeover = made.begin_takeover(GATEWAY, attempts(names[:3]), 5)
    assert not takeover.advance(made.clock(), 1)
    later = made.begin_takeover(GATEWAY, attempts(names), 6)
    assert not later.advance(made.clock(), 2)
    with pytest.raises(FailedPrecondition, match="later stream"):
        takeover.advance(made.clock())
    assert later.advance(made.clock())
    made.disconnect_owner(GATEWAY, takeover.session)
    assert len(made.bookings) == 6
    assert made.bookings.owners.connected(GATEWAY, made.clock() + 1) > 0
    check_scheduler(made)


@pytest.mark.parametrize("run", range(3))
def test_whatever_happens_between_slices_what_the_last_stream_listed_is_what_is_left(run: int) -> None:
    rng, clock = Random(test_seed() + run), ManualClock()
    made, names, _ = booked(40, clock)
    alive, numbers = set(names), iter(range(10**9))
    for round_ in range(60):
        listed = sorted(name for name in alive if rng.random() < 0.9)
        rng.shuffle(listed)
        takeover = made.begin_takeover(GATEWAY, attempts(listed), round_ + 1)
        since: set[str] = set()
        overtaken = rng.random() < 0.2
        while not takeover.advance(clock(), rng.randint(1, 8)):
            check_scheduler(made)
            match rng.randrange(4):
                case 0 if alive:
                    name = rng.choice(sorted(alive))
                    made.free(key(name), 1)
                    alive.discard(name)
                    since.discard(name)
                case 1:
                    name = f"s{next(numbers)}"
                    made.reserve(reservation(name, rng.choice(["w0", "w1"]), 10, attempt_id=1), owner=GATEWAY)
                    alive.add(name)
                    since.add(name)
                case 2:
                    clock.advance(rng.random() * 20)
                    made.expire()
            if overtaken:
                break
        else:
            alive &= set(listed) | since
            assert {name.request_id for name, _ in takeover.unknown}.isdisjoint(alive)
            assert {booking.key.request_id for booking in made.bookings} == alive
    takeover = made.begin_takeover(GATEWAY, [], 1_000)
    while not takeover.advance(clock()):
        pass
    made.expire()
    assert len(made.bookings) == 0
    check_scheduler(made)


@asynccontextmanager
async def service() -> AsyncIterator[tuple[Scheduler, SchedulerServicer, Any]]:
    core = scheduler("w0", max_active_requests=100_000)
    registry = Registry(core.clock)
    servicer = SchedulerServicer(core, registry, Backends(registry, ServerConfig()))
    async with serving(servicer.add_to) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        yield core, servicer, stub


def hello(names: list[str]) -> scheduler_pb2.LifecycleRequest:
    refs = [scheduler_pb2.RequestRef(model=MODEL, request_id=name, attempt_id=1) for name in names]
    return scheduler_pb2.LifecycleRequest(hello=scheduler_pb2.LifecycleHello(owner_id="gateway-1", in_flight=refs))


class Slices:
    """Stops the takeovers of a scheduler after so many slices, until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, core: Scheduler) -> None:
        self.seen = 0
        self.reached = asyncio.Event()
        begin = core.begin_takeover

        def begin_takeover(*args: Any) -> Any:
            takeover = begin(*args)
            advance = takeover.advance

            def counted(*args: Any) -> bool:
                self.seen += 1
                if self.seen >= 3:
                    self.reached.set()
                return advance(*args)

            monkeypatch.setattr(takeover, "advance", counted)
            return takeover

        monkeypatch.setattr(core, "begin_takeover", begin_takeover)


async def test_others_are_served_between_the_slices_of_a_long_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service() as (core, _, stub):
        names = [f"r{number}" for number in range(MANY)]
        for name in names[::2]:
            core.reserve(reservation(name, "w0", 10, attempt_id=1), owner=GATEWAY)
        slices, turns = Slices(monkeypatch, core), []

        async def others() -> None:
            while True:
                turns.append(slices.seen)
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        stream = stub.Lifecycle()
        await stream.write(hello(names))
        async with asyncio.timeout(DEADLINE_SECONDS):
            answer = await stream.read()
        task.cancel()
        assert [each.request_id for each in answer.unknown_in_flight] == names[1::2]
        assert slices.seen == MANY // SLICE_REQUESTS + 1
        assert set(turns) >= set(range(1, slices.seen)), "others had a turn after each slice"
        assert len(core.bookings) == MANY // 2
        stream.cancel()


async def test_a_stream_that_ends_within_its_hello_leaves_what_it_had_for_the_grace_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with service() as (core, _, stub):
        names = [f"r{number}" for number in range(MANY)]
        for name in names:
            core.reserve(reservation(name, "w0", 10, attempt_id=1), owner=GATEWAY)
        slices = Slices(monkeypatch, core)
        stream = stub.Lifecycle()
        await stream.write(hello(names[:-5]))
        async with asyncio.timeout(DEADLINE_SECONDS):
            await slices.reached.wait()
            stream.cancel()
            while core.bookings.owners.connected(GATEWAY, core.clock()):
                await asyncio.sleep(0.01)
        assert slices.seen < MANY // SLICE_REQUESTS, "it was not at its end"
        assert core.expire() == 0
        assert len(core.bookings) == MANY
        clock = core.clock
        assert isinstance(clock, ManualClock)
        clock.advance(10.1)
        while core.expire():
            pass
        assert core.stats.ended == {EndReason.OWNER_GONE: MANY}
        check_scheduler(core)


async def test_an_owner_hears_of_a_drain_that_begins_within_its_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service() as (core, servicer, stub):
        names = [f"r{number}" for number in range(MANY)]
        slices = Slices(monkeypatch, core)
        stream = stub.Lifecycle()
        await stream.write(hello(names))
        async with asyncio.timeout(DEADLINE_SECONDS):
            await slices.reached.wait()
            assert slices.seen < MANY // SLICE_REQUESTS
            core.drain()
            draining = asyncio.create_task(servicer.drain_streams())
            answer = await stream.read()
            assert answer.draining
            assert len(answer.unknown_in_flight) == MANY
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
            await draining


async def test_a_hello_with_a_name_that_is_none_changes_nothing() -> None:
    async with service() as (core, _, stub):
        core.reserve(reservation("r", "w0", 10, attempt_id=1), owner=GATEWAY)
        stream = stub.Lifecycle()
        await stream.write(hello([f"r{number}" for number in range(5_000)] + [""]))
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id" in await stream.details()
        assert not core.bookings.owners.connected(GATEWAY, core.clock())
        assert len(core.bookings) == 1
