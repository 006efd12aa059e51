"""The life of a server process: ready line, drain, crash, bad configuration, TLS."""

import asyncio
import json
import signal
import socket
import sys
import textwrap
import urllib.request
from importlib import import_module
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.processes import DEADLINE_SECONDS, running

from kvscout_common.errors import Unavailable
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.rpc.channel import call, open_channel

PROGRAM = """
import asyncio, sys
from kvscout_common.settings.config import ServerConfig
from kvscout_common.rpc.serving import App, run
from kvscout_common.shards import Shard

async def build():
    async def task():
        await asyncio.Event().wait()

    async def crash():
        raise ZeroDivisionError("a defect")

    async def drain():
        print("drained", flush=True)
        if "hang" in sys.argv:
            await asyncio.Event().wait()

    async def close():
        print("closed", flush=True)

    class Panic(BaseException):
        pass

    def panic():
        raise Panic("native code")

    def defect():
        Shard.parse(None, flag="--shard")

    async def other():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        asyncio.create_task(crash())
        await asyncio.sleep(0.05)
        print("goes on", flush=True)

    async def forgotten():
        panic()

    loop = asyncio.get_running_loop()
    tasks = {"task": task}
    if "crash" in sys.argv:
        tasks["crash"] = crash
    if "panic in a callback" in sys.argv:
        loop.call_later(0.01, panic)
    if "panic in a task that nobody awaits" in sys.argv:
        loop.call_later(0.01, lambda: loop.create_task(forgotten()) and None)
    if "defect in a callback" in sys.argv:
        loop.call_later(0.01, defect)
    if "defect of others" in sys.argv:
        tasks["other"] = other
    def leave():
        if "delay" in sys.argv:
            print("leaves", flush=True)

    return App(name="test", services=[], tasks=tasks, leave=leave, drain=drain, close=close)

run(ServerConfig(grace_seconds=0.3, shutdown_delay_seconds=3600 if "delay" in sys.argv else None), build)
"""


async def start_program(tmp_path: Path, *arguments: str) -> asyncio.subprocess.Process:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return await asyncio.create_subprocess_exec(
        sys.executable, str(path), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def finish(process: asyncio.subprocess.Process) -> tuple[list[str], str]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        out, err = await process.communicate()
    return out.decode().splitlines(), err.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_closes_and_exits_with_0(tmp_path: Path, number: signal.Signals) -> None:
    process = await start_program(tmp_path)
    assert process.stdout is not None
    ready = json.loads(await process.stdout.readline())
    assert (ready["ready"], ready["service"], ready["host"]) == (True, "test", "127.0.0.1")
    process.send_signal(number)
    out, _ = await finish(process)
    assert (out, process.returncode) == (["drained", "closed"], 0)


async def test_in_its_shutdown_delay_a_service_says_that_it_leaves_and_takes_calls_until_a_second_signal(
    tmp_path: Path,
) -> None:
    process = await start_program(tmp_path, "delay")
    assert process.stdout is not None
    ready = json.loads(await process.stdout.readline())
    process.terminate()
    assert await process.stdout.readline() == b"leaves\n"
    for _ in range(2):
        # A new connection each time.
        channel = open_channel(f"127.0.0.1:{ready['port']}")
        probe = health_pb2_grpc.HealthStub(channel)
        answer = await call(probe.Check, health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        await channel.close()
    process.terminate()
    out, _ = await finish(process)
    assert (out, process.returncode) == (["drained", "closed"], 0)


async def test_a_drain_that_hangs_is_given_up_after_its_time(tmp_path: Path) -> None:
    process = await start_program(tmp_path, "hang")
    assert process.stdout is not None
    await process.stdout.readline()
    process.terminate()
    out, err = await finish(process)
    assert (out, process.returncode) == (["drained", "closed"], 0)
    assert "aborting calls that are still running: 0.3 s" in err


async def test_a_crashed_task_ends_the_process_with_1_and_says_why(tmp_path: Path) -> None:
    process = await start_program(tmp_path, "crash")
    out, err = await finish(process)
    assert process.returncode == 1
    assert "ZeroDivisionError: a defect" in err
    assert out[-1] == "closed"


@pytest.mark.parametrize("where", ["panic in a callback", "panic in a task that nobody awaits", "defect in a callback"])
async def test_what_the_loop_would_only_log_ends_the_process_with_1(tmp_path: Path, where: str) -> None:
    process = await start_program(tmp_path, where)
    out, err = await finish(process)
    assert process.returncode == 1
    assert "a task crashed" in err
    assert out[-1] == "closed"


async def test_errors_of_others_and_of_forgotten_tasks_are_logged_only(tmp_path: Path) -> None:
    process = await start_program(tmp_path, "defect of others")
    assert process.stdout is not None
    await process.stdout.readline()
    assert await process.stdout.readline() == b"goes on\n"
    process.terminate()
    _, err = await finish(process)
    assert process.returncode == 0
    assert err.count("\nZeroDivisionError") == 2


async def test_a_taken_port_and_a_wrong_file_are_errors_at_start(tmp_path: Path) -> None:
    async with running("kvscout_scheduler.main") as first:
        second = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvscout_scheduler.main", "--metrics-port", "-1",
            "--port", str(first.ready["port"]), stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, err = await finish_quietly(second)
    assert second.returncode == 1
    assert f"cannot bind 127.0.0.1:{first.ready['port']} (--port)" in err
    workers = tmp_path / "workers.yaml"
    workers.write_text("workers: [{worker_id: a}]")
    third = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvscout_scheduler.main", "--workers-file", str(workers), "--port", "0",
        "--metrics-port", "-1", stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, err = await finish_quietly(third)
    assert third.returncode == 2
    assert "workers.0.model: must not be empty" in err


async def test_a_port_that_is_taken_for_a_moment_is_waited_for() -> None:
    # As where the kernel gave the port to a connection outwards while the service was away.
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvscout_scheduler.main", "--metrics-port", str(port), "--port", "0",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.timeout(DEADLINE_SECONDS):
            while b"is in use; retrying" not in (line := await process.stderr.readline()):
                assert line, "it ended"
    async with asyncio.timeout(DEADLINE_SECONDS):
        ready = json.loads(await process.stdout.readline())
        process.terminate()
        await process.communicate()
    assert (ready["metrics_port"], process.returncode) == (port, 0)


def test_default_ports_are_none_that_the_kernel_gives_to_connections() -> None:
    for name in ("indexer", "scheduler", "gateway", "bridge", "mocker"):
        for option in import_module(f"kvscout_{name}.main").main.params:
            if option.name in ("port", "metrics_port", "events_port", "replay_port"):
                assert 1024 <= option.default < 32_768, (name, option.name)


async def finish_quietly(process: asyncio.subprocess.Process) -> tuple[bytes, str]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        out, err = await process.communicate()
    return out, err.decode()


async def test_metrics_are_served_where_the_ready_line_says() -> None:
    async with running("kvscout_scheduler.main") as scheduler:
        url = f"http://127.0.0.1:{scheduler.ready['metrics_port']}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    assert "# TYPE kvscout_active_requests gauge" in text
    samples = dict(line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    held = ("kvscout_tasks", "kvscout_python_allocations")
    for name in (*held, "process_open_fds", "process_resident_memory_bytes", "process_cpu_seconds_total"):
        assert float(samples[name]) > 0


async def test_tls_with_client_certificates_and_tokens(tmp_path: Path) -> None:
    ca = trustme.CA()
    server, client = ca.issue_cert("127.0.0.1", "localhost"), ca.issue_cert("client")
    paths = {name: tmp_path / name for name in ("ca", "cert", "key", "client_cert", "client_key", "tokens", "token")}
    ca.cert_pem.write_to_path(str(paths["ca"]))
    server.private_key_pem.write_to_path(str(paths["key"]))
    server.cert_chain_pems[0].write_to_path(str(paths["cert"]))
    client.private_key_pem.write_to_path(str(paths["client_key"]))
    client.cert_chain_pems[0].write_to_path(str(paths["client_cert"]))
    paths["tokens"].write_text("tokens: [{token: secret, role: viewer, tenant: '*'}]")
    paths["token"].write_text("secret\n")
    flags = ("--tls-cert", "cert", "--tls-key", "key", "--tls-client-ca", "ca", "--auth-tokens", "tokens")
    arguments = [flag if flag.startswith("--") else str(paths[flag]) for flag in flags]
    good = ClientSecurity(paths["ca"], paths["client_cert"], paths["client_key"], paths["token"])
    async with running("kvscout_scheduler.main", *arguments) as scheduler:
        from kvscout.v1 import scheduler_pb2_grpc, types_pb2

        channel = open_channel(scheduler.address, good)
        status = await call(scheduler_pb2_grpc.SchedulerStub(channel).GetStatus, types_pb2.GetStatusRequest())
        assert status.service.version
        await channel.close()
        # An address that a name had: the certificate is that of the name.
        channel = open_channel(scheduler.address, good, server_name="localhost")
        await call(scheduler_pb2_grpc.SchedulerStub(channel).GetStatus, types_pb2.GetStatusRequest())
        await channel.close()
        for security, server_name in (
            (ClientSecurity(), ""),
            (ClientSecurity(ca=paths["ca"], token_file=paths["token"]), ""),
            (good, "somebody-else.test"),
        ):
            channel = open_channel(scheduler.address, security, server_name=server_name)
            with pytest.raises(Unavailable):
                await call(
                    scheduler_pb2_grpc.SchedulerStub(channel).GetStatus, types_pb2.GetStatusRequest(), timeout=10
                )
            await channel.close()


async def test_health_tells_of_each_service_and_of_draining() -> None:
    async with running("kvscout_scheduler.main") as scheduler:
        channel = grpc.aio.insecure_channel(scheduler.address)
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "kvscout.v1.Scheduler"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watching = stub.Watch(health_pb2.HealthCheckRequest(service="kvscout.v1.Scheduler"))
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        scheduler.process.terminate()
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await channel.close()
