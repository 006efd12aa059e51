"""Lists of upstreams of which the first healthy one is used."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from support.grpc_server import serving
from support.processes import eventually

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc
from kvscout_common import errors
from kvscout_common.errors import KvscoutError
from kvscout_common.identity.client_security import PLAINTEXT
from kvscout_gateway.upstreams import failover
from kvscout_gateway.upstreams.failover import Failover, Member, UpstreamDown

Behaviour = Callable[[], Awaitable[None]]


class Scripted(scheduler_pb2_grpc.SchedulerServicer):
    """Answers Select as it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.cost = 0.0
        self.error: Exception | None = None
        self.hangs = False

    async def Select(self, request: Any, context: Any) -> scheduler_pb2.SelectResponse:
        self.calls += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return scheduler_pb2.SelectResponse(cost=self.cost)


@asynccontextmanager
async def two() -> AsyncIterator[tuple["Failover[Any]", Scripted, Scripted]]:
    """A list of two services in this process."""
    servicers = [Scripted(), Scripted()]  # type: ignore[abstract]  # the rest answers UNIMPLEMENTED
    servicers[1].cost = 1.0
    schedulers: Failover[Any] = Failover("scheduler", [], scheduler_pb2_grpc.SchedulerStub, PLAINTEXT)
    async with AsyncExitStack() as stack:
        for index, servicer in enumerate(servicers):

            def add(server: grpc.aio.Server, servicer: Scripted = servicer) -> None:
                scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server)

            channel = await stack.enter_async_context(serving(add))
            schedulers.members.append(
                Member("scheduler", f"{index}", channel, scheduler_pb2_grpc.SchedulerStub(channel))
            )
        yield schedulers, servicers[0], servicers[1]


async def select(schedulers: "Failover[Any]", timeout_seconds: float = 10.0, **options: Any) -> float:
    answer, _ = await schedulers.call(
        lambda stub: stub.Select, scheduler_pb2.SelectRequest(), timeout_seconds=timeout_seconds, **options
    )
    cost: float = answer.cost
    return cost


async def test_the_first_one_is_used_while_it_answers() -> None:
    async with two() as (schedulers, first, second):
        assert [await select(schedulers) for _ in range(3)] == [0, 0, 0]
        first.error = errors.ResourceExhausted("all busy")
        with pytest.raises(errors.ResourceExhausted):
            await select(schedulers)
        first.error = errors.Unavailable("no worker now")
        with pytest.raises(errors.Unavailable, match="no worker now"):
            await select(schedulers)
        assert (first.calls, second.calls) == (5, 0)
        assert schedulers.members[0].failures == 0


@pytest.mark.parametrize(
    "error",
    [
        errors.Draining("bye"),
        errors.Unauthenticated("who?"),
        errors.PermissionDenied("no"),
        errors.Unimplemented("what?"),
        errors.InternalError("oops"),
        RuntimeError("a defect"),
    ],
)
async def test_answers_about_the_member_itself_lead_to_the_next(error: Exception) -> None:
    async with two() as (schedulers, first, second):
        first.error = error
        assert await select(schedulers) == 1
        assert await select(schedulers) == 1
        assert first.calls == 1, "one that just failed is passed over"
        assert schedulers.members[0].last_error
        second.error = error
        with pytest.raises(UpstreamDown):
            await select(schedulers)


async def test_one_that_hangs_leaves_the_next_a_share_of_the_deadline() -> None:
    async with two() as (schedulers, first, _):
        first.hangs = True
        assert await select(schedulers, timeout_seconds=4.0) == 1
        first.hangs = False
        schedulers.members[0].avoid_until = 0.0
        assert await select(schedulers) == 0
        assert schedulers.members[0].last_error == ""


async def test_one_that_does_not_know_yet_is_passed_over_and_its_answer_is_kept() -> None:
    async with two() as (schedulers, first, second):

        def is_stale(member: Member[Any], error: KvscoutError) -> bool:
            return isinstance(error, errors.NotFound)

        first.error = errors.NotFound("never seen")
        assert await select(schedulers, is_stale=is_stale) == 1
        second.error = errors.NotFound("never seen")
        with pytest.raises(errors.NotFound):
            await select(schedulers, is_stale=is_stale)
        first.error = RuntimeError("a defect")
        with pytest.raises(errors.NotFound):
            await select(schedulers, is_stale=is_stale)


async def test_an_empty_list_is_down() -> None:
    with pytest.raises(UpstreamDown, match="no scheduler is configured"):
        await select(Failover("scheduler", [], scheduler_pb2_grpc.SchedulerStub, PLAINTEXT))


def addresses(schedulers: "Failover[Any]") -> list[str]:
    return [member.address for member in schedulers.members]


async def test_the_addresses_of_a_name_stand_in_its_place_in_an_order_that_all_gateways_have() -> None:
    given = ["10.0.0.9:1", "dns://svc:7", "10.0.0.8:1"]
    schedulers: Failover[Any] = Failover("scheduler", given, scheduler_pb2_grpc.SchedulerStub, PLAINTEXT)
    assert addresses(schedulers) == ["10.0.0.9:1", "10.0.0.8:1"]
    joined, left = schedulers.resolved("dns://svc:7", ["10.0.0.10:7", "10.0.0.2:7"])
    assert ([member.address for member in joined], left) == (["10.0.0.2:7", "10.0.0.10:7"], [])
    assert addresses(schedulers) == ["10.0.0.9:1", "10.0.0.2:7", "10.0.0.10:7", "10.0.0.8:1"]
    kept = schedulers.members[2]
    joined, left = schedulers.resolved("dns://svc:7", ["[fd00::1]:7", "10.0.0.10:7", "10.0.0.8:1"])
    assert ([member.address for member in joined], [member.address for member in left]) == (
        ["[fd00::1]:7"],
        ["10.0.0.2:7"],
    )
    assert addresses(schedulers) == ["10.0.0.9:1", "10.0.0.8:1", "10.0.0.10:7", "[fd00::1]:7"]
    assert schedulers.members[2] is kept
    await schedulers.close()


async def test_who_left_the_list_answers_for_a_while_and_is_unavailable_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "RETIRE_SECONDS", 0.05)
    servicer = Scripted()  # type: ignore[abstract]
    ports: list[int] = []
    async with serving(
        lambda server: scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server), on_port=ports.append
    ):
        schedulers: Failover[Any] = Failover("scheduler", ["dns://svc:7"], scheduler_pb2_grpc.SchedulerStub, PLAINTEXT)
        schedulers.resolved("dns://svc:7", [f"127.0.0.1:{ports[0]}"])
        [member] = schedulers.members
        schedulers.resolved("dns://svc:7", [])
        with pytest.raises(UpstreamDown, match="no scheduler is configured"):
            await select(schedulers)
        request = scheduler_pb2.SelectRequest()
        await member.call(lambda stub: stub.Select, request, 5.0)
        await eventually(lambda: member.closed)
        with pytest.raises(errors.Unavailable, match="no longer there"):
            await member.call(lambda stub: stub.Select, request, 5.0)
        await schedulers.close()
