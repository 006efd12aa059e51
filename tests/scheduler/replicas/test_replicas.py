"""Replicas of the scheduler as processes, with a real NATS: what is shared, forwarded, taken over and survived."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from chaos.members import Member
from chaos.replicas import run as chaos_run
from support.free_ports import free_ports
from support.nats_server import NatsServer, nats_server
from support.processes import eventually
from support.replica_client import MODEL, ReplicaClient, gateway
from support.seeds import test_seed

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.rpc.channel import open_channel

IDLE = (0, 0, 0)
NAMES = ("a", "b", "c")


@asynccontextmanager
async def replicas(*names: str) -> AsyncIterator[tuple[NatsServer, dict[str, ReplicaClient]]]:
    """Schedulers that share bookings, two workers."""
    async with nats_server() as nats, AsyncExitStack() as stack:
        found = {}
        for name in names:
            client = found[name] = ReplicaClient(name, nats.url)
            stack.push_async_callback(client.close)
        await asyncio.gather(*(client.start() for client in found.values()))
        await found[names[0]].register("w0", "w1")
        for client in found.values():
            await eventually(client.knows_workers(2), what="the workers")
        yield nats, found


async def agreed(*clients: ReplicaClient, requests: int) -> dict[str, Any]:
    """Waits until all have the same requests, so many, and the same loads; what they are."""

    async def same() -> Any:
        states = [await client.state() for client in clients]
        alike = all(state == states[0] for state in states) and len(states[0][0]) == requests
        return states[0] if alike else None

    found = await eventually(same, what=f"agreement on {requests} requests")
    return dict(found[0])


async def test_a_booking_is_seen_by_every_replica_and_freed_through_any() -> None:
    async with replicas("a", "b") as (_, found):
        a, b = found["a"], found["b"]
        names = (f"r{number}" for number in itertools.count())

        async def both_forwarded() -> bool:
            """Whether the owner of a request carried both operations out, in the 50 ms that it has."""
            name, before = next(names), await b.rpc("GetReplicas", scheduler_pb2.GetReplicasRequest())
            await a.book(name, attempt_id=1)
            await agreed(a, b, requests=1)
            assert (await b.mark(name, attempt_id=1)).changed
            answer = await b.rpc("Free", scheduler_pb2.FreeRequest(model=MODEL, request_id=name, attempt_id=1))
            assert answer.outcome == scheduler_pb2.FREE_OUTCOME_FREED
            await agreed(a, b, requests=0)
            known = await b.rpc("GetReplicas", scheduler_pb2.GetReplicasRequest())
            assert [(each.replica_id, each.self) for each in known.replicas] == [("b", True), ("a", False)]
            assert known.problem == ""
            changes = known.forwarded - before.forwarded, known.taken_over - before.taken_over
            # Where it was late for one of them, that one was carried out at the other replica, which took over.
            assert changes in {(2, 0), (1, 1), (0, 1)}
            return changes == (2, 0)

        await eventually(both_forwarded, what="two operations carried out by their owner")


async def test_kvscout_replicas_shows_who_is_there_and_who_has_said_goodbye() -> None:
    async with replicas("a", "b") as (_, found):
        a, b = found["a"], found["b"]
        await a.book("r", attempt_id=1)
        await agreed(a, b, requests=1)
        answers = json.loads(await kvscout("--json", "--scheduler", a.address, "--scheduler", b.address))
        for client, owned in ((a, {"a": 1, "b": 0}), (b, {"b": 0, "a": 1})):
            shown = answers[client.address]
            assert {each["replica_id"]: each["owned_requests"] for each in shown["replicas"]} == owned
            assert [each["lag_events"] for each in shown["replicas"]] == [0, 0]
            assert not any(each["diverged"] for each in shown["replicas"])
        a.signal(signal.SIGTERM)

        async def gone() -> bool:
            return "silent" in await kvscout("--scheduler", b.address)

        await eventually(gone, what="a silent replica in the table")
        assert (await b.mark("r", attempt_id=1)).changed
        assert (await b.rpc("GetReplicas", scheduler_pb2.GetReplicasRequest())).taken_over == 1


async def kvscout(*arguments: str) -> str:
    """What `kvscout replicas` prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvscout_cli.main", "replicas", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_operations_of_a_stream_reach_the_owner_and_their_results_come_back_by_id() -> None:
    async with replicas("a", "b") as (_, found):
        a, b = found["a"], found["b"]
        await a.book("r", attempt_id=1)
        await agreed(a, b, requests=1)
        async with gateway(b, "g") as stream:
            ref = scheduler_pb2.RequestRef(model=MODEL, request_id="r", attempt_id=1)
            marked, renewed = await stream.ask(
                {"prefill_complete": ref},
                {"renew": scheduler_pb2.RenewRequest(requests=[ref, types_pb2_ref("nobody")])},
            )
            assert marked.prefill_complete.changed
            assert list(renewed.renew.unknown) == [1]
            (wrong,) = await stream.ask({"free": scheduler_pb2.RequestRef(model=MODEL, request_id="r", attempt_id=2)})
            assert wrong.free.outcome == scheduler_pb2.FREE_OUTCOME_UNKNOWN
            (freed,) = await stream.ask({"free": ref})
            assert freed.free.outcome == scheduler_pb2.FREE_OUTCOME_FREED
        await agreed(a, b, requests=0)


def types_pb2_ref(request_id: str) -> scheduler_pb2.RequestRef:
    return scheduler_pb2.RequestRef(model=MODEL, request_id=request_id)


async def test_s8_a_gateway_fails_over_from_a_killed_replica_with_all_it_has_in_flight() -> None:
    async with replicas(*NAMES) as (_, found):
        a, b, c = found.values()
        async with gateway(a, "g") as stream:
            names = [f"r{number}" for number in range(50)]
            await stream.book(*names)
            await agreed(a, b, c, requests=50)
            await a.kill()
        async with gateway(b, "g", in_flight=names) as stream:
            assert stream.unknown == []
            await stream.book("r0")
            await agreed(b, c, requests=50)
            answers = await stream.ask(*({"free": stream.ref(name)} for name in names))
            assert {answer.free.outcome for answer in answers} == {scheduler_pb2.FREE_OUTCOME_FREED}
            await agreed(b, c, requests=0)
            await a.start()
            await eventually(a.knows_workers(2), what="the workers")
            await agreed(a, b, c, requests=0)
            assert set((await a.state())[1].values()) == {IDLE}


@pytest.mark.parametrize("gateway_first", [True, False])
async def test_what_a_gateway_that_dies_with_its_scheduler_had_in_flight_ends_within_the_owner_timeout(
    gateway_first: bool,
) -> None:
    async with replicas(*NAMES) as (_, found):
        a, b, c = found.values()
        async with gateway(a, "g") as stream:
            # A gateway asks for a lease, too, in case it has no stream.
            await stream.book(*(f"r{number}" for number in range(6)), lease_seconds=300)
            await agreed(a, b, c, requests=6)
            if not gateway_first:
                await a.kill()
        if gateway_first:
            await asyncio.sleep(1)
            await a.kill()
        assert await b.mark("r0", attempt_id=1), "a call of the gateway that arrives late"
        assert len((await b.state())[0]) == 6
        # Silent for the owner timeout of ten seconds and found so within another five, then ended by the first of two:
        # long before their leases end.
        async with asyncio.timeout(90):
            await agreed(b, c, requests=0)
        assert set((await b.state())[1].values()) == {IDLE}


async def test_s8_a_replica_that_was_stopped_yields_what_was_taken_over_meanwhile() -> None:
    async with replicas("a", "b") as (_, found):
        a, b = found["a"], found["b"]
        async with gateway(a, "g") as stream:
            await stream.book("r", "s")
            await a.book("unary", attempt_id=1)
            await agreed(a, b, requests=3)
            a.signal(signal.SIGSTOP)
        # It is not known to be gone, so it is asked, and does not answer.
        assert (await b.mark("unary", attempt_id=1)).changed
        assert (await b.metrics())["kvscout_replica_forwards_unanswered_total"] == 1
        async with gateway(b, "g", in_flight=["r", "s"]) as stream:
            assert stream.unknown == []
            (freed,) = await stream.ask({"free": stream.ref("s")})
            assert freed.free.outcome == scheduler_pb2.FREE_OUTCOME_FREED
            a.signal(signal.SIGCONT)
            left = await agreed(a, b, requests=2)
            assert set(left) == {"r", "unary"}
            assert left["unary"][2] == scheduler_pb2.REQUEST_PHASE_DECODE
        assert (await b.replica("a")).live


async def test_without_nats_a_scheduler_goes_on_alone_says_so_and_catches_up() -> None:
    async with replicas("a", "b") as (nats, found):
        a, b = found["a"], found["b"]
        await a.book("r")
        await agreed(a, b, requests=1)
        await nats.kill()
        await eventually(a.has_problem(True), what="the problem")
        status = await a.rpc("GetStatus", types_pb2.GetStatusRequest())
        assert any("replicas cannot be reached" in warning for warning in status.service.warnings)
        await a.book("s")
        await b.book("t")
        await nats.start()
        await eventually(a.has_problem(False), what="no problem")
        assert set(await agreed(a, b, requests=3)) == {"r", "s", "t"}
        assert (await a.metrics())["kvscout_replicas_connected"] == 1


async def test_thresholds_and_cool_downs_are_shared() -> None:
    async with replicas("a", "b") as (_, found):
        a, b = found["a"], found["b"]
        change = types_pb2.SetBusyThresholdsRequest(model=MODEL, active_prefill_tokens_threshold=9)
        await a.rpc("SetBusyThresholds", change)
        failed = scheduler_pb2.ReportFailureRequest(worker=types_pb2.WorkerRank(worker_id="w0"), cooldown_seconds=30)
        await b.rpc("ReportFailure", failed)

        async def shared() -> bool:
            read = await b.rpc("GetBusyThresholds", types_pb2.GetBusyThresholdsRequest(model=MODEL))
            loads = await a.rpc("GetPotentialLoads", scheduler_pb2.SchedulerGetPotentialLoadsRequest(model=MODEL))
            return bool(read.thresholds.active_prefill_tokens_threshold == 9 and loads.loads[0].cooldown_seconds > 20)

        await eventually(shared, what="thresholds at b, a cool-down at a")


async def test_a_scheduler_without_replicas_says_so() -> None:
    (port,) = free_ports(1)
    member = Member("alone", "kvscout_scheduler.main", "--port", str(port), "--metrics-port", "-1")
    await member.start()
    channel = open_channel(f"127.0.0.1:{port}")
    stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
    known = await stub.GetReplicas(scheduler_pb2.GetReplicasRequest())
    assert "--router-replica-sync" in known.problem
    assert not known.replicas
    await channel.close()
    await member.kill()


async def test_replica_sync_without_nats_is_refused_at_start() -> None:
    (port,) = free_ports(1)
    member = Member("alone", "kvscout_scheduler.main", "--port", str(port), "--router-replica-sync")
    with pytest.raises(AssertionError, match="ended by itself with 2"):
        await member.start()


async def test_s8_a_short_chaos_run_leaves_all_agreed_and_nothing_behind() -> None:
    assert await chaos_run(3.0, test_seed(), quiet=True) == []
