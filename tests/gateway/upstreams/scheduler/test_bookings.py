"""Bookings: freed exactly once, renewed while they run, whatever the scheduler does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.grpc_server import serving
from support.processes import eventually

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc
from kvscout_common import errors
from kvscout_common.identity.client_security import PLAINTEXT
from kvscout_gateway.metrics import GatewayMetrics
from kvscout_gateway.upstreams.failover import Failover, Member
from kvscout_gateway.upstreams.scheduler import bookings as keeping
from kvscout_gateway.upstreams.scheduler.booking import Booking
from kvscout_gateway.upstreams.scheduler.bookings import Bookings
from kvscout_gateway.upstreams.scheduler.link import SchedulerLink


class Recording(scheduler_pb2_grpc.SchedulerServicer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.failures: list[Exception] = []
        self.renewed: list[list[str]] = []
        self.open = asyncio.Event()
        self.open.set()

    async def MarkPrefillComplete(self, request: Any, context: Any) -> scheduler_pb2.MarkPrefillCompleteResponse:
        await self.open.wait()
        self.heard.append(f"prefill {request.request_id}")
        return scheduler_pb2.MarkPrefillCompleteResponse()

    async def Free(self, request: Any, context: Any) -> scheduler_pb2.FreeResponse:
        self.heard.append(f"free {request.request_id}")
        if self.failures:
            raise self.failures.pop(0)
        return scheduler_pb2.FreeResponse()

    async def Renew(self, request: Any, context: Any) -> scheduler_pb2.RenewResponse:
        if self.failures:
            raise self.failures.pop(0)
        self.renewed.append([ref.request_id for ref in request.requests])
        return scheduler_pb2.RenewResponse(unknown=[0])


@asynccontextmanager
async def kept(lease_seconds: int = 300) -> AsyncIterator[tuple[Bookings, Recording, "Member[SchedulerLink]"]]:
    """Bookings at a scheduler in this process."""
    recording = Recording()  # type: ignore[abstract]  # the rest answers UNIMPLEMENTED
    async with serving(lambda s: scheduler_pb2_grpc.add_SchedulerServicer_to_server(recording, s)) as channel:
        schedulers: Failover[SchedulerLink] = Failover("scheduler", [], SchedulerLink, PLAINTEXT)
        member = Member("scheduler", "here", channel, SchedulerLink(channel))
        schedulers.members.append(member)
        metrics = GatewayMetrics(CollectorRegistry())
        yield Bookings(schedulers, metrics, lease_seconds=lease_seconds, timeout_seconds=5), recording, member


def booking(member: "Member[SchedulerLink]", request_id: str = "r", tenant: str = "") -> Booking:
    return Booking(scheduler_pb2.RequestRef(model="m", request_id=request_id, tenant=tenant), member)


async def test_reports_come_once_and_in_order() -> None:
    async with kept() as (bookings, recording, member):
        held = booking(member)
        bookings.add(held)
        recording.open.clear()
        bookings.mark_prefill_complete(held)
        bookings.free(held)
        bookings.free(held)
        bookings.mark_prefill_complete(held)
        recording.open.set()
        await bookings.settle()
        assert recording.heard == ["prefill r", "free r"]


async def test_a_booking_that_was_never_taken_over_is_not_freed() -> None:
    async with kept() as (bookings, recording, member):
        bookings.free(booking(member))
        await bookings.settle()
        assert recording.heard == []


async def test_freed_waits_for_the_free_and_for_nothing_else() -> None:
    async with kept() as (bookings, recording, member):
        held = booking(member)
        bookings.add(held)
        await bookings.freed(held)
        bookings.free(held)
        await bookings.freed(held)
        assert recording.heard == ["free r"]


async def test_a_free_is_repeated_until_it_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "RETRY_SECONDS", (0.01,))
    async with kept() as (bookings, recording, member):
        recording.failures = [RuntimeError("a defect"), errors.Draining("bye")]
        held = booking(member)
        bookings.add(held)
        bookings.free(held)
        await eventually(lambda: _after(lambda: len(recording.heard) == 3))
        await bookings.settle()
        assert recording.heard == ["free r"] * 3


async def _after(condition: Any) -> bool:
    return bool(condition())


async def test_a_free_that_is_refused_or_outlived_by_its_lease_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kept() as (bookings, recording, member):
        recording.failures = [errors.InvalidArgument("no")]
        held = booking(member)
        bookings.add(held)
        bookings.free(held)
        await bookings.freed(held)
        assert recording.heard == ["free r"]
    monkeypatch.setattr(keeping, "RETRY_SECONDS", (2.0,))
    async with kept(lease_seconds=1) as (bookings, recording, member):
        recording.failures = [errors.Draining("bye")]
        held = booking(member)
        bookings.add(held)
        bookings.free(held)
        await bookings.freed(held)
        assert recording.heard == ["free r"]


async def test_whoever_stops_tries_once_more_and_does_not_wait() -> None:
    async with kept() as (bookings, recording, member):
        recording.failures = [errors.Draining("bye") for _ in range(100)]
        held = booking(member)
        bookings.add(held)
        bookings.free(held)
        await eventually(lambda: _after(lambda: len(recording.heard) >= 3))  # in a pause of two seconds now
        async with asyncio.timeout(1.5):
            await bookings.settle()
        assert len(recording.heard) == 4


async def test_what_may_have_been_booked_is_freed_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "RETRY_SECONDS", (0.01, 0.01, 100.0))
    async with kept() as (bookings, recording, member):
        recording.failures = [errors.Draining("bye") for _ in range(100)]
        lost = booking(member)
        bookings.free_lost(lost)
        await bookings.freed(lost)
        assert recording.heard == ["free r"] * 3


async def test_leases_of_what_runs_are_renewed_by_scheduler_and_tenant(caplog: pytest.LogCaptureFixture) -> None:
    async with kept() as (bookings, recording, member):
        await bookings.renew_once()
        assert recording.renewed == []
        for name, tenant in (("a", ""), ("b", ""), ("c", "other")):
            bookings.add(booking(member, name, tenant))
        ended = booking(member, "d")
        bookings.add(ended)
        bookings.free(ended)
        await bookings.renew_once()
        assert sorted(map(sorted, recording.renewed)) == [["a", "b"], ["c"]]
        assert "no longer booked" in caplog.text
        recording.failures = [errors.Draining("bye"), errors.Draining("bye")]
        await bookings.renew_once()
        assert "could not renew" in caplog.text
