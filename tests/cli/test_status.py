"""`kvscout status` beside real services and engines."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import signal
import socket
import struct
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from itertools import count
from typing import Any

import pytest
import pytest_asyncio
from support.gateway_stack import Stack, fresh_prompt, running_stack
from support.processes import DEADLINE_SECONDS, eventually

from kvscout.v1 import workers_pb2
from kvscout_common.doctor.collection import Collection, NamedService
from kvscout_common.doctor.overview import Overview, overview
from kvscout_common.doctor.snapshot import ServiceKind
from kvscout_common.identity.client_security import PLAINTEXT

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def kvscout(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(2 * DEADLINE_SECONDS):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as started:
        yield started


async def seen(stack: Stack, *further: str) -> Overview:
    named = [NamedService(stack.gateway.address, ServiceKind.GATEWAY), *map(NamedService, further)]
    return overview(await Collection(PLAINTEXT, timeout_seconds=DEADLINE_SECONDS).snapshot(named, engines=False))


async def test_status_shows_every_service_and_source_and_fails_when_one_is_in_trouble(stack: Stack) -> None:
    prompt = fresh_prompt(64)
    await stack.client.generate(prompt)
    await stack.client.until_indexed(prompt, 4)
    code, out, err = await kvscout("status", "--json", "--gateway", stack.gateway.address)
    assert (code, err) == (0, "")
    shown: dict[str, Any] = json.loads(out)
    assert [(row["kind"], row["address"], row["state"]) for row in shown["services"]] == [
        ("gateway", stack.gateway.address, "ok"),
        ("indexer", stack.indexer.address, "ok"),
        ("scheduler", stack.scheduler.address, "ok"),
    ]
    assert all(row["version"] and row["uptime_seconds"] > 0 for row in shown["services"])
    assert [(row["worker_id"], row["dp_rank"], row["well"]) for row in shown["sources"]] == [
        ("w0", 0, True),
        ("w1", 0, True),
    ]
    [live] = [row for row in shown["sources"] if row["state"] == "live"]
    assert (live["requests"], live["prediction_error"]) == (1, 0)
    assert live["blocks"] >= 4
    assert live["last_event_age_seconds"] >= 0
    assert live["endpoint"] == stack.mockers[int(live["worker_id"][1])].ranks[0]["events"]

    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        silent = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        events = [workers_pb2.EventEndpoint(endpoint=silent)]
        lost = workers_pb2.Worker(worker_id="lost", model="mock", block_size=16, event_endpoints=events)
        await stack.client.register(lost)

        async def told() -> bool:
            return any(row.worker_id == "lost" and not row.well for row in (await seen(stack)).sources)

        await eventually(told, what="a source in trouble")
        code, out, _ = await kvscout("status", "--gateway", stack.gateway.address)
        assert code == 1
        [line] = [line for line in out.splitlines() if line.startswith("lost/0")]
        assert f"nothing answers at {silent}" in line
        assert "disconnected" in line


async def test_further_services_are_known_by_what_they_say_and_shown_once(stack: Stack) -> None:
    indexer = stack.indexer.address
    shown = await seen(stack, indexer, indexer.replace("127.0.0.1", "localhost"), "127.0.0.1:1", "nowhere")
    assert [(row.kind, row.address) for row in shown.services[:3]] == [
        ("gateway", stack.gateway.address),
        ("indexer", indexer),
        ("scheduler", stack.scheduler.address),
    ]
    refused, wrong = shown.services[3:]
    assert (refused.kind, refused.address, refused.well) == ("", "127.0.0.1:1", False)
    assert "is not an address" in wrong.state


async def test_a_gateway_that_was_told_of_another_service_as_its_scheduler_is_said_so(stack: Stack) -> None:
    named = [
        NamedService(stack.indexer.address, ServiceKind.SCHEDULER),
        NamedService(stack.gateway.address, ServiceKind.INDEXER),
    ]
    shown = overview(await Collection(PLAINTEXT).snapshot(named))
    assert sorted(row.state for row in shown.services) == [
        "no indexer: it is a service of another kind, gateway",
        "no scheduler: it is a service of another kind, indexer",
    ]


async def test_doctor_tells_what_it_finds_as_text_and_as_json(stack: Stack) -> None:
    code, out, err = await kvscout("doctor", "--json", "--gateway", stack.gateway.address, "127.0.0.1:1")
    assert (code, err) == (1, "")
    found = {finding["id"]: finding for finding in json.loads(out)["findings"]}
    unreachable = found["service-unreachable"]
    assert (unreachable["severity"], len(unreachable["evidence"])) == ("error", 1)
    assert "service 127.0.0.1:1: " in unreachable["evidence"][0]
    code, out, _ = await kvscout("doctor", "--no-engines", "--gateway", "127.0.0.1:1", "--timeout", "2")
    assert code == 1
    said = "error service-unreachable\n  Gateway 127.0.0.1:1 does not answer at its address.\n  · gateway 127.0.0.1:1: "
    assert out.startswith(said)
    assert "  → Start the service" in out
    assert "1 finding (checked: nobody answered; 0 workers)" in out


@asynccontextmanager
async def top_on_a_terminal(stack: Stack) -> AsyncIterator[tuple[asyncio.subprocess.Process, int, Callable[[], str]]]:
    """`kvscout top` on a terminal of 50 lines: the process, the terminal's other end, and what was written so far."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_cli.main", "top", "--interval", "0.2", "--gateway", stack.gateway.address),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    written = bytearray()

    def text() -> str:
        with suppress(BlockingIOError):
            written.extend(os.read(ours, 1 << 20))
        return written.decode(errors="replace")

    try:
        yield process, ours, text
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)


async def ends_well(process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await process.wait() == 0


async def test_top_shows_frames_on_a_terminal_with_the_decisions_as_they_are_made(stack: Stack) -> None:
    numbers = count()
    async with top_on_a_terminal(stack) as (process, _, text):

        async def decided() -> bool:
            await stack.client.generate(fresh_prompt(32), max_tokens=1, request_id=f"seen-by-top-{next(numbers)}")
            return "seen-by-top-" in text()

        await eventually(decided, what="a decision on the terminal")
        assert "hit rate" in text()
        process.send_signal(signal.SIGINT)
        await ends_well(process)


async def test_top_obeys_keys_and_leaves_the_terminal_as_it_was(stack: Stack) -> None:
    async with top_on_a_terminal(stack) as (process, terminal, text):
        before = termios.tcgetattr(terminal)

        async def shown(expected: str) -> bool:
            return expected in text()

        await eventually(partial(shown, "w0/0"), what="a frame")
        for keys, expected in ((b"s", "by req/s"), (b"/w1", "/w1"), (b"\r\r", "cached blocks  "), (b"?", "leaves it")):
            os.write(terminal, keys)
            await eventually(partial(shown, expected), what=expected)
        os.write(terminal, b"q")
        await ends_well(process)
        assert termios.tcgetattr(terminal) == before


async def test_top_prints_one_frame_where_there_is_no_terminal(stack: Stack) -> None:
    code, out, err = await kvscout("top", "--gateway", stack.gateway.address, "--interval", "0.1")
    assert (code, err) == (0, "")
    assert out.count("hit rate") == 2  # of all, and a column
    assert "w0/0" in out


async def test_one_frame_of_top_has_the_decisions_made_meanwhile(stack: Stack) -> None:
    looking = asyncio.create_task(kvscout("top", "--once", "--gateway", stack.gateway.address, "--interval", "5"))
    while not looking.done():
        await stack.client.generate(fresh_prompt(32), max_tokens=1)
        await asyncio.wait({looking}, timeout=0.2)
    code, out, err = await looking
    assert (code, err) == (0, "")
    assert "last decisions" in out


async def test_top_prints_a_document_a_line_until_a_signal(stack: Stack) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_cli.main", "top", "--json", "--interval", "0.1"),
        *("--gateway", stack.gateway.address),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    await stack.client.generate(fresh_prompt(32), max_tokens=1)
    async with asyncio.timeout(DEADLINE_SECONDS):
        documents = [json.loads(await process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 0
    assert documents[-1]["totals"]["requests"] >= 1
    assert {"w0/0", "w1/0"} <= {worker["name"] for worker in documents[-1]["workers"]}
    assert sum(worker["ttft_seconds"] or 0.0 for worker in documents[-1]["workers"]) > 0


async def test_workers_are_listed_with_the_state_of_their_events(stack: Stack) -> None:
    code, out, _ = await kvscout("workers", "list", "--json", "--gateway", stack.gateway.address)
    assert code == 0
    events = {worker["spec"]["worker_id"]: worker["events"] for worker in json.loads(out)}
    assert events.keys() >= {"w0", "w1"}
    assert set(events["w0"]) <= {"live", "waiting"}


async def test_nobody_at_the_gateways_address_is_a_row_and_not_a_crash() -> None:
    code, out, _ = await kvscout("status", "--gateway", "127.0.0.1:1", "--timeout", "2")
    assert code == 1
    assert out.splitlines()[1].startswith("gateway")
    assert "127.0.0.1:1" in out


async def test_shadow_says_so_where_no_gateway_shadows(stack: Stack) -> None:
    code, out, err = await kvscout("shadow", "--gateway", stack.gateway.address)
    assert (code, out, err) == (1, "", "no gateway that answered runs with --shadow\n")
