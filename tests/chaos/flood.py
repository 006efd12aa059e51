"""`make chaos-flood`: hostile clients in processes of their own, and how long honest requests wait meanwhile.

Two mockers, an indexer, a scheduler and a gateway carry honest streams all the time. One flood after the other
(`chaos.floods`) comes from ATTACKERS processes without a token; meanwhile `/health`, Route and a short completion are
asked for, over connections that exist and over new ones. No honest request may fail, no stream may break, the gateway's
memory must stay bounded, and nothing may be booked or called an error afterwards. The delays are printed beside those
of a quiet second; GOAL_MS is a goal of an idle two-core machine, which the attackers share, and is not enforced.

CHAOS_SECONDS is the length of each flood, CHAOS_FLOODS names some of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import psutil
from support.gateway_stack import MODEL, Stack, fresh_prompt, running_stack

from chaos.floods import GRPC_KINDS, KINDS

SECONDS: Final = float(os.environ.get("CHAOS_SECONDS", "5"))
FLOODS: Final = tuple(os.environ.get("CHAOS_FLOODS", ",".join(KINDS)).split(","))
ATTACKERS: Final = 2
GOAL_MS: Final = 250.0
PAUSE_SECONDS: Final = 0.02
REQUEST_SECONDS: Final = 30.0
"""An honest request that takes longer has failed."""
MAX_GROWTH_BYTES: Final = 1 << 30
"""Of the gateway, over all floods: its budget of bytes that are not admitted yet, and what Python makes of some."""
HONEST_STREAMS: Final = 4


@dataclass(slots=True)
class Delays:
    """How long requests of one kind took, in ms, and what failed."""

    ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def measure(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Time one request."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await ask()
        except Exception as error:  # whatever it is, it is what an honest client got
            self.failures.append(f"{error!r} after {time.perf_counter() - began:.2f} s")
        self.ms.append((time.perf_counter() - began) * 1e3)

    def __str__(self) -> str:
        ordered = sorted(self.ms)
        middle, worst = ordered[len(ordered) // 2], ordered[-1]
        return f"{middle:6.1f} {worst:7.0f}{'*' if worst > GOAL_MS else ' '}"


class Honest:
    """Requests of clients that have done nothing wrong."""

    def __init__(self, stack: Stack, http: aiohttp.ClientSession) -> None:
        self._client = stack.client
        self._http = http
        self.url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}"
        self.broken: list[str] = []
        """Streams that ended before their end."""
        self.streams = 0

    async def health(self) -> None:
        """Ask over a connection that is kept."""
        async with self._http.get(f"{self.url}/health") as answer:
            assert answer.status == 200, answer.status

    async def connect(self) -> None:
        """Ask over a new connection."""
        async with aiohttp.ClientSession() as fresh, fresh.get(f"{self.url}/health") as answer:
            assert answer.status == 200, answer.status

    async def route(self) -> None:
        """Ask where a prompt would go."""
        await self._client.route(fresh_prompt(64))

    async def stream(self) -> None:
        """Read one streamed completion to its end."""
        body = {"model": MODEL, "prompt": list(fresh_prompt(64)), "max_tokens": 50, "stream": True}
        try:
            async with self._http.post(f"{self.url}/v1/completions", json=body) as answer:
                text = await answer.read()
                if answer.status != 200 or not text.rstrip().endswith(b"data: [DONE]"):
                    self.broken.append(f"{answer.status}: …{text[-200:]!r}")
        except aiohttp.ClientError as error:
            self.broken.append(repr(error))
        self.streams += 1

    async def streaming(self) -> None:
        """Read one stream after the other."""
        while True:
            await self.stream()


async def probed(honest: Honest, until: Callable[[], bool]) -> dict[str, Delays]:
    """Ask for everything in turns until told to stop."""
    asked = {"health": honest.health, "new connection": honest.connect, "Route": honest.route}
    delays = {name: Delays() for name in asked}

    async def ask(name: str) -> None:
        while not until():
            await delays[name].measure(asked[name])
            await asyncio.sleep(PAUSE_SECONDS)

    await asyncio.gather(*map(ask, asked))
    return delays


async def attacked(stack: Stack, kind: str, seconds: float) -> asyncio.subprocess.Process:
    """Start one attacker."""
    port = stack.gateway.ready["port" if kind in GRPC_KINDS else "http_port"]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "chaos.floods", kind, "127.0.0.1", str(port), str(seconds),
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[1],
    )  # fmt: skip


async def run(seconds: float, kinds: tuple[str, ...]) -> list[str]:
    """Run the floods, print what honest requests saw; return what is wrong."""
    wrong: list[str] = []
    async with running_stack() as stack, aiohttp.ClientSession() as http:
        honest = Honest(stack, http)
        gateway = psutil.Process(stack.gateway.process.pid)
        traffic = [asyncio.create_task(honest.streaming()) for _ in range(HONEST_STREAMS)]
        before = gateway.memory_info().rss
        print(f"{'p50 and longest in ms':23}{'health':>8}{'new connection':>17}{'Route':>17}   RSS MiB   attackers")
        try:
            for kind in ("", *kinds):
                wrong += await _flooded(stack, honest, gateway, kind, seconds)
        finally:
            for task in traffic:
                task.cancel()
            await asyncio.gather(*traffic, return_exceptions=True)
        growth = gateway.memory_info().rss - before
        if growth > MAX_GROWTH_BYTES:
            wrong.append(f"the gateway has grown by {growth >> 20} MiB")
        await stack.client.until_idle()
        print(f"{honest.streams} streams of honest clients, {len(honest.broken)} broken")
    return wrong + [f"a stream broke: {why}" for why in honest.broken]


async def _flooded(stack: Stack, honest: Honest, gateway: psutil.Process, kind: str, seconds: float) -> list[str]:
    attackers = [await attacked(stack, kind, seconds) for _ in range(ATTACKERS if kind else 0)]
    end = time.monotonic() + seconds
    delays = await probed(honest, lambda: time.monotonic() >= end)
    reports = [(await attacker.communicate())[0].decode().strip() for attacker in attackers]
    shown = "".join(f"{one!s:>17}" for one in delays.values())
    print(f"{kind or 'quiet':16}{shown}{gateway.memory_info().rss >> 20:9}    {' '.join(reports)}", flush=True)
    return [f"{kind or 'quiet'}: {name}: {why}" for name, one in delays.items() for why in one.failures]


def main() -> int:
    """Run all floods; 0 if no honest client has noticed more than a delay."""
    unknown = set(FLOODS) - set(KINDS)
    if unknown:
        print(f"CHAOS_FLOODS: {', '.join(sorted(unknown))}: known are {', '.join(KINDS)}")
        return 2
    wrong = asyncio.run(run(SECONDS, FLOODS))
    for line in wrong:
        print("WRONG:", line)
    return bool(wrong)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
