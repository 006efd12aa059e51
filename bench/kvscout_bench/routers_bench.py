"""`kvscout bench routers`: hit rate and latency of clients behind kvscout and other routers, before the same engines.

Each run starts eight simulated engines with empty caches, the router before them, and clients that send the sessions of
a seed; round n of every side has the same seed. Sides take turns, so that all see the same machine.
"""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Final

from kvscout_bench.harness import OURS, Bench, Case, Measure, Sample, Say
from kvscout_bench.peer import BENCH_ENVIRONMENT
from kvscout_bench.router_cells import CELLS, Cell
from kvscout_bench.router_stacks import PEERS, TOKEN_APIS, Engine, Routers, StartRouters, services
from kvscout_bench.service_process import MODEL, ReadyProcess
from kvscout_lab.real_time.apis import Api, Chats
from kvscout_lab.real_time.http_client import HttpReplay
from kvscout_lab.real_time.record import Replay
from kvscout_lab.real_time.summary import Summary, summarise
from kvscout_lab.workloads.workload import Workload

ENGINES: Final = 8
STEP_COSTS: Final = ("--step-base-ms", "8", "--prefill-us-per-token", "90", "--decode-us-per-request", "100")
"""An engine computes a prompt of 2,000 tokens in 190 ms."""
SETTLE_SECONDS: Final = 0.5
"""From when a router answers until it has heard of all engines' events."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run measured."""

    clients: Summary
    cpu_seconds: float
    """Of the router's processes."""
    rss_bytes: int
    """Of them, at the end."""


def _case(cell: str, name: str, unit: str, value: Callable[[Run], float], *, more_is_better: bool = False) -> Case:
    def read(sample: Sample) -> float:
        run: Run = sample
        return value(run)

    title = f"{CELLS[cell].title}: {name}"
    measure = name.replace(" ", "-").lower()
    return Case(
        name=f"{cell}/{measure}", title=title, unit=unit, value=read, more_is_better=more_is_better, workload=cell
    )


def _cases(cell: str) -> Iterator[Case]:
    yield _case(cell, "hit rate", "%", lambda run: 100 * (run.clients.token_hit_rate or 0.0), more_is_better=True)
    yield _case(cell, "TTFT mean", "ms", lambda run: 1e3 * (run.clients.ttft_mean_seconds or 0.0))
    yield _case(cell, "TTFT p99", "ms", lambda run: 1e3 * (run.clients.ttft_p99_seconds or 0.0))
    yield _case(cell, "ITL mean", "ms", lambda run: 1e3 * (run.clients.itl_mean_seconds or 0.0))
    yield _case(cell, "failed", "requests", lambda run: run.clients.errors)
    yield _case(cell, "CPU", "ms a request", lambda run: 1e3 * run.cpu_seconds / run.clients.requests)
    yield _case(cell, "memory", "MiB", lambda run: run.rss_bytes / (1 << 20))


@dataclass(frozen=True, slots=True)
class RoutersBench(Bench):
    """The routers benchmark. Errors as of `Bench`."""

    CASES: ClassVar[Sequence[Case]] = tuple(case for cell in CELLS for case in _cases(cell))
    PEERS: ClassVar[Collection[str]] = tuple(PEERS)
    SECONDS: ClassVar[tuple[float, float]] = (30.0, 3.0)

    def start(self, running: ExitStack, say: Say) -> Measure:
        """See `Bench.start`; a workload is a cell."""
        rounds = {(side, cell): count() for side in self.sides for cell in CELLS}

        def measure(side: str, cell: str) -> Run:
            seed = next(rounds[side, cell])
            say(f"{cell}, {side}, seed {seed}")
            start = services if side == OURS else PEERS[side]
            return run_cell(CELLS[cell], start, self.run_seconds, seed, TOKEN_APIS.get(side, Chats))

        return measure


def run_cell(cell: Cell, start: StartRouters, seconds: float, seed: int, api: Callable[[], Api] = Chats) -> Run:
    """Return what clients of a router measured in a cell; blocks.

    Args:
        cell: The cell.
        start: Starts the router.
        seconds: In which sessions begin.
        seed: Of the sessions.
        api: Of the clients, for one session.

    Raises:
        DriverFailed: A process cannot be started.
    """
    with ExitStack() as running:
        engines = [Engine(running.enter_context(process)) for process in _engines(cell)]
        routers = start(engines, cell.routers, running)
        return asyncio.run(_measured(cell, engines, routers, seconds, seed, api))


def _engines(cell: Cell) -> list[ReadyProcess]:
    command = [sys.executable, "-m", "kvscout_mocker.main", "--model", MODEL, "--log-level", "error"]
    command += [word for port in ("port", "events-port", "replay-port") for word in (f"--{port}", "0")]
    command += ["--num-gpu-blocks", str(cell.blocks), *STEP_COSTS]

    def start(number: int) -> ReadyProcess:
        return ReadyProcess(f"engine {number}", command, environment=BENCH_ENVIRONMENT)

    with ThreadPoolExecutor(4) as starting:
        return list(starting.map(start, range(ENGINES)))


async def _measured(
    cell: Cell, engines: Sequence[Engine], routers: Routers, seconds: float, seed: int, api: Callable[[], Api]
) -> Run:
    await asyncio.sleep(SETTLE_SECONDS)
    through = _send(cell.make(seconds, seed), routers.addresses, api)
    further = []
    if cell.bypasses:
        further.append(_send(cell.make(seconds, seed + 1_000_000), [engine.address for engine in engines], api))
    faults = asyncio.create_task(_restart(engines[: cell.restarts], seconds / 2))
    before = routers.cpu_seconds()
    replay, *_ = await asyncio.gather(through, *further)
    cpu_seconds = routers.cpu_seconds() - before
    await faults
    return Run(summarise(replay, ()), cpu_seconds, routers.rss_bytes())


async def _send(workload: Workload, addresses: Sequence[str], api: Callable[[], Api]) -> Replay:
    """Send every session at its time, each request to the next of some addresses; return when the last has ended."""
    return await HttpReplay([f"http://{address}/v1" for address in addresses], MODEL, api).run(workload)


async def _restart(engines: Sequence[Engine], after_seconds: float) -> None:
    """Have engines restart in place: they lose their caches, and what they run."""
    await asyncio.sleep(after_seconds if engines else 0.0)
    await asyncio.gather(*(asyncio.to_thread(_ask_to_restart, engine.address) for engine in engines))


def _ask_to_restart(address: str) -> None:
    request = urllib.request.Request(f"http://{address}/mock/faults", b'{"restart": true}', method="POST")
    with urllib.request.urlopen(request, timeout=5.0):
        pass
