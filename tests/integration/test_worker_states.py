"""Engines that are stopped, killed, slow or mute: every surface shows the same state, and doctor names it first."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc
import pytest
from support.gateway_stack import (
    MODEL,
    Stack,
    connected,
    fresh_prompt,
    mocker_worker,
    running_services,
    running_stack,
    together,
)
from support.mocker_process import running_mocker
from support.process_metrics import scrape
from support.processes import DEADLINE_SECONDS, eventually

from kvscout.v1 import types_pb2
from kvscout.v1.types_pb2 import ROLE_DECODE as DECODE
from kvscout.v1.types_pb2 import ROLE_PREFILL as PREFILL
from kvscout_common.enum_words import word_of

pytestmark = pytest.mark.usefixtures("each_mode")
THREE = (("--speedup", "1"),) * 3
"""Milliseconds a token."""
STATE = re.compile(r'state="([a-z ]+)"')


async def kvscout(stack: Stack, *words: str) -> str:
    """What a command about the stack prints, whatever its exit code."""
    command = (sys.executable, "-m", "kvscout_cli.main", *words, "--gateway", stack.gateway.address)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    assert process.returncode in (0, 1), printed
    return printed.decode()


async def dashboard(stack: Stack) -> dict[str, str]:
    """The states of the workers in the dashboard's next event, by id."""
    url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}/dashboard/events"
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        kind = b""
        while line := await response.content.readuntil(b"\n"):
            if line.startswith(b"event:"):
                kind = line.split()[1]
            elif line.startswith(b"data:") and kind == b"state":
                workers = json.loads(line.removeprefix(b"data:"))["workers"]
                rows = (dict(zip(workers["columns"], row, strict=True)) for row in workers["rows"])
                return {row["worker"]: row["word"] for row in rows}
    raise AssertionError("the dashboard ended")


async def states(stack: Stack, worker_id: str) -> dict[str, str]:
    """The state of a worker, by the surface that shows it."""
    entry = (await stack.client.known())[worker_id]
    commands = (
        ("workers", "list", "--json"),
        ("loads", "--model", MODEL, "--json"),
        ("status", "--json"),
        ("top", "--once", "--json", "--interval", "0.2"),
    )
    printed = await asyncio.gather(*(kvscout(stack, *command) for command in commands))
    listed, loads, overview, top = map(json.loads, printed)
    samples = [name for name in await scrape(stack.gateway) if name.startswith("kvscout_worker_state{")]
    return {
        "GetStatus": await _at_gateway(stack, worker_id),
        "ListWorkers": word_of(types_pb2.WorkerState, entry.health.state),
        "workers list": next(one["health"]["state"] for one in listed if one["spec"]["worker_id"] == worker_id),
        "loads": next(one["health"]["state"] for one in loads if one["worker"]["worker_id"] == worker_id),
        "status": next(one["health"]["state"] for one in overview["sources"] if one["worker_id"] == worker_id),
        "top": next(one["state"] for one in top["workers"] if worker_id in one["name"]),
        "dashboard": (await dashboard(stack))[worker_id],
        "metric": next(STATE.findall(name)[0] for name in samples if f'worker="{worker_id}"' in name),
    }


async def _at_gateway(stack: Stack, worker_id: str) -> str:
    status = await stack.client.status()
    observed = [one.health.state for one in status.workers if one.worker.worker_id == worker_id]
    return word_of(types_pb2.WorkerState, observed[0]) if observed else "ok"


async def until_all_say(stack: Stack, worker_id: str, state: str) -> None:
    """Waits until each surface shows this state."""
    last: dict[str, str] = {}

    async def same() -> bool:
        nonlocal last
        last = {"GetStatus": await _at_gateway(stack, worker_id)}
        if last["GetStatus"] == state:
            # Half of the others are commands, each a process: they are asked when they can be right.
            last = await states(stack, worker_id)
        return set(last.values()) == {state}

    try:
        await eventually(same, what=f"{worker_id} {state}", deadline_seconds=2 * DEADLINE_SECONDS)
    except AssertionError as error:
        raise AssertionError(f"{error}: {last}") from None


async def first_finding(stack: Stack) -> dict[str, Any]:
    """What doctor names first of all that is no fault of the machine that runs the tests."""
    machine = ("reference-backend", "descriptors-few")
    found = json.loads(await kvscout(stack, "doctor", "--json"))["findings"]
    return next((one for one in found if one["id"] not in machine), {"id": "", "evidence": []})


@asynccontextmanager
async def load(stack: Stack, *, max_tokens: int = 32) -> AsyncIterator[list[str]]:
    """Runs new prompts until exit, three at a time with a pause; yields the errors of those that failed."""
    errors: list[str] = []

    async def send() -> None:
        while True:
            try:
                await stack.client.generate(fresh_prompt(64), max_tokens=max_tokens)
            except grpc.aio.AioRpcError as error:
                errors.append(error.details() or "")
            await asyncio.sleep(0.02)

    senders = [asyncio.create_task(send()) for _ in range(3)]
    try:
        yield errors
    finally:
        for sender in senders:
            sender.cancel()
        ended = await asyncio.gather(*senders, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


async def test_a_stopped_engine_has_one_state_everywhere_and_what_waits_for_it_is_moved() -> None:
    async with running_stack(mockers=THREE) as stack:
        await until_all_say(stack, "w0", "ok")
        stack.mockers[0].process.send_signal(signal.SIGSTOP)
        try:
            waiting = [asyncio.create_task(stack.client.generate(fresh_prompt(64), max_tokens=2)) for _ in range(6)]
            pinned = asyncio.create_task(stack.client.generate(fresh_prompt(64), max_tokens=2, pinned_worker_id="w0"))
            answers = await asyncio.wait_for(asyncio.gather(*waiting), DEADLINE_SECONDS)
            # Where each ran in the end.
            assert {answer.routes[-1].worker.worker_id for answer in answers} <= {"w1", "w2"}
            with pytest.raises(grpc.aio.AioRpcError, match="lost"):
                await pinned
            await until_all_say(stack, "w0", "left out")
            finding = await first_finding(stack)
            assert finding["id"] == "engine-unreachable"
            [sentence] = finding["evidence"]
            assert sentence.startswith("worker w0 has been left out for ")
            assert "no answer within 2 s" in sentence
        finally:
            stack.mockers[0].process.send_signal(signal.SIGCONT)
        await until_all_say(stack, "w0", "ok")


async def test_doctor_suspects_an_idle_engine_that_was_stopped_a_moment_ago() -> None:
    async with running_stack("--engine-health-seconds", "3600", mockers=THREE) as stack:
        stack.mockers[1].process.send_signal(signal.SIGSTOP)
        try:
            finding = await first_finding(stack)
            assert finding["id"] == "engine-suspected"
            assert finding["evidence"][0].startswith("worker w1 has been suspected for ")
        finally:
            stack.mockers[1].process.send_signal(signal.SIGCONT)


async def test_a_killed_engine_is_the_first_finding_and_its_events_are_none_of_their_own() -> None:
    async with running_stack(mockers=THREE) as stack:
        async with load(stack) as errors:
            await eventually(lambda: _requests(stack, 6), what="requests at all workers")
            stack.mockers[2].process.kill()
            await until_all_say(stack, "w2", "left out")
        # What had begun to answer on it is lost.
        assert all("after its first token" in error for error in errors), errors
        found = json.loads(await kvscout(stack, "doctor", "--json"))["findings"]
        named = {one["id"] for one in found if any("w2" in text for text in one["evidence"])}
        assert named == {"engine-unreachable"}


@pytest.mark.services_only
async def test_an_engine_that_is_slower_than_the_others_is_slow_until_it_is_mended() -> None:
    async with running_stack(mockers=THREE) as stack, load(stack) as errors:
        await eventually(lambda: _requests(stack, 6), what="requests at all workers")
        await stack.mockers[0].post("/mock/faults", {"slowdown": 20.0})
        # Requests avoid a slow worker: its speed is known by those that are pinned to it.
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(_pinned(stack, "w0"))
            await until_all_say(stack, "w0", "slow")
            finding = await first_finding(stack)
            assert finding["id"] == "worker-slow"
            assert "ms a token, the other workers" in finding["evidence"][0]
            await stack.mockers[0].post("/mock/faults", {"slowdown": 1.0})
            await until_all_say(stack, "w0", "ok")
            slow.cancel()
        assert errors == []


@pytest.mark.services_only
async def test_an_engine_whose_events_stop_has_no_events_until_they_come_again() -> None:
    async with running_stack(mockers=THREE) as stack, load(stack) as errors:
        await eventually(lambda: _requests(stack, 6), what="requests at all workers")
        await stack.mockers[0].post("/mock/faults", {"drop_events": 1.0})
        async with asyncio.TaskGroup() as group:
            served = group.create_task(_pinned(stack, "w0"))
            await until_all_say(stack, "w0", "no events")
            finding = await first_finding(stack)
            assert finding["id"] == "events-silent"
            assert "since its last KV event" in finding["evidence"][0]
            await stack.mockers[0].post("/mock/faults", {"drop_events": 0.0})
            await until_all_say(stack, "w0", "ok")
            served.cancel()
        assert errors == []


async def test_a_prefill_worker_that_is_stopped_is_left_out_and_its_prompts_run_elsewhere() -> None:
    engines = [running_mocker(*flags) for flags in THREE]
    async with together(running_services(), *engines) as (served, *mockers):
        async with connected(served.gateway, served.scheduler, served.indexer) as client:
            stack = Stack(served.indexer, served.scheduler, served.gateway, mockers, client, None, served.indexers)
            for name, role, mocker in zip(("p0", "p1", "d"), (PREFILL, PREFILL, DECODE), mockers, strict=True):
                await client.register(mocker_worker(name, mocker, role=role))
            await until_all_say(stack, "p0", "ok")
            mockers[0].process.send_signal(signal.SIGSTOP)
            try:
                requests = (client.generate(fresh_prompt(64), max_tokens=2) for _ in range(6))
                await asyncio.wait_for(asyncio.gather(*requests), DEADLINE_SECONDS)
                await until_all_say(stack, "p0", "left out")
                assert (await first_finding(stack))["id"] == "engine-unreachable"
            finally:
                mockers[0].process.send_signal(signal.SIGCONT)


async def _requests(stack: Stack, count: int) -> bool:
    status = await stack.client.status()
    return len(status.workers) == len(stack.mockers) and all(one.requests >= count for one in status.workers)


async def _pinned(stack: Stack, worker_id: str) -> None:
    while True:
        await stack.client.generate(fresh_prompt(64), max_tokens=32, pinned_worker_id=worker_id)
