"""Recordings of simulated runs: what `kvscout record` would have written of them."""

from __future__ import annotations

from random import Random

from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.simulation import Simulation
from kvscout_lab.simulation.timing import PICOSECONDS
from kvscout_lab.workloads.recording import RecordedRequest, RecordedWorker, Recording
from kvscout_lab.workloads.workload import Flow, Nodes, Turn, Workload
from kvscout_scheduler.policies import installed_policies
from kvscout_scheduler.values.settings import SchedulerSettings


def conversations(rng: Random, flows: int, size: int, rate: float = 4.0) -> Workload:
    """Some shared system prompts, three turns each."""
    nodes, made, start = Nodes(), [], 0.0
    for _ in range(flows):
        start += rng.expovariate(rate)
        chain = nodes.chain([("system", rng.randrange(6))] * rng.randrange(10, 40))
        tokens, turns = len(chain) * size, []
        for number in range(3):
            prompt = tokens + rng.randint(20, 1_500)
            tokens = prompt + rng.randint(5, 60)
            chain = nodes.extend(chain, tokens // size)
            turns.append(Turn(chain, prompt, tokens - prompt, rng.random() if number else 0.0))
        made.append(Flow(start, tuple(turns)))
    return Workload("conversations", size, tuple(made))


def recorded_run(
    rng: Random,
    cluster: Cluster,
    *,
    policy: str = "kv-time",
    flows: int = 150,
    workload: Workload | None = None,
    blocks_per_hash: int = 1,
) -> Recording:
    """The recording of a run."""
    workload = workload or conversations(rng, flows, cluster.engine.block_size)
    run = Simulation(workload, cluster, SchedulerSettings(policy=policy), installed_policies()).run()
    size = cluster.engine.block_size
    requests = [
        RecordedRequest(
            arrived=record.arrived / PICOSECONDS,
            model="m",
            session=record.flow + 1,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            max_tokens=0,
            streamed=True,
            priority=0,
            tokens_per_hash=size * blocks_per_hash,
            hash_ids=tuple(
                workload.flows[record.flow]
                .turns[record.turn]
                .nodes[: record.prompt_tokens // size][blocks_per_hash - 1 :: blocks_per_hash]
            ),
            worker_id=f"w{record.worker}",
            dp_rank=0,
            predicted_tokens=record.predicted_tokens,
            cached_tokens=record.cached_tokens,
            ttft_seconds=(record.first_token - record.arrived) / PICOSECONDS,
            seconds=(record.finished - record.arrived) / PICOSECONDS,
            outcome="ok",
            degraded="",
        )
        for record in run.records
    ]
    engine = cluster.engine
    workers = [
        RecordedWorker(
            f"w{number}", "m", "aggregated", 1, size, engine.kv_tokens // size, engine.max_num_batched_tokens
        )
        for number in range(cluster.workers)
    ]
    return Recording(tuple(workers), tuple(sorted(requests, key=lambda request: request.arrived)))
