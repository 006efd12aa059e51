"""Replay a workload on a stack of processes: under two policies, on two topologies, or beside the simulation.

A fresh stack for each, not one that is reset: caches, index, bookings, event sequences and counters all begin
empty, by construction instead of by trust in a reset, for the price of about two seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvscout_cli.progress import ReplayProgress
from kvscout_cli.stack import Stack
from kvscout_cli.topology import MODEL, Mockers, Ports, Topology, launch
from kvscout_client import Router
from kvscout_common.variables import PREFIX, SWITCHES
from kvscout_lab.cells.cells import Contender
from kvscout_lab.real_time import cross_check
from kvscout_lab.real_time.http_client import HttpReplay
from kvscout_lab.real_time.open_loop import Limits, OpenLoop, gateway_target
from kvscout_lab.real_time.record import Replay
from kvscout_lab.real_time.summary import Summary, summarise
from kvscout_lab.workloads.sessions import Session
from kvscout_lab.workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Result of a replay on one stack."""

    policy: str
    """Name of the policy or topology."""
    summary: Summary
    run: Replay
    cpu_cores: float | None
    """CPU used by driver and stack during the replay, in cores: near the machine's number, latencies say more about
    the machine than about the policy. None = the system does not report it."""
    degraded: int
    """Requests routed while the gateway could not reach an upstream in time."""
    mispredicted: int
    """Requests whose cached tokens were not what the index had predicted."""


async def replay_under(
    policy: str,
    topology: Topology,
    sessions: Callable[[], Iterable[Session]],
    progress: ReplayProgress,
) -> PolicyResult:
    """Start a stack, replay the sessions through its gateway, stop it.

    Args:
        policy: Name of the result.
        topology: Processes of the stack.
        sessions: Makes the workload.
        progress: Shows the progress.

    Raises:
        ProcessFailed: A process ended unasked.
    """
    with TemporaryDirectory(prefix="kvscout-") as directory:
        async with Stack(environment=environment(os.environ)) as stack:
            progress.status("starting the stack")
            running = await launch(stack, topology, Path(directory))
            async with Router(running.gateway) as router:
                progress.status("started")
                limits = Limits()
                driver = OpenLoop(gateway_target(router, MODEL, limits), limits, progress.record)
                run, cores = await _timed(stack, driver.run(sessions()))
                status = await router.status()
    return PolicyResult(
        policy=policy,
        summary=summarise(run, running.answering),
        run=run,
        cpu_cores=cores,
        degraded=sum(status.degraded.values()),
        mispredicted=sum(worker.mispredicted for worker in status.workers),
    )


async def replay_cell(
    cell: cross_check.RealCell, workload: Workload, contender: Contender
) -> tuple[Replay, float | None]:
    """Start a stack with the engines of a cross-check, replay a workload over HTTP, stop it.

    Returns:
        The replay, and the cores used; None where the system does not report CPU time.

    Raises:
        ProcessFailed: A process ended unasked.
    """
    mockers = Mockers(
        cell.engines,
        block_size=cross_check.BLOCK_SIZE,
        num_gpu_blocks=cross_check.BLOCKS,
        max_num_batched_tokens=cross_check.BATCHED_TOKENS,
        flags=cross_check.step_flags(),
        first_flags=() if cell.decode_speed == 1.0 else cross_check.step_flags(cell.decode_speed),
    )
    policy = ("--router-mode", contender.settings.policy)
    topology = Topology(mockers, ports=Ports(gateway_http=0), scheduler_flags=policy)
    with TemporaryDirectory(prefix="kvscout-") as directory:
        async with Stack(environment=environment(os.environ)) as stack:
            running = await launch(stack, topology, Path(directory))
            return await _timed(stack, HttpReplay(running.openai, MODEL, cell.api).run(workload))


async def _timed(stack: Stack, replay: Coroutine[Any, Any, Replay]) -> tuple[Replay, float | None]:
    """Run a replay beside a stack; return it and the cores that both used."""
    before, started = cpu_seconds(stack), time.monotonic()
    run = await stack.run(replay)
    after, elapsed = cpu_seconds(stack), time.monotonic() - started
    return run, None if before is None or after is None else (after - before) / elapsed


def environment(of: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of compared processes: without the caller's own settings of kvscout, but with those of its
    build."""
    return {name: of[name] for name in of if not (upper := name.upper()).startswith(PREFIX) or upper in SWITCHES}


def cpu_seconds(stack: Stack) -> float | None:
    """Return the CPU seconds used so far by this process and the stack's; None where /proc does not report them."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = time.process_time()
    for process in stack.processes:
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total
