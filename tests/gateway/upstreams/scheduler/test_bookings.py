"""Bookings: freed exactly once, whatever the streams to schedulers do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.processes import eventually
from support.scripted_scheduler import ScriptedScheduler, scripted_scheduler

from kvscout_common.worker import Role, WorkerRank
from kvscout_gateway.upstreams.failover import Member
from kvscout_gateway.upstreams.scheduler.bookings import Bookings
from kvscout_gateway.upstreams.scheduler.lifecycle import CLOSE_SECONDS, LifecycleStream, name_of
from kvscout_gateway.upstreams.scheduler.link import SchedulerLink, SchedulerMember
from kvscout_gateway.values.booking import Booking


@asynccontextmanager
async def held() -> AsyncIterator[tuple[Bookings, ScriptedScheduler, SchedulerMember]]:
    """Bookings at a scheduler in this process, to which there is a stream."""
    async with scripted_scheduler() as (scheduler, channel):
        member: SchedulerMember = Member("scheduler", "here", channel, SchedulerLink(channel))
        stream = LifecycleStream(member.stub.open_lifecycle, "me", [])
        await stream.hello
        member.stub.use(stream)
        bookings = Bookings()
        stream.closed.add_done_callback(lambda closed: bookings.stream_ended(stream))
        yield bookings, scheduler, member
        await stream.close(CLOSE_SECONDS)


def booking(member: SchedulerMember | None, request_id: str = "r") -> Booking:
    return Booking("", "m", Role.AGGREGATED, request_id, 0, member, WorkerRank("w", 0))


async def until_heard(scheduler: ScriptedScheduler, *what: str) -> None:
    await eventually(lambda: scheduler.received == list(what), what=f"{what}, received {scheduler.received}")


async def test_reports_come_once_and_in_order() -> None:
    async with held() as (bookings, scheduler, member):
        one = booking(member)
        bookings.hold(one)
        bookings.prefill_complete(one)
        bookings.free(one)
        bookings.free(one)
        bookings.prefill_complete(one)
        await until_heard(scheduler, "prefill_complete r", "free r")
        assert bookings.undelivered == 0


async def test_a_booking_that_was_never_taken_over_is_not_freed() -> None:
    async with held() as (bookings, scheduler, member):
        bookings.free(booking(member, "never"))
        one = booking(member)
        bookings.hold(one)
        bookings.free(one)
        await until_heard(scheduler, "free r")


@pytest.mark.parametrize("listed_first", [True, False])
async def test_what_ends_around_a_hello_that_lists_it_is_freed_once(listed_first: bool) -> None:
    async with held() as (bookings, scheduler, member):
        one = booking(member)
        bookings.hold(one)
        listed = bookings.in_flight()
        stream = member.stub.drop_stream()
        assert stream is not None
        if not listed_first:
            bookings.free(one)  # no stream is open: the hello is under way
            assert bookings.undelivered == 1
        member.stub.use(stream)
        bookings.listed(member, listed, ())
        if listed_first:
            bookings.free(one)
        await until_heard(scheduler, "free r")


async def test_what_the_scheduler_does_not_know_is_unbooked_there() -> None:
    async with held() as (bookings, _, member):
        known, unknown = booking(member, "known"), booking(member, "unknown")
        for one in (known, unknown):
            bookings.hold(one)
        bookings.listed(member, bookings.in_flight(), {name_of(unknown.ref)})
        assert bookings.unbooked(member) == [unknown]
        assert (known.scheduler, unknown.scheduler) == (member, None)


async def test_a_free_that_no_scheduler_acknowledges_is_counted() -> None:
    async with held() as (bookings, scheduler, member):
        one = booking(member)
        bookings.hold(one)
        scheduler.goes_on.clear()
        bookings.free(one)
        scheduler.cut()
        scheduler.goes_on.set()
        await eventually(lambda: bookings.undelivered == 1)
