"""Whose bookings are whose: owners of several tenants, over the wire and between replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from support.grpc_server import serving
from support.replica_world import World
from support.scheduler_builders import MODEL, ManualClock, key, owner, worker

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc
from kvscout_common.errors import FailedPrecondition
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.identity.identity import AccessRole, Identity, TokenTable
from kvscout_common.registry.backends import Backends
from kvscout_common.registry.registry import Registry
from kvscout_common.rpc.channel import call, open_channel
from kvscout_common.settings.config import ServerConfig
from kvscout_scheduler.rpc.servicer import SchedulerServicer
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.settings import SchedulerSettings

CALLERS = {
    "gateway": Identity(AccessRole.ADMIN, "*"),
    "red": Identity(AccessRole.CLIENT, "red"),
    "blue": Identity(AccessRole.CLIENT, "blue"),
    "viewer": Identity(AccessRole.VIEWER, "red"),
}
"""By their token."""


class Caller:
    """Calls with one token."""

    def __init__(self, stub: Any, tenant: str) -> None:
        self.stub = stub
        self._tenant = tenant

    async def open(self, owner_id: str, **fields: Any) -> Any:
        """Opens a Lifecycle stream; the call, after its hello was answered."""
        stream = self.stub.Lifecycle()
        hello = scheduler_pb2.LifecycleHello(owner_id=owner_id, **fields)
        await stream.write(scheduler_pb2.LifecycleRequest(hello=hello, tenant=self._tenant))
        assert await stream.read() is not grpc.aio.EOF
        return stream

    async def book(self, stream: Any, request_id: str) -> None:
        """Books over a stream."""
        selection = scheduler_pb2.SelectRequest(model=MODEL, tenant=self._tenant, isl_tokens=5, request_id=request_id)
        operation = scheduler_pb2.LifecycleOperation(id=1, select_and_reserve=selection)
        await stream.write(scheduler_pb2.LifecycleRequest(operations=[operation], tenant=self._tenant))
        assert [result.code for result in (await stream.read()).results] == [0]

    async def listed(self) -> list[tuple[str, str]]:
        """Request ids and owner ids of what is active."""
        request = scheduler_pb2.ListActiveRequestsRequest(tenant=self._tenant)
        answer = await call(self.stub.ListActiveRequests, request)
        return [(each.request.request_id, each.owner_id) for each in answer.requests]


@asynccontextmanager
async def callers(tmp_path: Path) -> AsyncIterator[tuple[Scheduler, dict[str, Caller]]]:
    """A scheduler with a worker of each tenant, and callers by name."""
    core = Scheduler(SchedulerSettings(), clock=ManualClock(), rng=Random(7))
    for tenant in ("red", "blue"):
        core.workers.worker_added(worker("w", tenant=tenant))
    registry = Registry(ManualClock())
    servicer = SchedulerServicer(core, registry, Backends(registry, ServerConfig()))
    table = TokenTable({sha256(name.encode()).hexdigest(): identity for name, identity in CALLERS.items()})
    ports: list[int] = []
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(servicer.add_to, tokens=table, on_port=ports.append))
        found = {}
        for name, identity in CALLERS.items():
            (tmp_path / name).write_text(name)
            channel = open_channel(f"127.0.0.1:{ports[0]}", ClientSecurity(token_file=tmp_path / name))
            stack.push_async_callback(channel.close)
            tenant = "red" if identity.tenant == "*" else identity.tenant
            found[name] = Caller(scheduler_pb2_grpc.SchedulerStub(channel), tenant)
        yield core, found


async def test_owners_of_two_tenants_with_one_id_touch_nothing_of_each_other(tmp_path: Path) -> None:
    async with callers(tmp_path) as (core, found):
        gateway, red, blue = found["gateway"], found["red"], found["blue"]
        streams = {}
        for each in (gateway, red, blue):
            streams[each] = await each.open("g", opened_unix_us=10**18)
            await each.book(streams[each], f"of {each._tenant} {len(streams)}")
        # Nobody has ended what another booked, is refused for another's stream, or may list what another has.
        assert dict(core.stats.ended) == {}
        again = await blue.open("g", in_flight=[scheduler_pb2.RequestRef(model=MODEL, request_id="of red 2")])
        assert dict(core.stats.ended) == {"owner_forgot": 1}, "its own"
        assert sorted(name for name, _ in await red.listed()) == ["of red 1", "of red 2"]
        for stream in (*streams.values(), again):
            stream.cancel()


async def test_owner_ids_are_told_to_admins_only(tmp_path: Path) -> None:
    async with callers(tmp_path) as (_, found):
        stream = await found["gateway"].open("g")
        await found["gateway"].book(stream, "r")
        assert await found["gateway"].listed() == [("r", "g")]
        for name in ("red", "viewer"):
            assert await found[name].listed() == [("r", "")]
        stream.cancel()


def test_a_stream_from_the_future_keeps_the_owner_out_for_as_long_as_clocks_may_differ() -> None:
    clock = ManualClock()
    made = Scheduler(SchedulerSettings(), clock=clock, rng=Random(7), wall_clock=clock)
    made.connect_owner(owner("g"), [], opened_at=2**64 - 1)
    now = int(clock.now * 1_000_000)
    with pytest.raises(FailedPrecondition, match="later"):
        made.connect_owner(owner("g"), [], opened_at=now)
    clock.advance(1.1)
    made.connect_owner(owner("g"), [], opened_at=now + 1_100_000)


def test_an_owner_is_let_in_at_once_after_the_schedulers_clock_was_set_back() -> None:
    clock, wall = ManualClock(), ManualClock(5_000.0)
    made = Scheduler(SchedulerSettings(), clock=clock, rng=Random(7), wall_clock=wall)
    made.connect_owner(owner("g"), [], opened_at=5_000_000_000)
    wall.now = 2_000.0
    made.connect_owner(owner("g"), [], opened_at=2_000_000_000)


def test_replicas_tell_owners_of_two_tenants_apart() -> None:
    world = World("a", "b")
    red, blue = owner("g", "red"), owner("g", "blue")
    world["a"].core.connect_owner(red, [])
    world["a"].core.connect_owner(blue, [])
    world.book("a", "of red", owner=red)
    world.book("a", "of blue", owner=blue)
    world.settled()
    assert {booking.owner for booking in world["b"].core.bookings} == {red, blue}
    # A replica that comes later has it from a snapshot.
    world.start("c")
    world.settled()
    world["a"].replication.leave()
    world.run(0.1)
    session, unknown = world["c"].core.connect_owner(red, [(key("of red"), 1), (key("of blue"), 1)])
    assert [name.request_id for name, _ in unknown] == ["of blue"]
    world.run(15.0)
    assert {booking.key.request_id for booking in world["c"].core.bookings} == {"of red", "of blue"}
    world["c"].core.disconnect_owner(red, session)
