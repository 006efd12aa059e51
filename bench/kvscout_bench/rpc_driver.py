"""One side of `kvscout bench rpc`: services as processes, and this process, which calls them.

Told on standard input what to do, as the drivers of the index benchmark are: `run workload=find/4096/8/300 seconds=2`,
which is what is called, tokens, workers, and calls a second.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Protocol

import uvloop

from kvscout_bench.gateway_load import at_rate
from kvscout_bench.rpc_dynamo import DynamoSide
from kvscout_bench.rpc_floor import FloorSide
from kvscout_bench.rpc_ours import Call, OurSide
from kvscout_bench.service_process import MeasuredProcess
from kvscout_common.transport import Transport, choose
from kvscout_lab.statistics import percentile

DYNAMO, FLOOR = "dynamo", "floor"
WARM_CALLS = 50
OUTSTANDING = 64
"""Calls in flight at a saturated rate."""


class Side(Protocol):
    """Services, and what is called there."""

    processes: Mapping[str, MeasuredProcess]

    async def call_of(self, kind: str, tokens: int, stack: AsyncExitStack) -> Call:
        """Return the call of a kind; `stack` closes what it opens.

        Raises:
            KeyError: It has no such kind.
        """


async def _nothing(number: int) -> None:
    """Do nothing: the cost of the calling loop itself."""


async def _load(call: Call, rate: str, seconds: float) -> list[float]:
    """Call for so long; return how long each took, in seconds."""
    if rate != "saturated":
        return (await at_rate(call, per_second=float(rate), seconds=seconds)).seconds
    ends_at, taken = time.perf_counter() + seconds, []

    async def caller() -> None:
        while (begun := time.perf_counter()) < ends_at:
            await call(0)
            taken.append(time.perf_counter() - begun)

    await asyncio.gather(*(caller() for _ in range(OUTSTANDING)))
    return taken


async def _run(side: Side, workload: str, seconds: float) -> dict[str, Any]:
    kind, tokens, _, rate = workload.split("/")
    async with AsyncExitStack() as stack:
        try:
            call = await side.call_of(kind, int(tokens), stack)
        except KeyError:
            return {"unsupported": workload}
        for number in range(WARM_CALLS):
            await call(number)
        alone = 0.0
        if rate != "saturated":
            alone = await _cost(lambda: _load(_nothing, rate, seconds / 4))
        before = {name: process.cpu_ns() for name, process in side.processes.items()}
        begun, started = time.process_time_ns(), time.perf_counter()
        taken = sorted(await _load(call, rate, seconds))
        ours, lasted = time.process_time_ns() - begun, time.perf_counter() - started
        parts = {name: (process.cpu_ns() - before[name]) / len(taken) for name, process in side.processes.items()}
    return {
        "workload": workload,
        "operations": len(taken),
        "server_us": sum(parts.values()) / 1e3,
        "parts_us": {name: value / 1e3 for name, value in parts.items()},
        "client_us": ours / len(taken) / 1e3 - alone,
        "p50_us": (percentile(taken, 50) or 0.0) * 1e6,
        "p99_us": (percentile(taken, 99) or 0.0) * 1e6,
        "per_second": len(taken) / lasted,
    }


async def _cost(load: Callable[[], Awaitable[list[float]]]) -> float:
    """Return CPU of this process a call, in microseconds."""
    begun = time.process_time_ns()
    taken = await load()
    return (time.process_time_ns() - begun) / len(taken) / 1e3


def _side(name: str, workers: int, running: ExitStack) -> Side:
    if name == DYNAMO:
        return DynamoSide(workers, running)
    if name == FLOOR:
        return FloorSide(running)
    choose(Transport(name))
    return OurSide(name, workers, running)


def main(name: str) -> None:
    """Serve commands until its input ends."""
    with ExitStack() as running:
        sides: dict[int, Side] = {}
        for line in sys.stdin:
            verb, *given = line.split()
            arguments = dict(pair.split("=", 1) for pair in given)
            if verb != "run":
                print(json.dumps({"error": f"{verb!r} is not known"}), flush=True)
                continue
            workload = arguments["workload"]
            workers = int(workload.split("/")[2])
            if workers not in sides:
                sides[workers] = _side(name, workers, running)
            sample = uvloop.run(_run(sides[workers], workload, float(arguments["seconds"])))
            print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
