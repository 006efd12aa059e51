"""Small workloads and clusters of the laboratory."""

from __future__ import annotations

from random import Random

from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.simulation import Simulation
from kvscout_lab.simulation.timing import StepTime
from kvscout_lab.simulation.worker import EngineSettings
from kvscout_lab.workloads.workload import Flow, Nodes, Turn, Workload
from kvscout_scheduler.policies import installed_policies
from kvscout_scheduler.values.settings import SchedulerSettings

SIZE = 16
ENGINE = EngineSettings(
    block_size=SIZE,
    kv_tokens=2_048,
    max_num_batched_tokens=128,
    max_num_seqs=16,
    step=StepTime(base_ms=4.0, prefill_us_per_token=40.0, decode_us_per_request=60.0, context_ns_per_token=700.0),
)
"""Small enough that requests wait for blocks and are preempted."""


def mixed(seed: int, requests: int = 300, rate: float = 60.0) -> Workload:
    """Prompts that share beginnings, some conversations, some priorities; open loop."""
    rng, nodes = Random(seed), Nodes()
    flows, start = [], 0.0
    left = requests
    while left > 0:
        start += rng.expovariate(rate)
        shared = nodes.chain([("system", rng.randrange(4))] * rng.randrange(8))
        tokens, turns = len(shared) * SIZE, []
        for number in range(min(left, rng.choice((1, 1, 1, 3)))):
            prompt = tokens + rng.randint(1, 200)
            tokens = prompt + rng.randint(1, 60)
            shared = nodes.extend(shared, tokens // SIZE)
            think = rng.random() if number else 0.0
            turns.append(Turn(shared, prompt, tokens - prompt, think, rng.randrange(2)))
        flows.append(Flow(start, tuple(turns)))
        left -= len(turns)
    return Workload("mixed", SIZE, tuple(flows))


def simulation(workload: Workload, policy: str = "kv", cluster: Cluster | None = None, **settings: float) -> Simulation:
    """A simulation on a small cluster."""
    cluster = Cluster(workers=4, engine=ENGINE) if cluster is None else cluster
    return Simulation(workload, cluster, SchedulerSettings(policy=policy, **settings), installed_policies())  # type: ignore[arg-type]  # settings are numbers
