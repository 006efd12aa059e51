"""Lower bound of a workload: each request computes its own uncached prompt at once, alone, with a cache that all share
and that never forgets.

A block counts as cached for all that come after the first request that has it, so whoever comes first pays, as somebody
must. The order is that of the workload: what requests share is in the first turns of flows, whose times are fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.timing import PICOSECONDS, picoseconds
from kvscout_lab.workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class Bound:
    """The lower bound of a workload on an engine."""

    ttft_seconds: tuple[float, ...]
    """TTFT of every request, in the order of flows and turns."""
    cached_tokens: tuple[int, ...]
    """Cached tokens of every request's prompt."""


def lower_bound(workload: Workload, cluster: Cluster) -> Bound:
    """Return the bound of a workload.

    Args:
        workload: Requests and their times.
        cluster: Cluster; its fastest worker and its latency to a worker count. Contents of caches do not
            matter.
    """
    seen: set[int] = set()
    times, cached = [], []
    size, engine = workload.block_size, cluster.engine
    speeds = [cluster.speeds_of(number) for number in range(cluster.workers + cluster.prefill_workers)]
    rates = engine.step.rates(max(prefill for prefill, _ in speeds), max(decode for _, decode in speeds))
    way = picoseconds(cluster.latencies.route_ms / 1000)
    for flow in workload.flows:
        for turn in flow.turns:
            hit = 0
            for node in turn.nodes[: (turn.prompt_tokens - 1) // size]:
                if node not in seen:
                    break
                hit += 1
            seen.update(turn.nodes)
            before = hit * size
            cached.append(before)
            took = rates.alone(before, turn.prompt_tokens - before, engine.max_num_batched_tokens)
            times.append((way + took) / PICOSECONDS)
    return Bound(tuple(times), tuple(cached))
