"""Which scheduler a gateway is attached to, and that what runs is booked there, once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.processes import eventually
from support.scripted_scheduler import FULL, ScriptedScheduler, scripted_scheduler

from kvscout.v1 import scheduler_pb2
from kvscout_common import errors
from kvscout_common.identity.client_security import PLAINTEXT
from kvscout_common.worker import WorkerRank
from kvscout_gateway.metrics import GatewayMetrics
from kvscout_gateway.upstreams.failover import Failover, Member
from kvscout_gateway.upstreams.indexer.overlaps import NOTHING_FOUND
from kvscout_gateway.upstreams.scheduler import attachment, link
from kvscout_gateway.upstreams.scheduler.attachment import Attachment
from kvscout_gateway.upstreams.scheduler.booking import Booking, SchedulerMember, Schedulers
from kvscout_gateway.upstreams.scheduler.bookings import Bookings
from kvscout_gateway.upstreams.scheduler.link import (
    LeftInLine,
    PendingReservation,
    Reserved,
    SchedulerLink,
    Selection,
    WaitedTooLong,
)


@dataclass
class World:
    """A gateway's hop to its schedulers, and these."""

    scripted: list[ScriptedScheduler]
    schedulers: Schedulers
    bookings: Bookings
    attachment: Attachment

    @property
    def attached(self) -> list[bool]:
        """To which of them there is a stream."""
        return [member.stub.stream is not None for member in self.schedulers.members]

    def runs(self, request_id: str, scheduler: SchedulerMember | None = None) -> Booking:
        """A request that runs."""
        ref = scheduler_pb2.RequestRef(model="m", request_id=request_id)
        booking = Booking(ref, scheduler, scheduler is None, worker=WorkerRank("w", 0), isl_tokens=10, cached_tokens=4)
        self.bookings.add(booking)
        return booking


@asynccontextmanager
async def world(count: int = 1, prepare: Callable[[World], object] = lambda world: None) -> AsyncIterator[World]:
    """A gateway and so many schedulers in this process."""
    async with AsyncExitStack() as stack:
        schedulers: Schedulers = Failover("scheduler", [], SchedulerLink, PLAINTEXT)
        scripted = []
        for number in range(count):
            servicer, channel = await stack.enter_async_context(scripted_scheduler())
            scripted.append(servicer)
            schedulers.members.append(Member("scheduler", f"{number}", channel, SchedulerLink(channel)))
        metrics = GatewayMetrics(CollectorRegistry())
        bookings = Bookings(schedulers, metrics, lease_seconds=300, timeout_seconds=5)
        attached = Attachment(schedulers, bookings, timeout_seconds=5, resync=lambda member: None)
        made = World(scripted, schedulers, bookings, attached)
        prepare(made)
        task = asyncio.create_task(attached.run())
        try:
            yield made
        finally:
            for servicer in scripted:
                servicer.goes_on.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await attached.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(attachment, "REBOOK_SECONDS", 0.01)
    monkeypatch.setattr(attachment, "HEALTH_SECONDS", 0.01)
    monkeypatch.setattr(attachment, "PROBE_SECONDS", 0.02)


async def until(condition: Callable[[], object], what: str = "condition") -> None:
    async def asked() -> object:
        return condition()

    await eventually(asked, what=what)


async def ask(world: World, request_id: str, *, model: str = "m", timeout: float = 5.0, **line: Any) -> Reserved:
    """Has a request booked that this gateway runs."""
    request = scheduler_pb2.SelectRequest(model=model, request_id=request_id)
    selection = Selection(request.SerializeToString(), NOTHING_FOUND)

    async def refresh() -> Selection:
        return selection

    ref = scheduler_pb2.RequestRef(model=model, request_id=request_id)
    asking = PendingReservation(
        selection, ref, time.monotonic() + line.get("wait", 20.0), refresh, owned=line.get("owned", True)
    )
    member: SchedulerMember = world.schedulers.members[line.get("member", 0)]
    return await member.stub.place(asking, timeout=timeout)


async def test_what_a_scheduler_does_not_know_is_booked_there_again_with_its_phase() -> None:
    def prepare(made: World) -> None:
        made.scripted[0].booked["known"] = "w"
        made.runs("known", made.schedulers.members[0])
        made.runs("unknown", made.schedulers.members[0]).prefilled = True
        made.runs("never booked")

    async with world(prepare=prepare) as made:
        [scheduler], [member] = made.scripted, made.schedulers.members
        await until(lambda: len(scheduler.booked) == 3)
        await until(lambda: "prefill_complete unknown" in scheduler.heard)
        assert sorted(scheduler.hellos[0]) == ["known", "never booked", "unknown"]
        assert sorted(what for what in scheduler.heard if what.startswith("reserve")) == [
            "reserve never booked",
            "reserve unknown",
        ]
        assert member.stub.rebooked == 2
        # They ran before: from what follows nothing is to be learned.
        assert {name: (each.running, each.prefill_complete) for name, each in scheduler.reserved.items()} == {
            "unknown": (True, True),
            "never booked": (True, False),
        }
        # A scheduler of an older release knows nothing of that, and is told of the first token as ever.
        assert scheduler.heard.count("prefill_complete unknown") == 1
        scheduler.cut()
        await until(lambda: len(scheduler.hellos) == 2)
        # A replica may have had it meanwhile that had not heard of that.
        await until(lambda: scheduler.heard.count("prefill_complete unknown") == 2)
        assert member.stub.rebooked == 2, "a connection that broke loses nothing"


async def test_a_booking_that_the_scheduler_cannot_take_yet_is_tried_again() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        booking = made.runs("r")
        booking.ref.model = "nobody"  # its worker is not registered
        await until(lambda: made.scripted[0].heard.count("reserve r") > 1)
        booking.ref.model = "m"
        await until(lambda: made.scripted[0].booked)
        made.bookings.free(booking)
        await until(lambda: not made.scripted[0].booked)
        assert made.scripted[0].heard.count("free r") == 1


async def test_what_was_freed_while_there_was_no_scheduler_stays_free() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        assert (await ask(made, "r")).leased is False
        booking = made.runs("r", made.schedulers.members[0])
        made.scripted[0].refuses = errors.Unavailable("away")
        made.scripted[0].cut()
        await until(lambda: made.attached == [False])
        made.bookings.free(booking)
        assert made.scripted[0].booked
        made.scripted[0].refuses = None
        await until(lambda: made.attached == [True])
        assert not made.scripted[0].booked
        await made.bookings.settle()


async def test_it_moves_to_the_next_one_when_one_drains_and_back_when_that_is_stable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attachment, "STABLE_SECONDS", 0.5)
    async with world(2) as made:
        first, second = made.scripted
        await until(lambda: made.attached == [True, False])
        await ask(made, "r")
        booking = made.runs("r", made.schedulers.members[0])
        await first.drain()
        await until(lambda: made.attached == [False, True])
        assert second.booked == {"r": "w"}
        assert booking.scheduler is made.schedulers.members[1]
        assert made.schedulers.preferred()[0] is made.schedulers.members[1]
        for _ in range(3):  # it flaps: well for too short a while
            first.draining = False
            await asyncio.sleep(0.1)
            first.draining = True
            await asyncio.sleep(0.1)
        assert made.attached == [False, True]
        first.draining = False
        await until(lambda: made.attached == [True, False])
        assert first.booked == {"r": "w"}
        made.bookings.free(booking)
        await made.bookings.settle()
        assert not first.booked
        assert (first.heard.count("free r"), second.heard.count("free r")) == (1, 0)
        assert [len(scheduler.hellos) for scheduler in made.scripted] == [2, 1]


async def test_what_runs_moves_from_a_scheduler_that_is_no_longer_on_the_list() -> None:
    async with world(2) as made:
        await until(lambda: made.attached == [True, False])
        gone, stays = made.schedulers.members
        await ask(made, "r")
        booking = made.runs("r", gone)
        made.schedulers.members = [stays]
        made.attachment.left(gone)
        await until(lambda: booking.scheduler is stays)
        assert gone.stub.stream is None
        assert (made.scripted[1].booked, made.schedulers.primary) == ({"r": "w"}, stays)


async def test_a_lease_that_was_left_behind_is_freed_too() -> None:
    async with world(2) as made:
        await until(lambda: made.attached == [True, False])
        first, second = made.schedulers.members
        second_booked = (await ask(made, "r", member=1)).leased  # while the first one was slow
        assert second_booked
        booking = made.runs("r", second)
        booking.leased = True
        await until(lambda: booking.scheduler is first)
        assert made.scripted[0].booked
        assert (booking.leased, booking.elsewhere) == (False, [second])
        made.bookings.free(booking)
        await made.bookings.settle()
        await until(lambda: not made.scripted[0].booked and not made.scripted[1].booked)


async def test_a_scheduler_without_streams_is_asked_by_unary_calls() -> None:
    def prepare(made: World) -> None:
        made.scripted[0].refuses = errors.Unimplemented("no Lifecycle")

    async with world(2, prepare) as made:
        await until(lambda: made.schedulers.primary is made.schedulers.members[0])
        made.scripted[0].refuses = None
        assert await ask(made, "r") == Reserved((await ask(made, "r")).response, leased=True)
        assert made.attached == [False, False]


async def test_a_stream_that_breaks_is_made_up_for_by_a_unary_call() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        stream = made.schedulers.members[0].stub.stream
        assert stream is not None
        made.scripted[0].goes_on.clear()
        asking = asyncio.create_task(ask(made, "r"))
        await until(lambda: stream.messages == 1)
        made.scripted[0].cut()
        made.scripted[0].goes_on.set()
        assert (await asking).response.worker.worker_id == "unary"
        assert made.scripted[0].unary == ["select_and_reserve r"]


async def test_who_waits_in_line_gets_the_place_when_there_is_one() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        asking = asyncio.create_task(ask(made, "r", model=FULL, timeout=0.2))
        # Asked for again, with fresh overlaps, after a second.
        await until(lambda: made.scripted[0].heard.count("select_and_reserve r") == 2)
        assert not asking.done()
        await made.scripted[0].make_room()
        assert (await asking).response.worker.worker_id == "late"


async def test_who_waits_too_long_is_refused_and_freed() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        with pytest.raises(WaitedTooLong):
            await ask(made, "r", model=FULL, timeout=0.2, wait=0.4)
        await until(lambda: "free r" in made.scripted[0].heard)


async def test_who_waits_too_long_by_the_clock_of_the_scheduler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for somebody else, whose deadline passes at the scheduler a moment before it does here."""
    monkeypatch.setattr(link, "ALIVE_SECONDS", 0.01)
    async with world() as made:
        scripted = made.scripted[0]
        await until(lambda: made.attached == [True])
        asking = asyncio.create_task(ask(made, "r", model=FULL, timeout=1.0, owned=False))
        await until(lambda: scripted.statuses > 1)  # after the first answer it counts as waiting
        scripted.line_ends.set()
        with pytest.raises(WaitedTooLong):
            await asking


async def test_who_waits_at_a_scheduler_that_goes_asks_anew() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        asking = asyncio.create_task(ask(made, "r", model=FULL, timeout=0.2))
        stream = made.schedulers.members[0].stub.stream
        await until(lambda: stream is not None and stream.waiting)
        await asyncio.sleep(0.3)  # past the time for asking
        made.scripted[0].cut()
        with pytest.raises(LeftInLine):
            await asking


async def test_a_scheduler_that_hangs_is_slow_not_full() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        made.scripted[0].goes_on.clear()
        with pytest.raises(errors.DeadlineExceeded):
            await ask(made, "r", timeout=0.2)
