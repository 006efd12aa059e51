"""Which scheduler a gateway is attached to, and that what runs is booked there, once."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from support.processes import eventually
from support.scripted_scheduler import FULL, ScriptedScheduler, scripted_scheduler

from kvscout_common import errors
from kvscout_common.identity.client_security import PLAINTEXT
from kvscout_common.worker import Role, WorkerRank
from kvscout_gateway.upstreams.failover import Member, UpstreamDown
from kvscout_gateway.upstreams.scheduler import attachment, lifecycle, queue_wait
from kvscout_gateway.upstreams.scheduler.attachment import Attachment
from kvscout_gateway.upstreams.scheduler.bookings import Bookings
from kvscout_gateway.upstreams.scheduler.link import SchedulerLink, SchedulerMember, Schedulers
from kvscout_gateway.upstreams.scheduler.queue_wait import WaitedTooLong
from kvscout_gateway.upstreams.scheduler.remote import RemoteScheduler
from kvscout_gateway.values.booking import Booking
from kvscout_gateway.values.decision import Choice
from kvscout_gateway.values.overlaps import Overlaps
from kvscout_gateway.values.prompt import Prompt
from kvscout_gateway.values.request import Request


@dataclass
class World:
    """A gateway's hop to its schedulers, and these."""

    scripted: list[ScriptedScheduler]
    remote: RemoteScheduler
    learns: set[str] = field(default_factory=set)
    """Models whose workers a scheduler gets when it is brought up to date."""

    @property
    def schedulers(self) -> Schedulers:
        return self.remote.peers

    @property
    def bookings(self) -> Bookings:
        return self.remote.bookings

    @property
    def attachment(self) -> Attachment:
        return self.remote.attachment

    @property
    def attached(self) -> list[bool]:
        """To which of them there is a stream."""
        return [member.stub.stream is not None for member in self.schedulers.members]

    def runs(self, request_id: str, scheduler: SchedulerMember | None = None) -> Booking:
        """A request that runs."""
        name = ("", "m", Role.AGGREGATED, request_id, 0)
        booking = Booking(*name, scheduler, WorkerRank("w", 0), isl_tokens=10, cached_tokens=4)
        self.remote.hold(booking)
        return booking


@asynccontextmanager
async def world(
    count: int = 1, prepare: Callable[[World], object] = lambda world: None, *, timeout_seconds: float = 5.0
) -> AsyncIterator[World]:
    """A gateway and a count of schedulers in this process."""

    def resync(member: Member[SchedulerLink]) -> asyncio.Future[float]:
        lacked = any(one.unknown_models & made.learns for one in made.scripted)
        for one in made.scripted:
            one.unknown_models -= made.learns
        resynced: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        resynced.set_result(time.monotonic() if lacked else -math.inf)
        return resynced

    async with AsyncExitStack() as stack:
        remote = RemoteScheduler([], PLAINTEXT, timeout_seconds=timeout_seconds, queue_wait_seconds=20.0, resync=resync)
        scripted = []
        for number in range(count):
            servicer, channel = await stack.enter_async_context(scripted_scheduler())
            scripted.append(servicer)
            remote.peers.members.append(Member("scheduler", f"{number}", channel, SchedulerLink(channel)))
        made = World(scripted, remote)
        prepare(made)
        task = asyncio.create_task(remote.attachment.run())
        try:
            yield made
        finally:
            for servicer in scripted:
                servicer.goes_on.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await remote.attachment.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(attachment, "REBOOK_SECONDS", 0.01)
    monkeypatch.setattr(lifecycle, "PROBE_SECONDS", 0.02)


async def until(condition: Callable[[], object], what: str = "condition") -> None:
    await eventually(condition, what=what)


class Reserved(NamedTuple):
    """A scheduler's answer, and what was booked; None for a query."""

    choice: Choice
    booking: Booking | None


async def ask(
    world: World, request_id: str, *, model: str = "m", wait: float | None = None, owned: bool = True
) -> Reserved:
    """Has a request booked."""
    request = Request(model, "default", Prompt(1), request_id=request_id, owned=owned, queue_wait_seconds=wait)
    booking = Booking("", model, Role.AGGREGATED, request_id, 0) if request_id else None

    async def refresh() -> Overlaps:
        return Overlaps()

    answer, _ = await world.remote.reserve(request, Overlaps(), booking, knows_workers=True, refresh=refresh)
    return Reserved(answer, booking)


def chosen(reserved: Reserved) -> str:
    return reserved.choice.worker.worker_id


async def test_what_a_scheduler_does_not_know_is_booked_there_again_with_its_phase() -> None:
    def prepare(made: World) -> None:
        made.scripted[0].booked["known"] = "w"
        made.runs("known", made.schedulers.members[0])
        made.runs("unknown", made.schedulers.members[0]).prefilled = True
        made.runs("never booked")

    async with world(prepare=prepare) as made:
        [scheduler], [member] = made.scripted, made.schedulers.members
        await until(lambda: len(scheduler.booked) == 3)
        await until(lambda: "prefill_complete unknown" in scheduler.received)
        assert sorted(scheduler.hellos[0]) == ["known", "never booked", "unknown"]
        assert sorted(what for what in scheduler.received if what.startswith("reserve")) == [
            "reserve never booked",
            "reserve unknown",
        ]
        assert member.stub.rebooked == 2
        # They ran before: from what follows nothing is to be learned.
        assert {name: (each.running, each.prefill_complete) for name, each in scheduler.reserved.items()} == {
            "unknown": (True, True),
            "never booked": (True, False),
        }
        # What a scheduler knows of the first token is not known, whatever it was sent.
        assert scheduler.received.count("prefill_complete unknown") == 1
        scheduler.cut()
        await until(lambda: len(scheduler.hellos) == 2)
        # A replica may have had it meanwhile that did not know of that.
        await until(lambda: scheduler.received.count("prefill_complete unknown") == 2)
        assert member.stub.rebooked == 2, "a connection that broke loses nothing"


async def test_a_booking_that_the_scheduler_cannot_take_yet_is_tried_again() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        booking = made.runs("r")
        booking.model = "nobody"  # its worker is not registered
        await until(lambda: made.scripted[0].received.count("reserve r") > 1)
        booking.model = "m"
        await until(lambda: made.scripted[0].booked)
        made.remote.free(booking)
        await until(lambda: not made.scripted[0].booked)
        assert made.scripted[0].received.count("free r") == 1


@pytest.mark.parametrize("owned", [True, False])
async def test_a_scheduler_without_the_workers_gets_them_and_decides(owned: bool) -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        made.learns.add("nobody")
        assert chosen(await ask(made, "r", model="nobody", owned=owned)) == ("w" if owned else "unary")
        made.scripted[0].unknown_models.add("other")
        with pytest.raises(errors.NotFound):
            await ask(made, "s", model="other", owned=owned)


async def test_what_was_freed_while_there_was_no_scheduler_stays_free() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        assert chosen(await ask(made, "r")) == "w"
        booking = made.runs("r", made.schedulers.members[0])
        made.scripted[0].refuses = errors.Unavailable("away")
        made.scripted[0].cut()
        await until(lambda: made.attached == [False])
        made.remote.free(booking)
        assert made.scripted[0].booked
        made.scripted[0].refuses = None
        await until(lambda: made.attached == [True])
        await until(lambda: not made.scripted[0].booked)


async def test_it_moves_to_the_next_one_when_one_drains_and_back_when_that_is_stable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attachment, "STABLE_SECONDS", 1.5)
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
        made.remote.free(booking)
        await until(lambda: not first.booked)
        assert (first.received.count("free r"), second.received.count("free r")) == (1, 0)
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


async def test_a_request_whose_stream_breaks_is_booked_over_the_next_one_as_another_attempt() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        stream = made.schedulers.members[0].stub.stream
        assert stream is not None
        made.scripted[0].goes_on.clear()
        asking = asyncio.create_task(ask(made, "r"))
        await until(lambda: stream.messages == 1)
        made.scripted[0].cut()
        made.scripted[0].goes_on.set()
        decision = await asking
        assert decision.booking is not None
        assert (chosen(decision), bool(decision.booking.attempt_id)) == ("w", True)
        # What may have been booked all the same is freed before.
        assert made.scripted[0].received[-2:] == ["free r", "select_and_reserve r"]


async def test_where_no_scheduler_is_left_requests_are_not_kept_waiting() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        made.scripted[0].refuses = errors.Unavailable("away")
        made.scripted[0].cut()
        for _ in range(3):
            with pytest.raises(UpstreamDown, match="away"):
                await ask(made, "r")
        made.scripted[0].refuses = None
        await until(lambda: made.attached == [True])
        assert chosen(await ask(made, "r")) == "w"


async def test_a_caller_who_runs_the_request_gets_a_lease_by_a_unary_call() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        assert chosen(await ask(made, "r", owned=False)) == "unary"
        assert made.scripted[0].unary == ["select_and_reserve r"]


async def test_who_waits_in_line_gets_the_place_when_there_is_one() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        asking = asyncio.create_task(ask(made, "r", model=FULL))
        # Asked for again, with fresh overlaps, after a second.
        await until(lambda: made.scripted[0].received.count("select_and_reserve r") == 2)
        assert not asking.done()
        await made.scripted[0].make_room()
        assert (await asking).choice.worker.worker_id == "late"


async def test_who_waits_too_long_is_refused_and_freed() -> None:
    async with world() as made:
        await until(lambda: made.attached == [True])
        with pytest.raises(WaitedTooLong):
            await ask(made, "r", model=FULL, wait=0.4)
        await until(lambda: "free r" in made.scripted[0].received)


async def test_who_waits_too_long_by_the_clock_of_the_scheduler_is_refused() -> None:
    """A call for somebody else, whose deadline passes at the scheduler a moment before it does here."""
    async with world() as made:
        scripted = made.scripted[0]
        await until(lambda: made.attached == [True])
        asking = asyncio.create_task(ask(made, "r", model=FULL, owned=False))
        await until(lambda: scripted.unary)
        scripted.line_ends.set()
        with pytest.raises(WaitedTooLong):
            await asking


@pytest.mark.parametrize("owned", [True, False])
async def test_who_waits_at_a_scheduler_that_goes_waits_at_the_next_one(
    owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_wait, "REFRESH_SECONDS", 0.1)
    async with world(2) as made:
        first, second = made.scripted
        await until(lambda: made.attached == [True, False])
        asking = asyncio.create_task(ask(made, "r", model=FULL, owned=owned))
        await until(lambda: "select_and_reserve r" in first.received + first.unary)
        first.refuses = errors.Unavailable("away")
        first.cut()
        await until(lambda: "select_and_reserve r" in second.received + second.unary)
        if owned:
            await until(lambda: second.received.count("select_and_reserve r") > 1)  # with fresh overlaps
            await second.make_room()
            assert chosen(await asking) == "late"
        else:
            second.line_ends.set()
            with pytest.raises(WaitedTooLong):
                await asking


@pytest.mark.parametrize("owned", [True, False])
async def test_a_scheduler_that_hangs_is_left_for_the_next_one(owned: bool) -> None:
    async with world(2, timeout_seconds=3.0) as made:
        await until(lambda: made.attached == [True, False])
        made.scripted[0].goes_on.clear()
        decision = await ask(made, "r", owned=owned)
        assert decision.booking is not None
        assert decision.booking.scheduler is made.schedulers.members[1]
