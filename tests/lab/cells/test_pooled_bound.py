"""The bound of a run that queues: no policy beats it, whatever the cluster, and what it makes of small schedules."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from random import Random
from statistics import fmean

import pytest
from support.laboratory_worlds import ENGINE, mixed
from support.seeds import test_seed

from kvscout_lab.cells.bound import lower_bound
from kvscout_lab.cells.lab_policies import lab_policies
from kvscout_lab.cells.pooled_bound import Job, PooledBound, _busy_periods, _mean_busy, _shortest_remaining
from kvscout_lab.simulation.cluster import Cluster, Faults
from kvscout_lab.simulation.known_engines import known_engine
from kvscout_lab.simulation.simulation import Simulation
from kvscout_lab.simulation.timing import PICOSECONDS
from kvscout_scheduler.values.settings import SchedulerSettings

POLICIES = ("kv-time", "kv", "lmetric", "least-loaded", "round-robin", "session-sticky")


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(workers=1, engine=ENGINE),
        Cluster(workers=4, engine=ENGINE),
        Cluster(workers=3, engine=ENGINE, prefill_speeds=(2.0, 0.5), decode_speeds=(1.5,)),
        Cluster(workers=3, prefill_workers=2, engine=ENGINE),
        Cluster(workers=3, engine=replace(ENGINE, step=known_engine("8b-bf16-h100").step)),
        Cluster(workers=2, engine=replace(ENGINE, offload_tokens=4_096)),
        Cluster(workers=4, gateways=2, engine=ENGINE, faults=Faults(restart_gateway=0.4)),
        Cluster(workers=4, engine=ENGINE, faults=Faults(recover_worker=0.5)),
    ],
    ids=["one", "four", "unequal", "apart", "overlapped", "offload", "retries", "recovers"],
)
def test_no_policy_beats_it(cluster: Cluster) -> None:
    rng = Random(test_seed())
    for rate in (5.0, 60.0, 400.0):
        workload = mixed(rng.randrange(1 << 30), 100, rate)
        bound = PooledBound(workload, cluster)
        for policy in rng.sample(POLICIES, 3):
            run = Simulation(workload, cluster, SchedulerSettings(policy=policy), lab_policies()).run()
            for counted in (run.records, run.records[30:], rng.sample(run.records, 10)):
                served = [record for record in counted if not record.error]
                ttft = fmean(record.first_token - record.arrived for record in served) / PICOSECONDS
                assert bound.mean_ttft(run.records, served) <= ttft * (1 + 1e-9), (policy, rate)


def test_it_is_not_below_the_bound_without_a_queue_where_nothing_is_shared_and_above_it_under_overload() -> None:
    cluster = Cluster(workers=2, engine=ENGINE)
    for rate, factor in ((1.0, 1.0), (400.0, 2.0)):
        workload = mixed(test_seed(), 200, rate)
        run = Simulation(workload, cluster, SchedulerSettings(policy="kv-time"), lab_policies()).run()
        alone = fmean(lower_bound(workload, cluster).ttft_seconds)
        assert PooledBound(workload, cluster).mean_ttft(run.records, run.records) >= 0.999 * factor * alone


def test_nothing_counted_has_the_bound_0() -> None:
    assert PooledBound(mixed(1, 3), Cluster(engine=ENGINE)).mean_ttft([], []) == 0.0


def test_the_shortest_remaining_work_is_taken_first() -> None:
    jobs = [Job(0.0, 8.0, 0.0), Job(1.0, 2.0, 0.0), Job(3.0, 2.0, 0.0)]
    # At speed 2: the first runs for 1, the second from 1 to 2, the first again until the third comes, and so on.
    assert sorted(_shortest_remaining(jobs, 2.0)) == [2.0, 4.0, 6.0]


def test_mean_busy_times_are_those_of_the_schedule() -> None:
    jobs = [Job(0.0, 4.0, 0.0), Job(1.0, 2.0, 0.0)]
    # At speed 1 the first runs from 0 to 1 and from 3 to 6, the second from 1 to 3.
    assert _mean_busy(jobs, 1.0) == pytest.approx([(0.5 * 1 + 4.5 * 3) / 4, 2.0])


def test_no_order_of_jobs_has_less_completion_or_mean_busy_time() -> None:
    rng = Random(test_seed())
    for _ in range(30):
        jobs = sorted(Job(rng.uniform(0, 6), rng.uniform(0.1, 4), 0.0) for _ in range(5))
        speed = rng.uniform(0.5, 3)
        completed, busy = sum(_shortest_remaining(jobs, speed)), sum(_mean_busy(jobs, speed))
        for order in permutations(jobs):
            now, ends, middles = 0.0, 0.0, 0.0
            for job in order:
                now = max(now, job.released) + job.work / speed
                ends += now
                middles += now - job.work / speed / 2
            assert completed <= ends + 1e-9
            assert busy <= middles + 1e-9


def test_a_busy_period_ends_where_one_machine_is_idle() -> None:
    jobs = [Job(0.0, 2.0, 0.0), Job(1.0, 2.0, 0.0), Job(2.0, 1.0, 0.0), Job(5.0, 1.0, 0.0)]
    assert [len(part) for part in _busy_periods(jobs, 1.0)] == [3, 1]
    assert [len(part) for part in _busy_periods(jobs, 4.0)] == [1, 1, 1, 1]
