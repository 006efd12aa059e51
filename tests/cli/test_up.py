"""`kvscout up` and `down` with all their real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import DEADLINE_SECONDS, eventually

from kvscout_cli.port_holders import holder
from kvscout_cli.stack import Stack
from kvscout_cli.topology import Ports, Topology, launch
from kvscout_client import Router, StopConditions
from kvscout_common.errors import FailedPrecondition

SERVICES = {"indexer", "scheduler", "gateway"}


async def kvscout(*arguments: str, wait: bool = True) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    if wait:
        async with asyncio.timeout(2 * DEADLINE_SECONDS):
            await process.wait()
    return process


async def output(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_SECONDS):
        return (await process.stdout.read()).decode()


async def state_of(directory: Path, process: asyncio.subprocess.Process) -> dict[str, Any]:
    path = directory / "up.json"

    async def written() -> dict[str, Any] | None:
        assert not process.returncode, await output(process)
        return json.loads(path.read_text()) if path.exists() else None

    state: dict[str, Any] = await eventually(written, what="stack that is up", deadline_seconds=2 * DEADLINE_SECONDS)
    return state


@asynccontextmanager
async def up(directory: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    process = await kvscout("up", "--free-ports", "--state-dir", str(directory), *flags, wait=False)
    try:
        yield process, await state_of(directory, process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def nothing_left(state: dict[str, Any]) -> None:
    async def none_alive() -> bool:
        return not any(
            psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            for pid in state["processes"].values()
        )

    await eventually(none_alive, what="end of every process")


async def test_up_serves_until_ctrl_c_and_leaves_nothing(tmp_path: Path) -> None:
    async with up(tmp_path, "--mockers", "2", "--router-mode", "random") as (process, state):
        assert set(state["processes"]) == SERVICES | {"mocker-0", "mocker-1"}
        async with Router(state["gateway"], model="mock-model") as router:
            prompt = list(range(100, 164))
            chunks = [chunk async for chunk in router.generate(prompt, stop=StopConditions(max_tokens=4))]
            assert sum(len(chunk.token_ids) for chunk in chunks) == 4
            decision = await router.route(prompt, explain=True)
            assert decision.explanation is not None
            assert decision.explanation.policy == "random"
        second = await kvscout("up", "--free-ports", "--state-dir", str(tmp_path))
        assert second.returncode == 1
        assert "is up already" in await output(second)
        process.send_signal(signal.SIGINT)
        text = await output(process)
        assert await process.wait() == 0
        assert "kvscout is up, with 2 workers" in text
        page = state["openai"].removesuffix("v1")
        assert f"  gateway    gRPC {state['gateway']} · OpenAI {state['openai']} · dashboard {page} · metrics " in text
        assert "  mocker-1   http://127.0.0.1:" in text
        assert " · tcp://127.0.0.1:" in text
        await nothing_left(state)
        assert not (tmp_path / "up.json").exists()


async def test_one_process_takes_the_flags_of_all_services_and_has_each_of_their_apis(tmp_path: Path) -> None:
    flags = ("--mockers", "2", "--router-mode", "random", "--no-kv-events", "--migration-limit", "2")
    async with up(tmp_path, "--one-process", *flags) as (process, state):
        assert set(state["processes"]) == {"serve", "mocker-0", "mocker-1"}
        assert {child.pid for child in psutil.Process(process.pid).children()} == set(state["processes"].values())
        assert state["gateway"] == state["indexer"] == state["scheduler"]
        async with Router(state["gateway"], model="mock-model") as router:
            prompt = list(range(100, 164))
            assert [chunk async for chunk in router.generate(prompt, stop=StopConditions(max_tokens=4))]
            decision = await router.route(prompt, explain=True)
            assert decision.explanation is not None
            assert decision.explanation.policy == "random"
        shown = await kvscout("status", "--json", "--gateway", state["gateway"])
        status = json.loads(await output(shown))
        assert {service["kind"] for service in status["services"]} == {"gateway", "indexer", "scheduler"}
        process.send_signal(signal.SIGINT)
        text = await output(process)
        assert await process.wait() == 0
        assert f"  serve      gRPC {state['gateway']} · OpenAI {state['openai']} · dashboard " in text
        await nothing_left(state)


async def test_over_jetstream_a_bridge_registers_the_engines_and_brings_their_events(tmp_path: Path) -> None:
    async with up(tmp_path, "--mockers", "2", "--transport", "jetstream") as (process, state):
        assert set(state["processes"]) == SERVICES | {"nats", "bridge", "mocker-0", "mocker-1"}
        async with Router(state["gateway"], model="mock-model") as router:
            prompt = list(range(100, 164))
            chunks = [chunk async for chunk in router.generate(prompt, stop=StopConditions(max_tokens=4))]
            assert chunks

            async def found() -> bool:
                return (await router.route(prompt)).overlap_blocks == 4

            await eventually(found, what="the prompt's blocks in the index")
        shown = await kvscout("status", "--json", "--gateway", state["gateway"])
        kinds = {service["kind"] for service in json.loads(await output(shown))["services"]}
        assert kinds == {"gateway", "indexer", "scheduler", "bridge"}
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        await nothing_left(state)


async def test_killing_up_leaves_nothing(tmp_path: Path) -> None:
    async with up(tmp_path, "--mockers", "1") as (process, state):
        process.kill()
        await process.wait()
        await nothing_left(state)


async def test_up_ends_with_an_error_when_a_process_dies(tmp_path: Path) -> None:
    async with up(tmp_path, "--mockers", "1") as (process, state):
        os.kill(state["processes"]["scheduler"], signal.SIGKILL)
        text = await output(process)
        assert await process.wait() == 1
        assert "error: scheduler was killed by SIGKILL unasked" in text
        await nothing_left(state)


async def test_detached_it_returns_when_it_is_up_and_down_stops_it(tmp_path: Path) -> None:
    directory = ("--state-dir", str(tmp_path))
    workers = tmp_path / "workers.yaml"
    workers.write_text(
        "workers:\n  - {worker_id: real-0, model: llama, block_size: 32, role: prefill}\n"
        "  - {worker_id: real-1, model: llama, block_size: 32, role: decode}\n"
    )
    started = await kvscout("up", "--free-ports", "--detach", "--workers-file", str(workers), *directory)
    assert started.returncode == 0, await output(started)
    assert "kvscout route $(seq 1 64) --explain --role prefill\n" in await output(started)
    state = await state_of(tmp_path, started)
    try:
        assert set(state["processes"]) == SERVICES
        async with Router(state["gateway"]) as router:
            assert [record.spec.worker_id for record in await router.list_workers()] == ["real-0", "real-1"]
    finally:
        stopped = await kvscout("down", *directory)
    assert (stopped.returncode, await output(stopped)) == (0, "kvscout is down\n")
    await nothing_left(state)
    again = await kvscout("down", *directory)
    assert (again.returncode, await output(again)) == (0, "kvscout is not up\n")


async def test_it_tells_whose_a_port_is_that_it_finds_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        topology = Topology(ports=replace(Ports(), gateway_metrics=port), workers_file=tmp_path / "none.yaml")
        async with Stack() as stack:
            with pytest.raises(FailedPrecondition) as refused:
                await launch(stack, topology, tmp_path)
        assert f"port {port} (gateway metrics) is taken: `" in str(refused.value)
        assert f"has it (pid {os.getpid()}); --free-ports takes" in str(refused.value)


async def test_of_another_stack_it_tells_what_stops_it(tmp_path: Path) -> None:
    (tmp_path / "kvscout").write_text(
        "import subprocess, sys\n"
        'server = \'import socket, sys; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1], '
        "flush=True); sys.stdin.read()'\n"
        "subprocess.run([sys.executable, '-c', server])\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(tmp_path / "kvscout"), "up", "--state-dir", "state"),
        cwd=tmp_path,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    told = holder(int(await process.stdout.readline()))
    process.stdin.close()
    await process.wait()
    assert told.startswith(f"the kvscout whose state is in {tmp_path}/state has it (pid {process.pid})")
    assert told.endswith(f"`kvscout down --state-dir {tmp_path}/state` stops that one")


async def test_detached_it_tells_why_it_did_not_start(tmp_path: Path) -> None:
    workers = tmp_path / "workers.yaml"
    workers.write_text("workers: 7\n")
    flags = ("--free-ports", "--detach", "--workers-file", str(workers), "--state-dir", str(tmp_path))
    failed = await kvscout("up", *flags)
    text = await output(failed)
    assert failed.returncode == 1
    assert "workers_file:" in text
    assert "Traceback" not in text
