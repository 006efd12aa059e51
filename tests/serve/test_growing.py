"""`kvscout serve` beside other processes: remote upstreams that die and return, and several of it on one NATS."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from chaos.members import Member
from support.free_ports import free_ports
from support.gateway_stack import CALL_SECONDS, MODEL, GatewayClient, connected, fresh_prompt, mocker_worker, together
from support.mocker_process import MockerProcess, running_mocker
from support.nats_server import NatsServer, nats_server
from support.processes import DEADLINE_SECONDS, Running, eventually, running, start

from kvscout.v1 import gateway_pb2, scheduler_pb2, workers_pb2
from kvscout_common.errors import KvscoutError
from kvscout_common.rpc.channel import call

SERVE = "kvscout_serve.main"
BLOCK = 16
OWNER_SECONDS = 10.0
"""After which the bookings of a process that is gone end at the others."""
ENDS_WITHIN_SECONDS = 60.0
"""2 s that others leave to the first replica, and what a busy machine adds."""
SLOW = ("--speedup", "1", "--step-base-ms", "100")


async def kvscout(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_cli.main", *arguments), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE_SECONDS):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


@dataclass(slots=True)
class Load:
    """Streamed requests, one after the other, which must all be answered."""

    client: GatewayClient
    prompt: Sequence[int]
    answered: int = 0
    degraded: int = 0

    async def run(self) -> None:
        """Send requests until cancelled."""
        while True:
            answer = await self.client.generate(self.prompt, max_tokens=8)
            assert len(answer.token_ids) == 8
            self.answered += 1
            self.degraded += answer.route.degraded

    def further(self, requests: int) -> Any:
        """Return a condition: as many more were answered."""
        wanted = self.answered + requests

        async def reached() -> bool:
            return self.answered >= wanted

        return reached


@pytest.mark.parametrize("remote", [(), ("indexer",), ("scheduler",), ("indexer", "scheduler")], ids="+".join)
async def test_either_upstream_may_be_remote_be_killed_under_load_and_come_back(remote: tuple[str, ...]) -> None:
    ports = dict(zip(remote, free_ports(len(remote)), strict=True))
    members = [
        Member(name, f"kvscout_{name}.main", "--port", str(port), "--metrics-port", "-1")
        for name, port in ports.items()
    ]
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    flags = [flag for name, address in addresses.items() for flag in (f"--{name}", address)]
    async with AsyncExitStack() as stack:
        for member in members:
            stack.push_async_callback(member.kill)
        await asyncio.gather(*(member.start() for member in members))
        served, *mockers = await stack.enter_async_context(
            together(running(SERVE, "--indexer-timeout-ms", "2000", *flags), running_mocker(), running_mocker())
        )
        client = GatewayClient(
            served.address, addresses.get("scheduler", served.address), addresses.get("indexer", served.address)
        )
        stack.push_async_callback(client.close)
        for number, mocker in enumerate(mockers):
            await client.register(mocker_worker(f"w{number}", mocker))
        prompt = fresh_prompt(4 * BLOCK)
        await client.generate(prompt)
        await client.until_indexed(prompt, 4)

        async def matched() -> bool:
            route = await client.route(prompt)
            return route.overlap_blocks == 4 and not route.degraded

        await eventually(matched, what="an overlap")
        loads = [Load(client, prompt) for _ in range(4)]
        async with asyncio.TaskGroup() as tasks:
            sending = [tasks.create_task(load.run()) for load in loads]
            for load in loads:
                await eventually(load.further(2))
            for member in members:
                await member.kill()
            for load in loads:
                await eventually(load.further(3), what="answers without them")
            assert any(load.degraded for load in loads) is bool(remote)
            await asyncio.gather(*(member.start() for member in members))
            await eventually(matched, what="an overlap, as before")
            for load in loads:
                await eventually(load.further(2))
            for task in sending:
                task.cancel()
        await client.until_idle()


async def test_a_second_scheduler_takes_over_from_the_first_and_knows_what_runs() -> None:
    ports = free_ports(2)
    first, second = (
        Member(f"s{number}", "kvscout_scheduler.main", "--port", str(port), "--metrics-port", "-1")
        for number, port in enumerate(ports)
    )
    flags = [flag for port in ports for flag in ("--scheduler", f"127.0.0.1:{port}")]
    async with AsyncExitStack() as stack:
        for member in (first, second):
            stack.push_async_callback(member.kill)
        await asyncio.gather(first.start(), second.start())
        served, mocker = await stack.enter_async_context(together(running(SERVE, *flags), running_mocker(*SLOW)))
        at_first, at_second = (GatewayClient(served.address, f"127.0.0.1:{port}", served.address) for port in ports)
        for client in (at_first, at_second):
            stack.push_async_callback(client.close)
        await at_first.register(mocker_worker("w0", mocker))
        generating = asyncio.create_task(at_first.generate(fresh_prompt(2 * BLOCK), max_tokens=40))
        await at_first.until_active()
        await first.kill()
        await at_second.until_active()
        assert not (await at_second.route(fresh_prompt(BLOCK))).degraded
        assert len((await generating).token_ids) == 40
        await at_second.until_idle()


@dataclass(slots=True)
class Several:
    """Processes of `kvscout serve` on one NATS, clients of each, and engines that all of them have."""

    nats: NatsServer
    processes: list[Running]
    clients: list[GatewayClient]

    async def same_loads(self, requests: int) -> bool:
        """Return whether every process has as many active requests, and the same loads."""
        loads = [await client.loads() for client in self.clients]
        return all(each == loads[0] for each in loads) and sum(load[0] for load in loads[0]) == requests


@asynccontextmanager
async def several(number: int, *mockers: Sequence[str], transport: str = "zmq") -> AsyncIterator[Several]:
    """Some processes, and workers w0, w1, …

    Args:
        number: Of processes.
        mockers: Flags of each engine.
        transport: "zmq": registered at the first process; "file": in a workers file of all; else by bridges, whose
            events come over NATS.
    """
    async with nats_server() as nats, AsyncExitStack() as stack:
        enter = stack.enter_async_context
        engines: list[MockerProcess] = await enter(together(*(running_mocker(*each) for each in mockers)))
        workers = [mocker_worker(f"w{index}", engine) for index, engine in enumerate(engines)]
        shared = ["--nats-server", nats.url, "--router-replica-sync", "--indexer-timeout-ms", "2000"]
        if transport == "file":
            file = nats.store / "workers.yaml"
            file.write_text(json.dumps({"workers": [_entry(worker) for worker in workers]}))
            shared += ["--workers-file", str(file)]
        processes: list[Running] = await enter(together(*(running(SERVE, *shared) for _ in range(number))))
        clients = [await enter(connected(each, each, each)) for each in processes]
        for worker, engine in zip(workers, engines, strict=True):
            if transport == "zmq":
                await clients[0].register(worker)
            elif transport != "file":
                stack.push_async_callback((await _bridge(worker.worker_id, engine, nats, transport)).stop)
        for client in clients:
            await client.until_known(*(worker.worker_id for worker in workers))

            async def agrees(client: GatewayClient = client) -> bool:
                known = await call(client.scheduler.GetReplicas, scheduler_pb2.GetReplicasRequest(), timeout=5)
                return not known.problem and sum(replica.live for replica in known.replicas) == number

            await eventually(agrees, what="the other processes")
        yield Several(nats, processes, clients)


def _entry(worker: workers_pb2.Worker) -> dict[str, Any]:
    """A worker as a workers file has it."""
    (events,) = worker.event_endpoints
    return {
        "worker_id": worker.worker_id, "model": worker.model, "block_size": worker.block_size, "engine": "mock",
        "http_endpoint": worker.http_endpoint, "total_kv_blocks": worker.total_kv_blocks,
        "event_endpoints": [{"endpoint": events.endpoint, "replay_endpoint": events.replay_endpoint}],
    }  # fmt: skip


async def _bridge(worker_id: str, mocker: MockerProcess, nats: NatsServer, transport: str) -> Running:
    return await start(
        "kvscout_bridge.main", "--nats-server", nats.url, "--transport", transport, "--worker-id", worker_id,
        "--model", MODEL, "--block-size", str(BLOCK), "--engine", "mock", "--http-endpoint", mocker.url,
    )  # fmt: skip


@pytest.mark.parametrize("transport", ["zmq", "file", "nats-core", "jetstream"])
async def test_several_processes_have_the_same_workers_index_and_loads(transport: str) -> None:
    async with several(3, SLOW, SLOW, transport=transport) as world:
        prompt = fresh_prompt(4 * BLOCK)
        first = await world.clients[0].generate(prompt, max_tokens=1)
        for client in world.clients:
            await client.until_indexed(prompt, 4)
            # A request whose end is not known here yet would count as load, and turn the decision.
            await eventually(lambda: world.same_loads(0), what="no load")
            again = await client.route(prompt)
            assert (again.worker.worker_id, again.overlap_blocks) == (first.route.worker.worker_id, 4)
            ran = await client.generate(fresh_prompt(BLOCK), max_tokens=1)
            assert not ran.route.degraded
        await eventually(lambda: world.same_loads(0), what="no load")


async def test_what_runs_at_one_process_is_load_at_all_and_every_command_shows_it_at_each() -> None:
    async with several(3, SLOW, SLOW) as world:
        running_calls = []
        for client in world.clients:
            running_calls.append(client.start(fresh_prompt(BLOCK * 2), max_tokens=1_000))
            await eventually(lambda: world.same_loads(len(running_calls)), what="the same loads")
        # Those of others count: the second request did not join the first.
        assert all(load[0] for load in await world.clients[0].loads())
        shown = await asyncio.gather(
            *(kvscout("loads", "--json", "--gateway", each.address) for each in world.processes),
            *(kvscout("requests", "--json", "--gateway", each.address) for each in world.processes),
        )
        loads, requests = shown[:3], shown[3:]
        assert [code for code, _ in shown] == [0] * 6
        numbers = [[(row["worker"], row["active_requests"]) for row in json.loads(out)] for _, out in loads]
        assert numbers[0] == numbers[1] == numbers[2]
        assert sum(active for _, active in numbers[0]) == 3
        names = [{row["request_id"] for row in json.loads(out)} for _, out in requests]
        assert names[0] == names[1] == names[2]
        assert len(names[0]) == 3
        every = [each.address for each in world.processes]
        status, top, doctor, replicas = await asyncio.gather(
            kvscout("status", "--json", "--gateway", every[1]),
            kvscout("top", "--once", "--gateway", *every),
            kvscout("doctor", "--json", "--gateway", every[2]),
            kvscout("replicas", "--json", *(flag for each in every for flag in ("--scheduler", each))),
        )
        assert {row["kind"] for row in json.loads(status[1])["services"]} >= {"gateway", "indexer", "scheduler"}
        assert top[1].count("w0/0") == top[1].count("w1/0") == 1
        assert "in flight 3" in top[1]
        assert json.loads(doctor[1]) == {"findings": []}
        assert [code for code, _ in (status, top, doctor, replicas)] == [0] * 4
        owned = [each["owned_requests"] for seen in json.loads(replicas[1]).values() for each in seen["replicas"]]
        assert owned == [1] * 9
        for each in running_calls:
            each.cancel()
        await eventually(lambda: world.same_loads(0), what="no load")


async def test_what_is_routed_through_one_process_may_be_freed_through_another() -> None:
    async with several(2, ()) as world:
        one, other = world.clients
        prompt = fresh_prompt(BLOCK * 2)
        await one.route(prompt, request_id="r")
        await eventually(lambda: world.same_loads(1), what="its booking")
        mark = scheduler_pb2.MarkPrefillCompleteRequest(model=MODEL, request_id="r")
        free = scheduler_pb2.FreeRequest(model=MODEL, request_id="r")
        assert (await call(other.stub.MarkPrefillComplete, mark, timeout=CALL_SECONDS)).changed
        freed = [(await call(other.stub.Free, free, timeout=CALL_SECONDS)).outcome for _ in range(2)]
        assert freed[0] == scheduler_pb2.FREE_OUTCOME_FREED
        assert not any(map(any, await other.loads()))
        await eventually(lambda: world.same_loads(0), what="no load")
        # A gateway of its own process uses either of them as its scheduler.
        addresses = [flag for each in world.processes for flag in ("--scheduler", each.address)]
        flags = ("--indexer", world.processes[0].address, "--nats-server", world.nats.url, *addresses)
        async with running("kvscout_gateway.main", *flags) as gateway, connected(gateway, *world.processes) as client:
            await client.until_known("w0")
            await client.route(prompt, request_id="s")
            await eventually(lambda: world.same_loads(1), what="its booking")
            free.request_id = "s"
            assert (await call(other.stub.Free, free, timeout=CALL_SECONDS)).outcome == freed[0]
            await eventually(lambda: world.same_loads(0), what="no load")


@pytest.mark.timeout(120)  # the owner timeout is awaited
async def test_bookings_of_a_process_that_is_killed_end_at_the_others_ten_seconds_later_and_none_earlier() -> None:
    async with several(3, SLOW) as world:
        calls = [client.start(fresh_prompt(BLOCK * 2), max_tokens=1_000) for client in world.clients]
        await eventually(lambda: world.same_loads(3), what="the same loads")
        killed, began = world.processes[0].process, time.monotonic()
        killed.kill()
        await killed.wait()
        survivors = Several(world.nats, world.processes[1:], world.clients[1:])
        while [len(await client.active()) for client in survivors.clients] == [3, 3]:
            assert time.monotonic() - began < ENDS_WITHIN_SECONDS
            await asyncio.sleep(0.1)
        # It may last have sent something two seconds before.
        assert time.monotonic() - began > OWNER_SECONDS - 2.5
        await eventually(lambda: survivors.same_loads(2), what="the bookings of those that live")
        for each in calls:
            each.cancel()
        await eventually(lambda: survivors.same_loads(0), what="no load")


async def test_a_process_that_stops_hands_nothing_on_and_a_restart_begins_with_the_load_of_the_others() -> None:
    async with several(2, SLOW) as world:
        one, other = world.clients
        ended = asyncio.create_task(one.generate(fresh_prompt(BLOCK * 2), max_tokens=20))
        await eventually(lambda: world.same_loads(1), what="the booking")
        assert await world.processes[0].stop() == 0
        assert len((await ended).token_ids) == 20
        assert not any(map(any, await other.loads()))
        running_call = other.start(fresh_prompt(BLOCK * 2), max_tokens=1_000)
        await other.until_active()
        flags = ("--nats-server", world.nats.url, "--router-replica-sync")
        async with running(SERVE, *flags) as again, connected(again, again, again) as client:

            async def is_warm() -> bool:
                try:
                    return await client.loads() == await other.loads()
                except KvscoutError:
                    return False

            await eventually(is_warm, what="the load of the other process")
            status = await client.status()
            assert [helper.kind for helper in status.helpers if helper.healthy] == [
                gateway_pb2.HELPER_KIND_INDEXER,
                gateway_pb2.HELPER_KIND_SCHEDULER,
            ]
        running_call.cancel()
        await other.until_idle()
