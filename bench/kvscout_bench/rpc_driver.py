"""One side of `kvscout bench rpc`: services as processes, and this process, which calls them.

A driver with one command, `run workload=find/4096/8/300 seconds=2`: kind of call, tokens, workers, calls a second.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Protocol

import uvloop

from kvscout_bench.driver_commands import serve
from kvscout_bench.gateway_load import at_rate
from kvscout_bench.harness import OURS
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
    """Services under measurement, and calls to them."""

    processes: Mapping[str, MeasuredProcess]

    async def call_of(self, kind: str, tokens: int, stack: AsyncExitStack) -> Call:
        """Return the call of a kind; `stack` closes what it opens.

        Raises:
            KeyError: It has no such kind.
        """


async def _nothing(number: int) -> None:
    """Do nothing: the cost of the calling loop itself."""


async def _load(call: Call, rate: str, seconds: float) -> list[float]:
    """Call for some seconds; return the seconds that each took."""
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
    """Return the CPU time of this process a call, in microseconds."""
    begun = time.process_time_ns()
    taken = await load()
    return (time.process_time_ns() - begun) / len(taken) / 1e3


def _start(name: str, workers: int, running: ExitStack) -> Side:
    if name == DYNAMO:
        return DynamoSide(workers, running)
    if name == FLOOR:
        return FloorSide(running)
    transport = Transport.NATIVE if name == OURS else Transport(name)
    choose(transport)
    return OurSide(transport, workers, running)


class RpcDriver:
    """Commands of one side.

    Args:
        side: Name of the side.
        running: Ends its services.
    """

    def __init__(self, side: str, running: ExitStack) -> None:
        self._side, self._running = side, running
        self._services: dict[int, Side] = {}
        """Services by number of workers."""

    def __call__(self, verb: str, arguments: dict[str, str]) -> dict[str, Any]:
        """See `driver_commands.Handle`."""
        if verb != "run":
            raise ValueError("not a command")
        workload = arguments["workload"]
        workers = int(workload.split("/")[2])
        if workers not in self._services:
            self._services[workers] = _start(self._side, workers, self._running)
        return uvloop.run(_run(self._services[workers], workload, float(arguments["seconds"])))


if __name__ == "__main__":
    with ExitStack() as started:
        serve(RpcDriver(sys.argv[1], started))
