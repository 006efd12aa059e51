"""The laboratory beside the real thing: the same sessions simulated, and sent through a stack of processes.

Engines are slow, so that the machine's own work does not count: a prompt token takes a millisecond. What is compared is
the hit rate and the order of the policies, not their milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean

from rich.table import Table

from kvscout_bench.laboratory.cells import Bench, Contender
from kvscout_bench.laboratory.latencies import Latencies
from kvscout_bench.laboratory.measures import Measures, Objective
from kvscout_bench.laboratory.simulation import Cluster
from kvscout_bench.laboratory.timing import StepTime
from kvscout_bench.laboratory.worker import EngineSettings
from kvscout_bench.laboratory.workload import from_sessions
from kvscout_bench.record import RequestRecord
from kvscout_bench.report import Summary
from kvscout_bench.workload import MultiTurn, multi_turn
from kvscout_cli.comparison import replay_under
from kvscout_cli.topology import Mockers, Topology

DRAWS = 8
ENGINES = 4
BLOCKS = 2_048
BLOCK_SIZE = 16
STEP = StepTime(base_ms=20.0, prefill_us_per_token=1_000.0, decode_us_per_request=500.0, context_ns_per_token=0.0)
SESSIONS = MultiTurn(sessions=45, sessions_per_second=0.5, think_seconds=4.0)


class _Silent:
    """No progress: a run is a minute and a half."""

    def status(self, text: str) -> None:
        """See `ReplayProgress`."""

    def record(self, record: RequestRecord) -> None:
        """See `ReplayProgress`."""


def simulated(contender: Contender, seed: int) -> list[Measures]:
    """What the laboratory says of a policy, with other draws and event delays each time: a stack is one such run."""
    workload = from_sessions("sessions", multi_turn(replace(SESSIONS, seed=seed)), BLOCK_SIZE)
    engine = EngineSettings(
        block_size=BLOCK_SIZE, kv_tokens=(BLOCKS - 1) * BLOCK_SIZE, max_num_batched_tokens=2_048, step=STEP
    )
    found = []
    for draw in range(DRAWS):
        cluster = Cluster(workers=ENGINES, engine=engine, seed=draw, latencies=Latencies(event_ms=5.0 + draw))
        bench = Bench(workload, cluster, objective=Objective(warm_up=0.0))
        found.append(bench.run(contender.settings, workload.flow_rate))
    return found


async def measured(contender: Contender, seed: int) -> Summary:
    """What a stack of processes did under a policy."""
    flags = (
        *("--step-base-ms", str(STEP.base_ms)),
        *("--prefill-us-per-token", str(STEP.prefill_us_per_token)),
        *("--decode-us-per-request", str(STEP.decode_us_per_request)),
    )
    topology = Topology(
        Mockers(ENGINES, block_size=BLOCK_SIZE, num_gpu_blocks=BLOCKS, flags=flags),
        scheduler_flags=("--router-mode", contender.settings.policy),
    )
    sessions = partial(multi_turn, replace(SESSIONS, seed=seed))
    return (await replay_under(contender.label, topology, sessions, _Silent())).summary


async def cross_check(contenders: list[Contender], seed: int, say: Callable[[str], None]) -> Table:
    """Both, policy by policy.

    Args:
        contenders: By the names of their policies; settings beside it are not carried over to the processes.
        seed: Of the sessions.
        say: Told what is going on.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy")
    for what in ("hit rate", "TTFT mean", "ITL mean"):
        table.add_column(what, justify="right")
        table.add_column("of the stack", justify="right")
    table.add_column("errors", justify="right")
    for contender in contenders:
        say(f"{contender.label}, in real time")
        lab, stack = simulated(contender, seed), await measured(contender, seed)
        hits = [each.hit_rate for each in lab]
        table.add_row(
            contender.label,
            f"{fmean(hits):.1%} ({min(hits):.0%}–{max(hits):.0%})",
            f"{stack.token_hit_rate or 0:.1%}",
            f"{1000 * fmean(each.ttft.mean for each in lab):,.0f} ms",
            f"{1000 * (stack.ttft_mean_seconds or 0):,.0f} ms",
            f"{1000 * fmean(each.itl.mean for each in lab):,.0f} ms",
            f"{1000 * (stack.itl_mean_seconds or 0):,.0f} ms",
            str(stack.errors),
        )
    return table
