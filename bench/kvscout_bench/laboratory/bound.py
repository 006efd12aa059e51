"""What no policy can beat: each request computes its own uncached prompt at once, alone, with a cache that all share
and that never forgets.

A block counts as cached for all that come after the first request that has it, so whoever comes first pays, as somebody
must. The order is that of the workload: what requests share is in the first turns of flows, whose times are fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvscout_bench.laboratory.latencies import Latencies
from kvscout_bench.laboratory.timing import PICOSECONDS, picoseconds
from kvscout_bench.laboratory.worker import EngineSettings
from kvscout_bench.laboratory.workload import Workload


@dataclass(frozen=True, slots=True)
class Bound:
    """The lower bound of a workload on an engine."""

    ttft_seconds: tuple[float, ...]
    """Of every request, in the order of flows and turns."""
    cached_tokens: tuple[int, ...]
    """Of every request's prompt."""


def lower_bound(workload: Workload, engine: EngineSettings, latencies: Latencies) -> Bound:
    """The bound of a workload.

    Args:
        workload: What is asked.
        engine: Of every worker; what its cache holds does not matter.
        latencies: Of them, the way to the worker.
    """
    seen: set[int] = set()
    times, cached = [], []
    size, budget, step = workload.block_size, engine.max_num_batched_tokens, engine.step
    way = picoseconds(latencies.route_ms / 1000)
    for flow in workload.flows:
        for turn in flow.turns:
            hit = 0
            for node in turn.nodes[: (turn.prompt_tokens - 1) // size]:
                if node not in seen:
                    break
                hit += 1
            seen.update(turn.nodes)
            tokens = turn.prompt_tokens - hit * size
            cached.append(hit * size)
            times.append((way + -(-tokens // budget) * step.base + tokens * step.prefill_token) / PICOSECONDS)
    return Bound(tuple(times), tuple(cached))
