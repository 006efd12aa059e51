"""The laboratory beside the real thing: the same sessions simulated, and sent through a stack of processes.

Engines are slow, so that the machine's own work does not count: a prompt token takes 0.6 ms. What is compared is the
hit rate and the order of the policies, not their milliseconds.

One run is one draw: who comes a few milliseconds earlier gets another worker, and its later turns find other caches.
The simulated runs differ in that, so that their range says what a stack may do; the sessions are as many as it takes to
make that range small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from statistics import fmean

from rich.table import Table

from kvscout_bench.laboratory.cells import Bench, Contender
from kvscout_bench.laboratory.cluster import Cluster
from kvscout_bench.laboratory.latencies import Latencies
from kvscout_bench.laboratory.measures import Measures, Objective
from kvscout_bench.laboratory.timing import StepTime
from kvscout_bench.laboratory.worker import EngineSettings
from kvscout_bench.laboratory.workload import Flow, Turn, Workload, from_sessions
from kvscout_bench.record import RequestRecord
from kvscout_bench.report import Summary
from kvscout_bench.workload import MultiTurn, multi_turn
from kvscout_cli.comparison import replay_under
from kvscout_cli.topology import Mockers, Topology

DRAWS = 8
ENGINES = 4
BLOCKS = 3_072
BLOCK_SIZE = 16
STEP = StepTime(base_ms=20.0, prefill_us_per_token=600.0, decode_us_per_request=500.0, context_ns_per_token=0.0)
SESSIONS = MultiTurn(sessions=90, sessions_per_second=0.7, think_seconds=4.0)
LATE_SECONDS = 0.02
"""By so much a stack's clients may be late."""


class _Silent:
    """No progress: a run is three to five minutes."""

    def status(self, text: str) -> None:
        """See `ReplayProgress`."""

    def record(self, record: RequestRecord) -> None:
        """See `ReplayProgress`."""


def simulated(contender: Contender, seed: int) -> list[Measures]:
    """What the laboratory says of a policy, with other draws and delays each time: a stack is one such run."""
    workload = from_sessions("sessions", multi_turn(replace(SESSIONS, seed=seed)), BLOCK_SIZE)
    engine = EngineSettings(
        block_size=BLOCK_SIZE, kv_tokens=(BLOCKS - 1) * BLOCK_SIZE, max_num_batched_tokens=2_048, step=STEP
    )
    found = []
    for draw in range(DRAWS):
        cluster = Cluster(workers=ENGINES, engine=engine, seed=draw, latencies=Latencies(event_ms=5.0 + draw))
        bench = Bench(_late(workload, Random(draw)), cluster, objective=Objective(warm_up=0.0))
        found.append(bench.run(contender.settings, workload.flow_rate))
    return found


def _late(workload: Workload, random: Random) -> Workload:
    """The same, everything a little later."""

    def late(turn: Turn) -> Turn:
        return turn._replace(think_seconds=turn.think_seconds + random.uniform(0.0, LATE_SECONDS))

    def begun(flow: Flow) -> Flow:
        start = flow.start_seconds + random.uniform(0.0, LATE_SECONDS)
        return Flow(start, tuple(late(turn) for turn in flow.turns))

    flows = sorted((begun(flow) for flow in workload.flows), key=lambda flow: flow.start_seconds)
    return replace(workload, flows=tuple(flows))


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
