"""Whole simulated clusters: the same every time, nothing lost, nothing better than can be."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from support.laboratory_worlds import ENGINE, mixed, simulation
from support.scheduler_invariants import check_idle
from support.seeds import test_seed

from kvscout_common.errors import ConfigError
from kvscout_lab.cells.bound import lower_bound
from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.records import Run
from kvscout_lab.simulation.simulation import Simulation
from kvscout_lab.simulation.timing import PICOSECONDS
from kvscout_lab.simulation.worker import EngineSettings
from kvscout_lab.workloads.generators import SharedPrompt, shared_prompt
from kvscout_lab.workloads.workload import Burst, Workload, at_rate, in_bursts
from kvscout_scheduler.load.active_load import ReferenceLoad
from kvscout_scheduler.policies import installed_policies
from kvscout_scheduler.values.settings import SchedulerSettings

POLICIES = [name for name in installed_policies().names if name != "direct"]


def bytes_of(run: Run) -> str:
    return repr((run.records, run.workers, sorted(run.gaps.counts.items()), run.gaps.total, run.ended, run.queued))


def check(run: Run, workload: Workload, made: Simulation) -> None:
    """Every request ended once, in order of its life, and left nothing."""
    check_idle(made)
    assert len(run.records) == workload.requests
    assert len({(record.flow, record.turn) for record in run.records}) == workload.requests
    for record in run.records:
        assert not record.error
        assert record.arrived <= record.placed < record.first_token <= record.finished <= run.ended
        assert 0 <= record.cached_tokens < record.prompt_tokens
    tokens = sum(record.output_tokens - 1 for record in run.records)
    assert sum(run.gaps.counts.values()) == tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_and_no_load_is_left(policy: str) -> None:
    workload = mixed(test_seed(), 150)
    made = simulation(workload, policy)
    check(made.run(), workload, made)


def test_no_request_is_lost_between_gateways_replicas_and_a_line() -> None:
    workload = in_bursts(mixed(test_seed(), 200), Burst(4.0, 1.0))
    cluster = Cluster(workers=3, engine=ENGINE, gateways=4, replicas=3, speeds=(0.5, 2.0))
    made = simulation(workload, "kv", cluster, queue_threshold=0.5)
    run = made.run()
    check(run, workload, made)
    assert run.queued


def test_prefill_and_decode_apart_move_every_prompt_once() -> None:
    workload = mixed(test_seed(), 150)
    cluster = Cluster(workers=3, prefill_workers=2, engine=ENGINE)
    made = simulation(workload, "kv", cluster)
    run = made.run()
    check(run, workload, made)
    assert {record.worker for record in run.records} <= {3, 4}
    assert {record.decode_worker for record in run.records} <= {0, 1, 2}
    assert sum(worker.requests for worker in run.workers) == 2 * workload.requests


def test_a_run_is_a_function_of_its_seed() -> None:
    workload = mixed(7, 100)
    cluster = Cluster(workers=3, engine=ENGINE, replicas=2, gateways=2)
    runs = [bytes_of(simulation(workload, "random", replace(cluster, seed=seed)).run()) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_another_process_with_other_hashes_computes_the_same_bytes() -> None:
    program = (
        "from support.laboratory_worlds import *; from kvscout_lab.simulation.cluster import Cluster; import hashlib\n"
        "run = simulation(mixed(7, 60), 'power-of-two', Cluster(workers=3, engine=ENGINE, replicas=2)).run()\n"
        "print(hashlib.sha256(repr((run.records, run.workers, run.ended)).encode()).hexdigest())"
    )
    path = os.pathsep.join(sys.path)
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


@pytest.mark.parametrize("policy", ["kv", "kv-time"])
def test_both_twins_of_the_scheduler_decide_the_same(policy: str) -> None:
    workload, cluster = mixed(test_seed(), 100), Cluster(workers=4, engine=ENGINE)
    runs = [
        Simulation(workload, cluster, SchedulerSettings(policy=policy), installed_policies(), make_load=make_load).run()
        for make_load in (None, ReferenceLoad)
    ]
    assert bytes_of(runs[0]) == bytes_of(runs[1])


@pytest.mark.parametrize("prefill_workers", [0, 2])
def test_jumping_over_decode_steps_changes_nothing(prefill_workers: int) -> None:
    workload = mixed(test_seed(), 120)
    cluster = Cluster(workers=3, prefill_workers=prefill_workers, engine=ENGINE)
    stepping = replace(cluster, engine=replace(ENGINE, max_jump=1))
    jumps, steps = (simulation(workload, "kv", each).run() for each in (cluster, stepping))
    assert bytes_of(jumps) == bytes_of(steps)
    assert jumps.steps < steps.steps


@pytest.mark.parametrize("policy", ["kv-time", "lmetric"])
@pytest.mark.parametrize("rate", [5.0, 60.0])
def test_no_policy_beats_the_lower_bound(policy: str, rate: float) -> None:
    workload = mixed(test_seed(), 120, rate)
    bound = lower_bound(workload, Cluster(engine=ENGINE))
    first = [0]
    for flow in workload.flows:
        first.append(first[-1] + len(flow.turns))
    run = simulation(workload, policy).run()
    ttfts = [(record.first_token - record.arrived) / PICOSECONDS for record in run.records]
    assert sum(ttfts) >= sum(bound.ttft_seconds)
    assert sum(record.cached_tokens for record in run.records) <= sum(bound.cached_tokens)


def test_no_worker_is_hot_under_a_system_prompt_that_all_share() -> None:
    workload = at_rate(shared_prompt(SharedPrompt(requests=800, seed=test_seed())), 80.0)
    engine = EngineSettings(block_size=workload.block_size)
    run = simulation(workload, "kv-time", Cluster(workers=10, engine=engine)).run()
    batches = [worker.batch_time for worker in run.workers]
    assert max(batches) <= 2 * sum(batches) / len(batches)
    assert min(worker.requests for worker in run.workers) > 0


def test_a_slow_worker_is_given_less() -> None:
    workload = mixed(test_seed(), 200, 15.0)
    cluster = Cluster(workers=3, engine=ENGINE, speeds=(0.25,))
    slow, *others = simulation(workload, "kv-time", cluster).run().workers
    assert slow.requests < min(other.requests for other in others)


def test_a_prompt_that_fits_nowhere_is_an_error_and_ends_its_conversation() -> None:
    workload = mixed(3, 60)
    engine = replace(ENGINE, kv_tokens=160)
    made = simulation(workload, "kv", Cluster(workers=2, engine=engine))
    run = made.run()
    check_idle(made)
    failed = [record for record in run.records if record.error]
    assert failed
    assert all(record.finished < 0 and "do not fit" in record.error for record in failed)


@pytest.mark.parametrize(
    ("field", "cluster"),
    [
        ("workers", Cluster(workers=0, engine=ENGINE)),
        ("replicas", Cluster(replicas=0, engine=ENGINE)),
        ("prefill_workers", Cluster(prefill_workers=-1, engine=ENGINE)),
        ("speeds", Cluster(workers=1, speeds=(1.0, 1.0), engine=ENGINE)),
        ("speeds", Cluster(speeds=(0.0,), engine=ENGINE)),
        ("block_size", Cluster(engine=replace(ENGINE, block_size=32))),
    ],
)
def test_a_cluster_out_of_range_is_refused_with_the_field(field: str, cluster: Cluster) -> None:
    with pytest.raises(ConfigError) as raised:
        simulation(mixed(1, 5), "kv", cluster)
    assert raised.value.field == field
