"""Lifecycle streams over a real server: operations, owners that go and come back, what waits, what is refused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
import pytest
from support.grpc_server import serving
from support.processes import eventually
from support.scheduler_builders import BLOCK, MODEL, ManualClock, loads, worker

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.hashing import native_available
from kvscout_common.registry.backends import Backends
from kvscout_common.registry.registry import Registry
from kvscout_common.settings.config import ServerConfig
from kvscout_common.worker import ALL_TENANTS, WorkerRank
from kvscout_scheduler.messages.codec import MAX_OPERATIONS, Codec
from kvscout_scheduler.policies import PolicyRegistry
from kvscout_scheduler.policies.builtin import Kv, LeastLoaded
from kvscout_scheduler.policies.kv_time import KvTime
from kvscout_scheduler.rpc.servicer import SchedulerServicer
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.reservation import OwnerName
from kvscout_scheduler.values.settings import SchedulerSettings

DEADLINE_SECONDS = 30.0
IDLE = (0, 0, 0)


def ref(request_id: str, **fields: Any) -> scheduler_pb2.RequestRef:
    return scheduler_pb2.RequestRef(model=MODEL, request_id=request_id, **fields)


def selection(request_id: str, *, isl: int = 2 * BLOCK, **fields: Any) -> scheduler_pb2.SelectRequest:
    return scheduler_pb2.SelectRequest(model=MODEL, isl_tokens=isl, request_id=request_id, **fields)


class Owner:
    """One owner's stream."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._ids = itertools.count(1)
        self.results: dict[int, Any] = {}
        self.draining = False
        self.unknown: list[str] = []

    async def hello(
        self,
        owner_id: str = "gateway-1",
        in_flight: Any = (),
        tenant: str = "",
        heartbeat_ms: int = 0,
        acknowledges: bool = False,
    ) -> None:
        hello = scheduler_pb2.LifecycleHello(
            owner_id=owner_id,
            in_flight=in_flight,
            heartbeat_ms=heartbeat_ms,
            acknowledges_in_order=acknowledges,
        )
        await self._call.write(scheduler_pb2.LifecycleRequest(hello=hello, tenant=tenant))
        await self.read()

    async def send(self, *operations: dict[str, Any]) -> list[int]:
        """Sends operations in one message; returns their ids."""
        made = [scheduler_pb2.LifecycleOperation(id=next(self._ids), **operation) for operation in operations]
        await self._call.write(scheduler_pb2.LifecycleRequest(operations=made))
        return [operation.id for operation in made]

    async def read(self) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            message = await self._call.read()
        assert message is not grpc.aio.EOF
        self.draining |= message.draining
        self.unknown += [name.request_id for name in message.unknown_in_flight]
        self.results.update({result.id: result for result in message.results})

    async def ask(self, *operations: dict[str, Any]) -> list[Any]:
        """Sends operations and waits for all their results, in the order asked."""
        ids = await self.send(*operations)
        while not all(number in self.results for number in ids):
            await self.read()
        return [self.results[number] for number in ids]

    async def status(self) -> grpc.StatusCode:
        async with asyncio.timeout(DEADLINE_SECONDS):
            code: grpc.StatusCode = await self._call.code()
            return code

    async def done(self) -> None:
        await self._call.done_writing()

    def cancel(self) -> None:
        self._call.cancel()


@pytest.fixture(params=[pytest.param(True, id="packed"), pytest.param(False, id="messages")], autouse=True)
def codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether streams are carried and read by the extension, where that is there, or by grpcio and as messages."""
    available = request.param and native_available()
    monkeypatch.setattr("kvscout_scheduler.messages.codec.native_available", lambda: available)


@asynccontextmanager
async def service(
    *worker_ids: str, policies: PolicyRegistry | None = None, **settings: Any
) -> AsyncIterator[tuple[Scheduler, ManualClock, SchedulerServicer, Callable[[], Owner]]]:
    clock = ManualClock()
    core = Scheduler(SchedulerSettings(**{"policy": "kv", **settings}), clock=clock, rng=Random(7), policies=policies)
    for worker_id in worker_ids:
        core.workers.worker_added(worker(worker_id, max_num_batched_tokens=1000))
    registry = Registry(clock)
    servicer = SchedulerServicer(core, registry, Backends(registry, ServerConfig()))

    native = Codec("").native
    async with serving(servicer.add_to, native=native) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        yield core, clock, servicer, lambda: Owner(stub.Lifecycle())


async def test_ends_of_prefills_and_requests_are_acknowledged_by_later_results() -> None:
    async with service("a") as (core, _, _, owner):
        stream = owner()
        await stream.hello(acknowledges=True)
        await stream.ask({"select_and_reserve": selection("r")}, {"select_and_reserve": selection("s")})
        ended = await stream.send({"prefill_complete": ref("r"), "age_us": 5}, {"free": ref("r"), "age_us": 5})
        await eventually_freed(core, 1)
        (probe,) = await stream.ask({"renew": scheduler_pb2.RenewRequest(requests=[ref("s")])})
        assert probe.code == 0
        assert not set(ended) & stream.results.keys()
        with_others = await stream.send({"free": ref("s")}, {"prefill_complete": ref("s")})
        await stream.read()
        assert {number: result.code for number, result in stream.results.items() if number in with_others} == {
            with_others[1]: grpc.StatusCode.NOT_FOUND.value[0]
        }
        await stream.done()
        assert await stream.status() is grpc.StatusCode.OK


async def eventually_freed(core: Scheduler, left: int) -> None:
    await eventually(lambda: len(core.bookings) == left)


async def test_every_operation_is_answered_by_its_id_in_one_message() -> None:
    async with service("a", "b", track_output_blocks=True) as (core, _, _, owner):
        stream = owner()
        await stream.hello()
        on_b = types_pb2.Overlaps(worker_ids=["b"], device_blocks=[1])
        selected, booked, again = await stream.ask(
            {"select": selection("", block_hashes=[1, 2], overlaps=on_b)},
            {"select_and_reserve": selection("r", block_hashes=[1, 2], overlaps=on_b)},
            {"select_and_reserve": selection("r", block_hashes=[1, 2])},
        )
        assert {result.select.worker.worker_id for result in (selected, booked, again)} == {"b"}
        assert loads(core)["b"] == (1, BLOCK, 2)
        reserve = scheduler_pb2.ReserveRequest(
            model=MODEL, request_id="s", worker=workers_pb2_rank("a"), isl_tokens=BLOCK, cached_tokens=4
        )
        reserved, first, second, output, renewed = await stream.ask(
            {"reserve": reserve},
            {"prefill_complete": ref("r")},
            {"prefill_complete": ref("r")},
            {"add_output": scheduler_pb2.AddOutputRequest(model=MODEL, request_id="r", blocks=3)},
            {"renew": scheduler_pb2.RenewRequest(requests=[ref("r"), ref("nobody")])},
        )
        assert reserved.reserve.uncached_tokens == BLOCK - 4
        assert (first.prefill_complete.changed, second.prefill_complete.changed) == (True, False)
        assert output.add_output.output_blocks == 3
        assert list(renewed.renew.unknown) == [1]
        freed, unknown = await stream.ask({"free": ref("r")}, {"free": ref("nobody")})
        assert freed.free.outcome == scheduler_pb2.FREE_OUTCOME_FREED
        assert unknown.free.outcome == scheduler_pb2.FREE_OUTCOME_UNKNOWN
        assert loads(core)["b"] == IDLE
        stream.cancel()


def workers_pb2_rank(worker_id: str) -> types_pb2.WorkerRank:
    return types_pb2.WorkerRank(worker_id=worker_id)


async def test_an_operation_that_fails_has_its_status_and_the_stream_goes_on() -> None:
    async with service("a") as (core, _, _, owner):
        stream = owner()
        await stream.hello()
        results = await stream.ask(
            {"select": scheduler_pb2.SelectRequest(isl_tokens=1)},
            {"select_and_reserve": selection("r", pinned_worker_id="nobody")},
            {"prefill_complete": ref("nobody")},
            {"free": ref("")},
            {"renew": scheduler_pb2.RenewRequest()},
            {},
            {"select_and_reserve": selection("r")},
        )
        codes = [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.NOT_FOUND]
        codes += [grpc.StatusCode.INVALID_ARGUMENT] * 3
        assert [result.code for result in results] == [*(code.value[0] for code in codes), 0]
        assert "model" in results[0].message
        assert "operation" in results[5].message
        assert loads(core)["a"][0] == 1
        stream.cancel()


async def test_a_refusal_says_when_to_try_again() -> None:
    async with service("a", "b") as (core, _, _, owner):
        stream = owner()
        await stream.hello()
        core.cool_downs.report("default", WorkerRank("a", 0), cooldown_seconds=4)
        failed, unknown = await stream.ask(
            {"select_and_reserve": selection("r", pinned_worker_id="a")}, {"prefill_complete": ref("nobody")}
        )
        assert (failed.code, failed.retry_after_seconds) == (grpc.StatusCode.UNAVAILABLE.value[0], 4)
        assert not unknown.HasField("retry_after_seconds")
        stream.cancel()


@pytest.mark.parametrize(
    "first",
    [
        scheduler_pb2.LifecycleRequest(),
        scheduler_pb2.LifecycleRequest(hello=scheduler_pb2.LifecycleHello()),
        scheduler_pb2.LifecycleRequest(hello=scheduler_pb2.LifecycleHello(owner_id="x" * 257)),
        scheduler_pb2.LifecycleRequest(hello=scheduler_pb2.LifecycleHello(owner_id="two\nlines")),
    ],
    ids=["no hello", "no owner", "long", "unprintable"],
)
async def test_a_stream_that_names_no_owner_is_refused(first: scheduler_pb2.LifecycleRequest) -> None:
    async with service("a") as (_, _, _, owner):
        stream = owner()
        await stream._call.write(first)
        assert await stream.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_second_hello_and_too_many_operations_end_the_stream() -> None:
    async with service("a") as (_, _, _, owner):
        stream = owner()
        await stream.hello()
        await stream._call.write(
            scheduler_pb2.LifecycleRequest(hello=scheduler_pb2.LifecycleHello(owner_id="gateway-1"))
        )
        assert await stream.status() is grpc.StatusCode.INVALID_ARGUMENT
        stream = owner()
        await stream.hello()
        await stream.send(*({"free": ref("r")} for _ in range(MAX_OPERATIONS + 1)))
        assert await stream.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_owner_that_is_refused_while_the_answer_to_its_hello_is_on_its_way_hears_of_it() -> None:
    async with service("a") as (_, _, _, owner):
        for _ in range(20):
            stream = owner()
            hello = scheduler_pb2.LifecycleRequest(hello=scheduler_pb2.LifecycleHello(owner_id="gateway-1"))
            await stream._call.write(hello)
            await stream._call.write(hello)
            async with asyncio.timeout(DEADLINE_SECONDS):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    while await stream._call.read() is not grpc.aio.EOF:
                        pass
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def ends_in_sight(core: Scheduler, clock: ManualClock, stream: Owner, bookings: int) -> None:
    """A stream is cancelled, and its bookings end ten seconds later, none earlier."""
    stream.cancel()
    await gone(core)
    clock.advance(9.9)
    assert core.expire() == 0
    clock.advance(0.2)
    assert core.expire() == bookings


async def test_s9b_the_bookings_of_an_owner_that_is_gone_end_after_ten_seconds_and_none_earlier() -> None:
    async with service("a", "b") as (core, clock, _, owner):
        stream = owner()
        await stream.hello()
        await stream.ask(*({"select_and_reserve": selection(f"r{number}")} for number in range(100)))
        clock.advance(1000)
        assert core.expire() == 0, "its stream holds them"
        await ends_in_sight(core, clock, stream, 100)
        assert core.stats.ended == {"owner_gone": 100}
        assert set(loads(core).values()) == {IDLE}


async def test_an_owner_that_promised_heartbeats_is_gone_since_the_last_one() -> None:
    async with service("a") as (core, clock, _, owner):
        stream, silent_of_old = owner(), owner()
        await stream.hello(heartbeat_ms=200)
        await silent_of_old.hello("older release")
        await silent_of_old.ask({"select_and_reserve": selection("kept")})
        await stream.ask({"select_and_reserve": selection("r")})
        # One that has nothing to say stays, whatever the time: empty messages are answered by empty ones.
        for _ in range(7):
            await stream.send()
            await stream.read()
            await asyncio.sleep(0.1)
        assert core.bookings.owners.connected(OwnerName(ALL_TENANTS, "gateway-1"), clock.now) > 0
        assert await stream.status() is grpc.StatusCode.DEADLINE_EXCEEDED
        clock.advance(9.4)
        assert core.expire() == 0
        clock.advance(0.2)
        assert core.expire() == 1, "it was not heard for 0.5 s when its stream ended"
        assert core.stats.ended == {"owner_gone": 1}
        await silent_of_old.ask({"free": ref("kept")})


async def test_an_owner_whose_stream_ends_in_sight_has_all_the_grace_time_however_little_it_had_to_say() -> None:
    async with service("a") as (core, clock, _, owner):
        stream = owner()
        await stream.hello(heartbeat_ms=2000)
        await stream.ask({"select_and_reserve": selection("r")})
        await asyncio.sleep(1.2)  # a step of its patience
        await ends_in_sight(core, clock, stream, 1)


@pytest.mark.parametrize("heartbeat_ms", [99, 60_001])
async def test_a_heartbeat_out_of_range_is_refused_by_its_name(heartbeat_ms: int) -> None:
    async with service("a") as (_, _, _, owner):
        stream = owner()
        hello = scheduler_pb2.LifecycleHello(owner_id="gateway-1", heartbeat_ms=heartbeat_ms)
        await stream._call.write(scheduler_pb2.LifecycleRequest(hello=hello))
        assert await stream.status() is grpc.StatusCode.INVALID_ARGUMENT
        assert "hello.heartbeat_ms" in await stream._call.details()


async def gone(core: Scheduler) -> None:
    """Waits until the server knows that no owner is connected."""

    async def disconnected() -> bool:
        return all(owner.gone_at is not None for owner in core.bookings.owners._owners.values())

    await eventually(disconnected, what="the end of the stream")


async def test_s9b_an_owner_that_comes_back_loses_none_of_what_it_lists() -> None:
    async with service("a") as (core, clock, _, owner):
        stream = owner()
        await stream.hello()
        await stream.ask(*({"select_and_reserve": selection(f"r{number}", attempt_id=7)} for number in range(3)))
        stream.cancel()
        await gone(core)
        clock.advance(5)
        back = owner()
        in_flight = [ref("r0", attempt_id=7), ref("r1", attempt_id=7), ref("never", attempt_id=1)]
        await back.hello(in_flight=in_flight)
        # r2 ended meanwhile, and nobody told.
        assert back.unknown == ["never"]
        clock.advance(1000)
        assert core.expire() == 0
        assert core.stats.ended == {"owner_forgot": 1}
        assert loads(core)["a"][0] == 2
        back.cancel()


async def test_a_stream_that_replaces_another_keeps_the_bookings() -> None:
    async with service("a") as (core, clock, _, owner):
        first, second = owner(), owner()
        await first.hello()
        await first.ask({"select_and_reserve": selection("r")})
        await second.hello(in_flight=[ref("r")])
        first.cancel()
        await second.ask({"free": ref("nothing")})
        clock.advance(1000)
        core.expire()
        assert loads(core)["a"][0] == 1
        second.cancel()


async def test_what_waits_in_line_is_answered_later_and_does_not_hold_up_the_rest() -> None:
    async with service("a", queue_threshold=0.5) as (_, _, _, owner):
        stream = owner()
        await stream.hello()
        await stream.ask({"select_and_reserve": selection("long", isl=600)})
        (waiting,) = await stream.send({"select_and_reserve": selection("r")})
        (other,) = await stream.ask({"select": selection("")})
        assert other.select.worker.worker_id == "a"
        assert waiting not in stream.results
        await stream.ask({"prefill_complete": ref("long")})
        while waiting not in stream.results:
            await stream.read()
        assert stream.results[waiting].select.worker.worker_id == "a"
        (queued,) = await stream.send({"select_and_reserve": selection("x", isl=600)})
        (late,) = await stream.send({"select_and_reserve": selection("y")})
        (freed,) = await stream.ask({"free": ref("y")})
        assert freed.free.outcome == scheduler_pb2.FREE_OUTCOME_DEQUEUED
        assert stream.results[late].code == grpc.StatusCode.CANCELLED.value[0]
        assert stream.results[queued].code == 0
        stream.cancel()


async def test_a_stream_that_ends_takes_its_waiters_with_it() -> None:
    async with service("a", queue_threshold=0.5) as (core, clock, _, owner):
        stream = owner()
        await stream.hello()
        await stream.ask({"select_and_reserve": selection("long", isl=600)})
        await stream.send({"select_and_reserve": selection("r")})
        await stream.ask({"select": selection("")})
        assert len(core.waiting) == 1
        stream.cancel()
        await eventually(lambda: len(core.waiting) == 0, what="an empty line")
        await gone(core)
        clock.advance(11)
        core.expire()
        assert loads(core)["a"] == IDLE


async def test_the_streams_tenant_is_that_of_operations_that_name_none() -> None:
    async with service() as (core, _, _, owner):
        core.workers.worker_added(worker("t", tenant="team"))
        stream = owner()
        await stream.hello(tenant="team")
        booked, failed = await stream.ask(
            {"select_and_reserve": selection("r")}, {"select": selection("", tenant="default")}
        )
        assert booked.select.worker.worker_id == "t"
        assert failed.code == grpc.StatusCode.NOT_FOUND.value[0]
        (freed,) = await stream.ask({"free": ref("r")})
        assert freed.free.outcome == scheduler_pb2.FREE_OUTCOME_FREED
        stream.cancel()


async def test_a_scheduler_that_drains_tells_its_owners_and_ends_their_streams() -> None:
    async with service("a") as (core, _, servicer, owner):
        stream = owner()
        await stream.hello()
        await stream.ask({"select_and_reserve": selection("r")})
        core.drain()
        draining = asyncio.create_task(servicer.drain_streams())
        while not stream.draining:
            await stream.read()
        (refused,) = await stream.ask({"select_and_reserve": selection("s")})
        assert refused.code == grpc.StatusCode.UNAVAILABLE.value[0]
        async with asyncio.timeout(DEADLINE_SECONDS):
            await draining
        assert await stream.status() is grpc.StatusCode.UNAVAILABLE


async def test_an_owner_that_says_goodbye_gets_all_its_results_and_ok() -> None:
    async with service("a") as (_, _, _, owner):
        stream = owner()
        await stream.hello()
        ids = await stream.send(*({"select": selection("")} for _ in range(200)))
        await stream.done()
        while not all(number in stream.results for number in ids):
            await stream.read()
        assert await stream.status() is grpc.StatusCode.OK


class Crashing(LeastLoaded):
    """A policy with a defect."""

    def pick(self, candidates: Any, costs: Any, rng: Random) -> int:
        raise RuntimeError("out of ideas")


async def test_a_policy_that_raises_gives_way_to_the_default_one_and_its_answer_says_so() -> None:
    policies = PolicyRegistry({"kv": Kv, "kv-time": KvTime, "crashing": Crashing})
    async with service("a", policies=policies, queue_threshold=0.5) as (core, _, _, owner):
        stream = owner()
        await stream.hello()
        crashing = types_pb2.RouterConfigOverride(policy="crashing")
        first, replaced, last = await stream.ask(
            {"select_and_reserve": selection("r1", isl=501)},
            {"select_and_reserve": selection("r2", router_config_override=crashing, pinned_worker_id="a")},
            {"prefill_complete": ref("r1")},
        )
        assert (first.code, replaced.code, last.code) == (0, 0, 0)
        assert first.select.policy_problem == ""
        assert replaced.select.policy_problem.startswith("policy 'crashing': RuntimeError: out of ideas (")
        # It had waited, and what ended its wait was somebody else's call.
        assert core.stats.queued == 1
        freed, _ = await stream.ask({"free": ref("r1")}, {"free": ref("r2")})
        assert freed.free.outcome == scheduler_pb2.FREE_OUTCOME_FREED
        assert loads(core) == {"a": IDLE}
