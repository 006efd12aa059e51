"""`kvscout serve`: one process is what three are, and an upstream of its own choice stays possible."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import grpc
import pytest
from chaos.members import Member
from click.testing import CliRunner
from support.free_ports import free_ports
from support.gateway_stack import MODEL, GatewayClient, connected, fresh_prompt, mocker_worker
from support.mocker_process import running_mocker
from support.processes import eventually, running

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.errors import InvalidArgument
from kvscout_common.rpc.channel import call
from kvscout_serve.config import ServeConfig
from kvscout_serve.main import main

SERVE = "kvscout_serve.main"


async def test_three_services_answer_on_one_port_and_agree_about_the_workers() -> None:
    async with running(SERVE) as served, running_mocker() as mocker, connected(served, served, served) as client:
        await client.register(mocker_worker("w0", mocker))
        prompt = fresh_prompt(64)
        first = await client.generate(prompt)
        await client.until_indexed(prompt, 4)
        again = await client.generate(prompt)
        assert first.route.worker.worker_id == again.route.worker.worker_id == "w0"
        assert again.usage is not None
        assert again.usage.cached_tokens == 48
        assert again.route.overlap_blocks == 4
        request = workers_pb2.ListWorkersRequest()
        for stub in (client.stub, client.indexer, client.scheduler):
            listed = await call(stub.ListWorkers, request, timeout=10)
            assert [entry.worker.worker_id for entry in listed.workers] == ["w0"]
        status = await client.status()
        assert {helper.kind: (helper.address, helper.healthy) for helper in status.helpers} == {
            gateway_pb2.HELPER_KIND_INDEXER: (served.address, True),
            gateway_pb2.HELPER_KIND_SCHEDULER: (served.address, True),
        }
        assert sum(worker.mispredicted for worker in status.workers) == 0
        await client.until_idle()


async def test_what_stays_away_is_freed_and_a_worker_that_is_removed_is_no_longer_routed_to() -> None:
    slow = ("--speedup", "1", "--step-base-ms", "200")
    async with running(SERVE) as served, running_mocker(*slow) as mocker, connected(served, served, served) as client:
        await client.register(mocker_worker("w0", mocker))
        running_call = client.start(fresh_prompt(32), max_tokens=1_000)
        await client.until_active()
        running_call.cancel()
        await client.until_idle()
        removal = workers_pb2.RemoveWorkerRequest(worker_id="w0")
        await call(client.stub.RemoveWorker, removal, timeout=10)
        assert await client.known() == {}
        assert await client.sources() == {}


async def test_requests_wait_for_room_and_leave_the_queue_when_their_client_does() -> None:
    flags = ("--router-queue-threshold", "0.5")
    slow = ("--speedup", "1", "--step-base-ms", "1000", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    async with running(SERVE, *flags) as served, running_mocker(*slow) as mocker:
        async with connected(served, served, served) as client:
            await client.register(mocker_worker("w0", mocker, max_num_batched_tokens=64))
            calls = [client.start(fresh_prompt(64), max_tokens=1) for _ in range(4)]

            async def queued() -> int:
                status = await call(client.scheduler.GetStatus, types_pb2.GetStatusRequest(), timeout=10)
                return sum(pool.queued for pool in status.pools)

            await eventually(queued, what="a queued request")
            calls.pop().cancel()
            for each in calls:
                assert [message async for message in each]
            await client.until_idle()
            assert await queued() == 0


async def test_without_events_routed_prompts_are_predicted() -> None:
    async with running(SERVE, "--no-kv-events") as served, running_mocker() as mocker:
        async with connected(served, served, served) as client:
            await client.register(mocker_worker("w0", mocker))
            prompt = fresh_prompt(64)
            await client.generate(prompt)

            async def predicted() -> bool:
                return (await client.route(prompt)).overlap_blocks == 4

            await eventually(predicted, what="the prompt is predicted")


async def test_requests_of_one_conversation_have_one_session() -> None:
    async with running(SERVE) as served, running_mocker() as mocker, connected(served, served, served) as client:
        await client.register(mocker_worker("w0", mocker))
        prompt = fresh_prompt(512)

        async def booked(request_id: str, tokens: Sequence[int], session: str = "") -> int:
            await client.route(tokens, request_id=request_id, session=session)
            return {one.request.request_id: one.session for one in await client.active()}[request_id]

        first = await booked("r1", prompt)
        assert first == await booked("r2", [*prompt, *fresh_prompt(64)]) != 0
        assert first != await booked("r3", fresh_prompt(512))
        named = await booked("r4", prompt, session="mine")
        assert named == await booked("r5", fresh_prompt(64), session="mine")
        assert named not in (0, first, await booked("r6", prompt, session="other"))
        with pytest.raises(InvalidArgument, match="session"):
            await client.route(prompt, session="x" * 1025)


async def test_turns_that_name_the_response_before_are_of_the_session_of_the_first() -> None:
    serve, engine = ("--tokenize-timeout-ms", "20000"), ("--store-responses", "--render", "all")
    async with running(SERVE, *serve) as served, running_mocker(*engine) as mocker:
        async with connected(served, served, served) as client:
            await client.register(mocker_worker("w0", mocker))
            await _continue_responses(client, f"http://127.0.0.1:{served.ready['http_port']}/v1/responses")


async def _continue_responses(client: GatewayClient, url: str) -> None:
    watching = client.scheduler.WatchDecisions(scheduler_pb2.WatchDecisionsRequest())
    await watching.initial_metadata()
    decisions: list[scheduler_pb2.WatchDecisionsResponse] = []
    async with aiohttp.ClientSession() as http:

        async def made(text: str, **fields: str) -> str:
            body = {"model": MODEL, "input": text * 600, "max_output_tokens": 4, **fields}
            async with http.post(url, json=body) as answer:
                assert answer.status == 200, await answer.text()
                response_id: str = (await answer.json())["id"]
            decision = await watching.read()
            assert isinstance(decision, scheduler_pb2.WatchDecisionsResponse)
            decisions.append(decision)
            return response_id

        response_id = await made("word ")
        for _ in range(2):
            response_id = await made("more ", previous_response_id=response_id)
        await made("another ")
    watching.cancel()
    first, *turns, other = (decision.session for decision in decisions)
    assert turns == [first, first]
    assert first != other
    assert 0 not in (first, other)
    assert [decision.decision.session for decision in decisions] == [first, *turns, other]


async def test_busy_thresholds_loads_and_dumps_come_from_the_same_process() -> None:
    async with running(SERVE) as served, running_mocker() as mocker, connected(served, served, served) as client:
        await client.register(mocker_worker("w0", mocker))
        prompt = fresh_prompt(64)
        await client.generate(prompt)
        await client.until_indexed(prompt, 4)
        url = f"http://127.0.0.1:{served.ready['http_port']}"
        async with aiohttp.ClientSession() as http:
            body = {"model": MODEL, "active_decode_blocks_threshold": 0.9}
            async with http.post(f"{url}/busy_threshold", json=body) as answer:
                assert answer.status == 200
            async with http.get(f"{url}/busy_threshold") as answer:
                assert "0.9" in await answer.text()
        loads = scheduler_pb2.SchedulerGetPotentialLoadsRequest(model=MODEL)
        assert len((await call(client.scheduler.GetPotentialLoads, loads, timeout=10)).loads) == 1
        dumped = client.stub.DumpEvents(gateway_pb2.DumpEventsRequest(model=MODEL))
        assert [batch async for batch in dumped]


async def test_a_stop_lets_streams_end_over_grpc_and_http_and_takes_no_more() -> None:
    slow = ("--speedup", "1", "--step-base-ms", "100")
    async with running(SERVE) as served, running_mocker(*slow) as mocker, connected(served, served, served) as client:
        await client.register(mocker_worker("w0", mocker))

        async def both_run() -> bool:
            return len(await client.active()) == 2

        generating = asyncio.create_task(client.generate(fresh_prompt(32), max_tokens=30))
        url = f"http://127.0.0.1:{served.ready['http_port']}/v1/completions"
        body = {"model": MODEL, "prompt": list(fresh_prompt(32)), "max_tokens": 30, "stream": True}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
            await eventually(both_run, what="both requests run")
            served.process.send_signal(signal.SIGTERM)
            assert (await answer.text()).rstrip().endswith("data: [DONE]")
        assert len((await generating).token_ids) == 30
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.ClientConnectionError):
                await http.post(url, json=body)


async def test_a_process_that_is_killed_under_load_starts_again_at_once_with_all_its_ports(tmp_path: Path) -> None:
    ports = dict(zip(("--port", "--http-port", "--metrics-port", "--endpoint-picker-port"), free_ports(4), strict=True))
    slow = ("--speedup", "1", "--step-base-ms", "20")
    async with running_mocker(*slow) as mocker:
        worker = {"worker_id": "w0", "model": MODEL, "block_size": 16, "engine": "mock", "http_endpoint": mocker.url}
        events = [{"endpoint": mocker.ranks[0]["events"], "replay_endpoint": mocker.ranks[0]["replay"]}]
        file = tmp_path / "workers.yaml"
        file.write_text(json.dumps({"workers": [worker | {"event_endpoints": events}]}))
        flags = [str(each) for pair in ports.items() for each in pair]
        member = Member("serve", SERVE, *flags, "--workers-file", str(file))
        address = f"127.0.0.1:{ports['--port']}"
        prompt = fresh_prompt(64)
        try:
            for _ in range(3):
                await member.start()
                client = GatewayClient(address, address, address)
                # Its index is that of the engine's cache, and nothing is booked.
                answered = await client.generate(prompt)
                assert answered.usage is not None
                await client.until_indexed(prompt, 4)
                await client.until_idle()
                calls = [client.start(fresh_prompt(32), max_tokens=1_000) for _ in range(8)]
                await client.until_active()
                await member.kill()
                for each in calls:
                    with pytest.raises(grpc.aio.AioRpcError):
                        async for _ in each:
                            pass
                await client.close()
        finally:
            await member.kill()


async def test_a_port_that_is_taken_is_named_with_its_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        async def error_of(flag: str) -> str:
            ports = {"--port": 0, "--http-port": 0, "--metrics-port": 0, flag: port}
            flags = [str(each) for pair in ports.items() for each in pair]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", SERVE, *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            out, err = await process.communicate()
            assert (process.returncode, out) == (1, b"")
            return err.decode()

        flags = ("--port", "--http-port", "--metrics-port", "--endpoint-picker-port")
        for flag, error in zip(flags, await asyncio.gather(*map(error_of, flags)), strict=True):
            assert f"cannot serve: cannot bind 127.0.0.1:{port} ({flag}): Address already in use" in error
            assert "Traceback" not in error


def test_flags_of_all_services_are_there_once_and_wrong_ones_are_named() -> None:
    shown = CliRunner().invoke(main, ["--help-all"])
    assert shown.exit_code == 0
    for one in ("--router-mode", "--router-ttl", "--migration-limit", "--http-port", "--workers-file"):
        assert one in shown.output
    names = [option for parameter in main.params for option in parameter.opts]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--router-replica-sync"], "router_replica_sync: needs --nats-server"),
        (["--scheduler", "nonsense"], "scheduler: "),
        (["--scheduler", "a:1", "--scheduler", "a:1"], "scheduler: names an address twice"),
        (["--indexer", "127.0.0.1:99999"], "indexer: "),
        (["--indexer", "0/2=127.0.0.1:7051"], "indexer: names no address of shard 1/2"),
        (["--indexer", "127.0.0.1:7051", "--no-indexer"], "no_indexer: cannot be combined with --indexer"),
        (["--no-indexer", "--no-kv-events"], "no_kv_events: has no effect with --no-indexer"),
        (["--indexer", "127.0.0.1:7051", "--peers", "127.0.0.1:7061"], "peers: has no effect with --indexer"),
        (["--scheduler", "127.0.0.1:7052", "--router-mode", "kv"], "router_mode: has no effect with --scheduler"),
        (
            ["--scheduler", "127.0.0.1:7052", "--router-replica-sync", "--nats-server", "nats://127.0.0.1:4222"],
            "router_replica_sync: has no effect with --scheduler",
        ),
        (["--peers", "127.0.0.1:7061,nowhere"], "peers: 'nowhere' has no host"),
        (["--shard", "0/2"], "shard: the indexer of this process has all workers"),
        (["--lease-seconds", "1"], "'--lease-seconds'"),
        (["--port", "70000"], "'--port'"),
        (["--router-queue-limit", "0"], "'--router-queue-limit'"),
        (["--router-temperature", "-1"], "router_temperature: "),
    ],
)
def test_wrong_flags_and_contradictions_are_named(flags: list[str], named: str) -> None:
    wrong = CliRunner().invoke(main, flags)
    assert wrong.exit_code == 2
    assert named in wrong.output


def test_a_lease_is_that_of_each_service_unless_one_is_given() -> None:
    def config(*flags: str) -> ServeConfig:
        with main.make_context("serve", list(flags)) as context:
            return ServeConfig.from_flags(context.params)

    unset, given = config(), config("--lease-seconds", "60")
    assert unset.scheduler is not None
    assert given.scheduler is not None
    assert (unset.gateway.lease_seconds, unset.scheduler.settings.lease_seconds) == (30, 300)
    assert (given.gateway.lease_seconds, given.scheduler.settings.lease_seconds) == (60, 60)
    assert config("--scheduler", "127.0.0.1:7052").scheduler is None
    assert config("--no-indexer").indexer is None
