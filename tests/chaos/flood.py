"""`make chaos-flood`: hostile clients in processes of their own, and how long honest requests wait meanwhile.

Two mockers, an indexer, a scheduler and a gateway, or `kvscout serve` in place of these three, carry honest streams all
the time. One flood after the other (`chaos.floods`) comes from ATTACKERS processes without a token; meanwhile
`/health` and Route are requested, over connections that exist and over new ones. No honest request may fail, no stream
may break, the gateway's memory must stay bounded, and nothing may be booked or called an error afterwards.

How long a request waits depends on who else wants the machine's cores, so what is bounded is the CPU time that the
gateway's process, with all its threads, spends between the sending of a `/health` and its answer: whatever it does in
this time, the honest request waits for it. Requests during which this process itself stood still are not measured:
their answers may have come long before they were read.

CHAOS_SECONDS is the length of each flood, CHAOS_FLOODS names some of them, CHAOS_ONE_PROCESS=1 floods `kvscout serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import psutil
from support import gateway_stack
from support.gateway_stack import MODEL, Stack, fresh_prompt, running_stack

from chaos.floods import GRPC_STREAMS, KINDS

SECONDS: Final = float(os.environ.get("CHAOS_SECONDS", "5"))
FLOODS: Final = tuple(os.environ.get("CHAOS_FLOODS", ",".join(KINDS)).split(","))
ATTACKERS: Final = 2
MEDIAN_CPU_MS: Final = 25.0
LONGEST_CPU_MS: Final = 250.0
"""CPU time of the flooded process while an honest `/health` waits."""
PAUSE_SECONDS: Final = 0.02
AWAKE_SECONDS: Final = 0.005
STANDSTILL_SECONDS: Final = 0.01
"""A thread of this process that wakes so much later than it wants has stood still: well below `MEDIAN_CPU_MS`, which
the flooded process may spend while an answer that came waits to be read."""
SETTLE_SECONDS: Final = 0.1
SETTLE_TRIES: Final = 50
REQUEST_SECONDS: Final = 30.0
"""An honest request that takes longer has failed."""
MAX_GROWTH_BYTES: Final = 1 << 30
"""Of the gateway, over all floods: its budget of bytes that are not admitted yet, and what Python makes of some."""
HONEST_STREAMS: Final = 4
ROUTE: Final = "Route"


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, of all threads that it has now."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


class Standstills(threading.Thread):
    """When this process had no time for its own work, by a thread that wakes again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.last_ended = -math.inf
        """End of the last one."""
        self._woke = time.perf_counter()
        self._over = threading.Event()

    def run(self) -> None:
        """Watch until `stop`."""
        while not self._over.wait(AWAKE_SECONDS):
            self._look()
            self._woke = time.perf_counter()

    def stop(self) -> None:
        """End."""
        self._over.set()
        self.join()

    def since(self, began: float) -> bool:
        """Return whether there was one since a time."""
        self._look()
        return self.last_ended >= began

    def _look(self) -> None:
        now = time.perf_counter()
        if now - self._woke > STANDSTILL_SECONDS:
            self.last_ended = now


@dataclass(slots=True)
class Delays:
    """How long requests of one kind took, and what failed."""

    pid: int
    """Process that answers."""
    standstills: Standstills
    ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """CPU time of the process meanwhile, of those during which this one did not stand still."""
    failures: list[str] = field(default_factory=list)

    async def measure(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Time one request."""
        cpu, began = cpu_seconds(self.pid), time.perf_counter()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await ask()
        except Exception as error:  # whatever it is, it is what an honest client got
            self.failures.append(f"{error!r} after {time.perf_counter() - began:.2f} s")
        self.ms.append((time.perf_counter() - began) * 1e3)
        if not self.standstills.since(began):
            self.cpu_ms.append((cpu_seconds(self.pid) - cpu) * 1e3)

    @property
    def excess(self) -> list[str]:
        """What is more than it may be."""
        middle, longest = statistics.median(self.cpu_ms or [0.0]), max(self.cpu_ms, default=0.0)
        return [
            f"the process works for {found:.1f} ms while a request waits, at most {most:g} are allowed ({which})"
            for found, most, which in ((middle, MEDIAN_CPU_MS, "median"), (longest, LONGEST_CPU_MS, "longest"))
            if found > most
        ]

    def __str__(self) -> str:
        measured = (self.ms, self.cpu_ms or [math.nan])
        return " ".join(f"{statistics.median(values):6.1f} {max(values):6.0f}" for values in measured)


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


async def probed(honest: Honest, pid: int, until: Callable[[], bool]) -> dict[str, Delays]:
    """Send every kind of request, one after the other, until told to stop."""
    asked = {"health": honest.health, "new connection": honest.connect, ROUTE: honest.route}
    standstills = Standstills()
    delays = {name: Delays(pid, standstills) for name in asked}

    async def ask(name: str) -> None:
        while not until():
            await delays[name].measure(asked[name])
            await asyncio.sleep(PAUSE_SECONDS)

    standstills.start()
    try:
        await asyncio.gather(*map(ask, asked))
    finally:
        standstills.stop()
    return delays


async def attacked(stack: Stack, kind: str, seconds: float) -> asyncio.subprocess.Process:
    """Start one attacker."""
    port = stack.gateway.ready["port" if kind in GRPC_STREAMS else "http_port"]
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
        print("median and longest ms, then of CPU time: health, new connection, Route; RSS in MiB; attackers")
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
    delays = await probed(honest, gateway.pid, lambda: time.monotonic() >= end)
    reports = [(await attacker.communicate())[0].decode().strip() for attacker in attackers]
    await _settled(gateway.pid)
    shown = " |".join(map(str, delays.values()))
    print(f"{kind or 'quiet':16}{shown}{gateway.memory_info().rss >> 20:6}  {' '.join(reports)}", flush=True)
    # While other processes work on a Route, this one serves others.
    wrong = {name: one.failures + (one.excess if name != ROUTE else []) for name, one in delays.items()}
    return [f"{kind or 'quiet'}: {name}: {why}" for name, reasons in wrong.items() for why in reasons]


async def _settled(pid: int) -> None:
    """Wait, not for long, until a process works no more on what a flood has left behind."""
    for _ in range(SETTLE_TRIES):
        cpu = cpu_seconds(pid)
        await asyncio.sleep(SETTLE_SECONDS)
        if cpu_seconds(pid) - cpu < SETTLE_SECONDS / 2:
            return


def main() -> int:
    """Run all floods; 0 if no honest client has noticed more than a delay."""
    unknown = set(FLOODS) - set(KINDS)
    if unknown:
        print(f"CHAOS_FLOODS: {', '.join(sorted(unknown))}: known are {', '.join(KINDS)}")
        return 2
    gateway_stack.in_one_process = os.environ.get("CHAOS_ONE_PROCESS") == "1"
    wrong = asyncio.run(run(SECONDS, FLOODS))
    for line in wrong:
        print("WRONG:", line)
    return bool(wrong)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
