"""One workload under two policies or on two topologies, each on a stack of its own.

A fresh stack for each, not one that is reset: caches, index, bookings, event sequences and counters all begin
empty, by construction instead of by trust in a reset, for the price of about two seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kvscout_cli.progress import ReplayProgress
from kvscout_cli.stack import Stack
from kvscout_cli.topology import MODEL, Topology, launch
from kvscout_client import Router
from kvscout_common.variables import PREFIX, SWITCHES
from kvscout_lab.open_loop import Limits, OpenLoop, gateway_target
from kvscout_lab.record import Run
from kvscout_lab.sessions import Session
from kvscout_lab.summary import Summary, summarise


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """What one stack did."""

    policy: str
    """What it is called."""
    summary: Summary
    run: Run
    cpu_cores: float | None
    """CPU used by driver and stack during the replay, in cores: near the machine's number, latencies say more about
    the machine than about the policy. None = this system does not tell."""
    degraded: int
    """Requests routed while the gateway could not reach a helper in time."""
    mispredicted: int
    """Requests whose cached tokens were not what the index had predicted."""


async def replay_under(
    policy: str,
    topology: Topology,
    sessions: Callable[[], Iterable[Session]],
    progress: ReplayProgress,
) -> PolicyResult:
    """Starts a stack, replays the sessions through its gateway, stops it.

    Args:
        policy: What it is called.
        topology: What it is.
        sessions: The workload, from its begin.
        progress: Told how far it is.

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
                before, started = cpu_seconds(stack), time.monotonic()
                run = await stack.run(driver.run(sessions()))
                after, elapsed = cpu_seconds(stack), time.monotonic() - started
                status = await router.status()
    return PolicyResult(
        policy=policy,
        summary=summarise(run, running.answering),
        run=run,
        cpu_cores=None if before is None or after is None else (after - before) / elapsed,
        degraded=sum(status.degraded.values()),
        mispredicted=sum(worker.mispredicted for worker in status.workers),
    )


def environment(of: Mapping[str, str]) -> dict[str, str]:
    """What processes see that are compared. Settings of the caller's own kvscout must not change what is compared; how
    it was built may matter to CI."""
    return {name: value for name, value in of.items() if not name.startswith(PREFIX) or name in SWITCHES}


def cpu_seconds(stack: Stack) -> float | None:
    """CPU time used so far by this process and the stack's, where /proc tells."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = time.process_time()
    for process in stack.processes:
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total
