"""The judge of workers: one state for each, from all that a gateway knows of it. Every surface shows this state.

::

    registration ── draining ──────────────────────────────────┐
    WorkerHealth ── left out, suspected, busy ─────────────────┤
    Observations ── suspected: silent while requests wait ─────┼──▶ the worst ──▶ GetStatus, ListWorkers,
                    slow: more seconds a token than others ────┤                  GetPotentialLoads, metric
    indexers ────── no events ─────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout.v1 import types_pb2
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_gateway.engines.health import WorkerHealth
from kvscout_gateway.engines.observation import Observations
from kvscout_gateway.engines.worker_state import WELL, Judgement, WorkerState


class Judge(Collector):
    """Judges the workers of one gateway.

    Args:
        health: Failures of requests and health checks.
        observations: Observations of each rank.
        workers: Gives the registered workers.
    """

    def __init__(
        self, health: WorkerHealth, observations: Observations, workers: Callable[[], Iterable[WorkerSpec]]
    ) -> None:
        self._health = health
        self._observations = observations
        self._workers = workers

    def rank(self, spec: WorkerSpec, rank: WorkerRank) -> Judgement:
        """Return the worst that is known of a rank."""
        key = (spec.tenant, rank)
        found = (
            self._health.judge(key),
            self._observations.judge(key),
            Judgement(WorkerState.DRAINING) if spec.draining else WELL,
        )
        return max(found, key=lambda one: one.state)

    def worker(self, spec: WorkerSpec) -> Judgement:
        """Return the worst that is known of a worker's ranks."""
        return max((self.rank(spec, rank) for rank in spec.ranks), key=lambda one: one.state, default=WELL)

    def collect(self) -> Iterator[Metric]:
        """Return the state of each worker rank."""
        states = GaugeMetricFamily(
            "kvscout_worker_state",
            "1 = the state that this gateway judges a worker rank to be in",
            labels=["tenant", "model", "worker", "dp_rank", "state"],
        )
        for spec in self._workers():
            for rank in spec.ranks:
                state = self.rank(spec, rank).state
                states.add_metric([spec.tenant, spec.model, rank.worker_id, str(rank.dp_rank), str(state)], 1.0)
        yield states


def health_to_proto(one: Judgement) -> types_pb2.WorkerHealth:
    """Return a judgement as the API has it."""
    return types_pb2.WorkerHealth(
        state=types_pb2.WorkerState.ValueType(one.state), cause=one.cause, age_seconds=one.age_seconds
    )
