"""What goes wrong in a run: nothing is lost by it, and nothing stays booked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.laboratory_worlds import ENGINE, mixed, simulation
from support.scheduler_invariants import check_idle
from support.seeds import test_seed

from kvscout_common.errors import ConfigError
from kvscout_lab.simulation.cluster import Cluster, Faults
from kvscout_lab.simulation.index import LateIndex
from kvscout_lab.simulation.router import GatewayBooking, Replica
from kvscout_lab.simulation.timing import PICOSECONDS
from kvscout_lab.simulation.worker import NEVER, Job, Worker
from kvscout_lab.workloads.clients import Clients, as_clients_ask
from kvscout_scheduler.replicas.replication import Replication

CLUSTER = Cluster(workers=3, engine=ENGINE, gateways=3)
SEED = 20_261_123
"""Of scenarios in which something has to happen at one moment: with other draws nobody may be there then."""


@pytest.mark.parametrize("policy", ["kv-time", "kv", "least-loaded"])
@pytest.mark.parametrize(
    "cluster",
    [
        replace(CLUSTER, faults=Faults(restart_scheduler=0.5, scheduler_down_seconds=0.2)),
        replace(CLUSTER, faults=Faults(restart_scheduler=0.5, scheduler_down_seconds=0.0), replicas=2),
        replace(CLUSTER, faults=Faults(restart_scheduler=0.5), prefill_workers=2),
        replace(CLUSTER, faults=Faults(restart_gateway=0.5, abort_seconds=0.1, retry_seconds=0.2)),
        replace(CLUSTER, faults=Faults(restart_gateway=0.4, restart_scheduler=0.5, scheduler_down_seconds=0.1)),
        replace(CLUSTER, faults=Faults(recover_worker=0.5, slow_speed=0.1)),
        replace(CLUSTER, lost_events=0.3),
        replace(CLUSTER, prefill_speeds=(0.4, 2.0), decode_speeds=(3.0,)),
    ],
)
def test_every_request_ends_once_and_nothing_is_left(policy: str, cluster: Cluster) -> None:
    workload = as_clients_ask(mixed(test_seed(), 200, 30.0), Clients(unstreamed=0.3, max_tokens=512))
    made = simulation(workload, policy, cluster, queue_threshold=0.5)
    run = made.run()
    check_idle(made)
    assert len({(record.flow, record.turn) for record in run.records}) == len(run.records) == workload.requests
    for record in run.records:
        assert not record.error
        assert record.arrived <= record.placed < record.first_token <= record.finished <= run.ended


def test_what_is_on_its_way_to_a_replica_that_is_no_more_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Replication] = []
    before: list[int] = []
    receive, query = Replication.receive, Replication.query

    def received(self: Replication, payload: bytes) -> None:
        heard.append(self)
        receive(self, payload)

    def started_again(self: Replication) -> None:
        before.append(len(heard))
        query(self)

    monkeypatch.setattr(Replication, "receive", received)
    monkeypatch.setattr(Replication, "query", started_again)
    cluster = replace(CLUSTER, faults=Faults(restart_scheduler=0.5, scheduler_down_seconds=0.0), replicas=2)
    made = simulation(mixed(SEED, 200, 30.0), "kv", cluster)
    made.run()
    later = heard[before[-1] :]
    assert later
    assert all(any(each is replica.replication for replica in made.replicas) for each in later)


def test_a_scheduler_that_is_back_is_told_what_runs_and_whose_first_token_is_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again: list[GatewayBooking] = []
    book_again = Replica.book_again

    def booked(self: Replica, each: GatewayBooking, *rest: object) -> None:
        again.append(replace(each))
        book_again(self, each, *rest)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(Replica, "book_again", booked)
    down = 0.2
    faults = Faults(restart_scheduler=0.5, scheduler_down_seconds=down)
    cluster = replace(CLUSTER, faults=faults, decode_speeds=(0.2,) * 3)
    workload = mixed(SEED, 200, 60.0)
    made = simulation(workload, "kv-time", cluster)
    run = made.run()
    span = workload.flows[-1].start_seconds - workload.flows[0].start_seconds
    gone = workload.flows[0].start_seconds + 0.5 * span
    back, late = (gone + down) * PICOSECONDS, 1.5e-3 * PICOSECONDS
    running = [each for each in run.records if each.placed < gone * PICOSECONDS and each.finished > back - late]
    assert len(again) == len(running) > 0
    assert sum(each.prefilled for each in again) == sum(each.first_token < back - late for each in running)
    waited = [each for each in run.records if gone * PICOSECONDS < each.arrived < back]
    assert waited
    assert all(each.placed >= round(back) - 1 for each in waited)


def test_a_gateway_that_dies_leaves_bookings_that_end_without_a_free_and_clients_ask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aborted: list[Job] = []
    abort = Worker.abort

    def noted(self: Worker, job: Job, now: int) -> None:
        aborted.append(job)
        abort(self, job, now)

    monkeypatch.setattr(Worker, "abort", noted)
    faults = Faults(restart_gateway=0.5, abort_seconds=0.02, retry_seconds=0.5)
    workload = mixed(SEED, 200, 60.0)
    made = simulation(workload, "kv-time", replace(CLUSTER, faults=faults))
    run = made.run()
    check_idle(made)
    assert aborted
    ended = made.replicas[0].core.stats.ended
    assert sum(ended.values()) >= len(aborted)
    assert made.replicas[0].core.stats.freed == workload.requests
    assert all(not record.error for record in run.records)


def test_a_worker_that_recovers_is_given_more_afterwards() -> None:
    workload = mixed(SEED, 400, 15.0)
    made = simulation(workload, "least-loaded", replace(CLUSTER, faults=Faults(recover_worker=0.5)))
    records = made.run().records
    halves = records[: len(records) // 2], records[len(records) // 2 :]
    before, after = (sum(each.worker == 0 for each in half) for half in halves)
    assert after > before


def test_an_aborted_request_leaves_at_the_next_boundary_and_others_go_on() -> None:
    worker = Worker(ENGINE)
    jobs = [Job(None, range(1, 100), 20, 400), Job(None, range(1, 100), 24, 30), Job(None, range(200, 300), 30, 3)]
    for each in jobs:
        worker.submit(each, 0)
    ended = []
    while worker.end != NEVER:
        now = worker.end
        ended += [done.job for done in worker.finish()[0] if done.finished]
        worker.begin(now)
        worker.check_invariants()
        if len(ended) == 1 and worker.batch == 2 and worker.end - now > PICOSECONDS // 50:
            before = worker.end
            worker.abort(jobs[0], now + 1)
            assert worker.end < before
            worker.abort(jobs[0], now + 1)
    assert ended == [jobs[2], jobs[1]]
    assert not worker.batch
    assert not worker.cache.used
    worker.abort(jobs[0], now)
    waiting = Job(None, (), 10, 5)
    worker.submit(Job(None, (), 120, 5), now)
    worker.submit(waiting, now)
    assert worker.waiting == 1
    worker.abort(waiting, now)
    assert not worker.waiting


def test_events_are_lost_by_the_seed_and_only_as_often_as_was_said() -> None:
    def known(lost: float, seed: int) -> int:
        index = LateIndex(1, 0, lost, seed)
        for node in range(1, 1_001):
            index.publish(0, [node], node)
        return sum(bool(index.overlaps([node], 2_000)) for node in range(1, 1_001))

    seed = test_seed()
    assert known(0.0, seed) == 1_000
    assert known(1.0, seed) == 0
    assert 600 < known(0.3, seed) == known(0.3, seed) < 800


@pytest.mark.parametrize(
    ("field", "cluster"),
    [
        ("restart_scheduler", replace(CLUSTER, faults=Faults(restart_scheduler=1.5))),
        ("restart_gateway", replace(CLUSTER, faults=Faults(restart_gateway=-0.5))),
        ("restart_gateway", replace(CLUSTER, prefill_workers=1, faults=Faults(restart_gateway=0.5))),
        ("recover_worker", replace(CLUSTER, faults=Faults(recover_worker=float("nan")))),
        ("slow_speed", replace(CLUSTER, faults=Faults(slow_speed=0.0))),
        ("retry_seconds", replace(CLUSTER, faults=Faults(retry_seconds=-1.0))),
        ("lost_events", replace(CLUSTER, lost_events=2.0)),
        ("adapters", replace(CLUSTER, adapters=-1)),
        ("adapters", replace(CLUSTER, workers=1, adapters=2)),
        ("prefill_speeds", replace(CLUSTER, prefill_speeds=(1.0,) * 4)),
        ("decode_speeds", replace(CLUSTER, decode_speeds=(0.0,))),
    ],
)
def test_faults_out_of_range_are_refused_with_the_field(field: str, cluster: Cluster) -> None:
    with pytest.raises(ConfigError) as raised:
        simulation(mixed(1, 5), "kv", cluster)
    assert raised.value.field == field
