"""Parts of a kvscout that are broken under load, one after the other, and what doctor says of each.

What can be mended is broken in one `kvscout up`; the rest has services and engines of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import aiohttp
from aiohttp import web
from cli.test_up import kvscout, output, up

from support import scheduler_policy_plugin
from support.free_ports import free_ports
from support.gateway_stack import Stack, mocker_worker, running_stack
from support.mocker_process import running_mocker
from support.nats_server import nats_server
from support.web_servers import web_server

TESTS = Path(__file__).parents[1]
GIVEN_UP_AFTER_SECONDS = 40.0
MENDED_WITHIN_SECONDS = 40.0
LOAD = ("--rate", "3", "--duration", "600")
SPEED = ("--speedup", "5")
"""Of simulated engines: a request takes part of a second."""


class Damage(NamedTuple):
    """Something to break, and what doctor is to say of it first."""

    what: str
    findings: frozenset[str]
    """Ids, of which one must come first."""
    name: str
    """Of what is broken; in doctor's first sentence."""


Report = Callable[["Named"], object]


class Named(NamedTuple):
    """What doctor said of a damage."""

    damage: Damage
    seconds: float
    """Until one of its findings came first, with the run of doctor itself."""
    sentence: str
    """Doctor's first."""
    right: bool
    """It is one of the damage's, and names what is broken."""


class Doctor:
    """`kvscout doctor`, run again and again."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway

    async def findings(self) -> list[dict[str, Any]]:
        """Return what doctor finds, in its order."""
        done = await kvscout("doctor", "--json", "--gateway", self._gateway)
        found: list[dict[str, Any]] = json.loads(await output(done))["findings"]
        return found

    async def until(
        self, holds: Callable[[list[dict[str, Any]]], bool], seconds: float
    ) -> tuple[float, list[dict[str, Any]]]:
        """Return when doctor's findings were so, or its last ones after that time."""
        began = time.monotonic()
        while not holds(found := await self.findings()) and time.monotonic() < began + seconds:
            await asyncio.sleep(0.2)
        return time.monotonic() - began, found

    async def until_well(self) -> None:
        """Wait until nothing is wrong."""
        await self.until(lambda found: not found, MENDED_WITHIN_SECONDS)

    async def names(self, damage: Damage) -> Named:
        """Return what it says of a damage of this moment."""

        def is_named(found: list[dict[str, Any]]) -> bool:
            return bool(found) and found[0]["id"] in damage.findings and damage.name in found[0]["what"]

        seconds, found = await self.until(is_named, GIVEN_UP_AFTER_SECONDS)
        return Named(damage, seconds, found[0]["what"] if found else "nothing is wrong", is_named(found))


async def break_each(damages: Sequence[Damage], report: Report) -> None:
    """Break parts under load, one after the other.

    Args:
        damages: What to break: some of `MENDED` and `UNMENDED`.
        report: Called with what doctor said of each.
    """
    if mended := [damage for damage in damages if damage in MENDED]:
        await _break_and_mend(mended, report)
    for damage in damages:
        if damage in UNMENDED:
            async with UNMENDED[damage]() as (gateway, breaks):
                doctor = Doctor(gateway)
                await doctor.until_well()
                await breaks()
                report(await doctor.names(damage))


async def _break_and_mend(damages: Sequence[Damage], report: Report) -> None:
    with TemporaryDirectory(prefix="kvscout-") as name:
        async with up(Path(name)) as (_, state), _loaded(state["gateway"]):
            doctor = Doctor(state["gateway"])

            async def change(damage: Damage, words: tuple[str, ...], number: signal.Signals) -> None:
                target, broken_by = MENDED[damage]
                if not broken_by:
                    os.kill(state["processes"][target], number)
                    return
                done = await kvscout("break", target, *(words or broken_by), "--state-dir", name)
                assert done.returncode == 0, await output(done)

            await doctor.until_well()
            for damage in damages:
                await change(damage, (), signal.SIGSTOP)
                report(await doctor.names(damage))
                await change(damage, ("--mend",), signal.SIGCONT)
                await doctor.until_well()


Breaks = Callable[[], Awaitable[object]]
World = tuple[str, Breaks]
"""A gateway's address, and what breaks something of it."""


@asynccontextmanager
async def _loaded(gateway: str) -> AsyncIterator[None]:
    """Send conversations to a gateway."""
    load = await kvscout("load", *LOAD, "--gateway", gateway, wait=False)
    try:
        yield
    finally:
        load.kill()
        await load.wait()


@asynccontextmanager
async def _stack(breaks: Callable[[Stack], Awaitable[object]]) -> AsyncIterator[World]:
    async with running_stack(mockers=(SPEED,) * 3) as stack, _loaded(stack.gateway.address):
        yield stack.gateway.address, lambda: breaks(stack)


async def _kill_engine(stack: Stack) -> None:
    stack.mockers[1].process.kill()


async def _kill_indexer(stack: Stack) -> None:
    stack.indexer.process.kill()


async def _kill_scheduler(stack: Stack) -> None:
    stack.scheduler.process.kill()


@asynccontextmanager
async def _without_nats() -> AsyncIterator[World]:
    async with nats_server() as nats:
        flags = ("--nats-server", nats.url)
        services = running_stack(*flags, mockers=(SPEED,), scheduler_flags=flags, indexer_flags=flags)
        async with services as stack, _loaded(stack.gateway.address):
            yield stack.gateway.address, nats.kill


@asynccontextmanager
async def _wrong_event_endpoint() -> AsyncIterator[World]:
    async with running_mocker(*SPEED) as mocker, _stack(_kill_engine) as (gateway, _):
        (nothing,) = free_ports(1)
        worker = mocker_worker("astray", mocker)
        flags = ("--http-endpoint", worker.http_endpoint, "--model", worker.model, "--engine", "mock")
        events = ("--block-size", "16", "--event-endpoint", f"tcp://127.0.0.1:{nothing}", "--total-kv-blocks", "4095")
        yield gateway, lambda: _succeeds("workers", "register", "astray", *flags, *events, "--gateway", gateway)


async def _succeeds(*words: str) -> None:
    done = await kvscout(*words)
    assert done.returncode == 0, await output(done)


@asynccontextmanager
async def _failing_policy() -> AsyncIterator[World]:
    with TemporaryDirectory(prefix="kvscout-") as name:
        scheduler_policy_plugin.install(Path(name))
        with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join((name, str(TESTS)))}):
            async with up(Path(name), "--mockers", "2", "--router-mode", "always-raising") as (_, state):
                loading = _loaded(state["gateway"])
                yield state["gateway"], loading.__aenter__
                await loading.__aexit__(None, None, None)


@asynccontextmanager
async def _late_tokens() -> AsyncIterator[World]:
    async def hangs(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hangs)
    async with web_server(app, shutdown_timeout=0.1) as renderer, asyncio.TaskGroup() as group:
        with TemporaryDirectory(prefix="kvscout-") as name:
            flags = ("--mockers", "2", "--renderer", renderer, "--tokenize-timeout-ms", "50")
            async with up(Path(name), *flags) as (_, state), aiohttp.ClientSession() as http:

                async def talk() -> None:
                    while True:
                        body = {"model": state["model"], "prompt": "a prompt of text", "max_tokens": 4}
                        async with http.post(f"{state['openai']}/completions", json=body) as answer:
                            await answer.read()

                async def begin() -> None:
                    talking.append(group.create_task(talk()))

                talking: list[asyncio.Task[None]] = []
                yield state["gateway"], begin
                talking[0].cancel()


MENDED: dict[Damage, tuple[str, tuple[str, ...]]] = {
    Damage("an engine hangs", frozenset({"engine-suspected"}), "mocker-0"): ("mocker-0", ("--hang",)),
    Damage("an engine is slow", frozenset({"worker-slow"}), "mocker-1"): ("mocker-1", ("--slow",)),
    Damage("an engine's events end", frozenset({"events-silent"}), "mocker-2"): ("mocker-2", ("--mute-events",)),
    Damage("the indexer hangs", frozenset({"service-unreachable"}), "Indexer"): ("indexer", ()),
    Damage("the scheduler hangs", frozenset({"service-unreachable"}), "Scheduler"): ("scheduler", ()),
}
"""Processes of `kvscout up`, with the words of `kvscout break`; none: the process is stopped."""
UNMENDED: dict[Damage, Callable[[], AbstractAsyncContextManager[World]]] = {
    Damage("an engine is killed", frozenset({"engine-suspected", "engine-unreachable"}), "w1"): (
        lambda: _stack(_kill_engine)
    ),
    Damage("the indexer is killed", frozenset({"service-unreachable"}), "Indexer"): lambda: _stack(_kill_indexer),
    Damage("the scheduler is killed", frozenset({"service-unreachable"}), "Scheduler"): lambda: _stack(_kill_scheduler),
    Damage("NATS is gone", frozenset({"nats-unreachable"}), "NATS"): _without_nats,
    Damage("a wrong event endpoint", frozenset({"events-unreachable"}), "astray"): _wrong_event_endpoint,
    Damage("a policy raises", frozenset({"policy-failing"}), "always-raising"): _failing_policy,
    Damage("tokens come too late", frozenset({"tokens-late"}), "tokens"): _late_tokens,
}
DAMAGES = (*MENDED, *UNMENDED)
