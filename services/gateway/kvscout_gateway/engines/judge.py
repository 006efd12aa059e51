"""The judge of workers: one state for each, from all that a gateway knows of it. Every surface shows this state.

::

    registration ── draining ──────────────────────────────────┐
    WorkerHealth ── left out, suspected, busy ─────────────────┤
    Observations ── suspected: silent while requests wait ─────┼──▶ the worst ──▶ GetStatus, ListWorkers,
                    slow: more seconds a token than others ────┤                  GetPotentialLoads, metric
    indexers ────── no events ─────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout.v1 import types_pb2
from kvscout_common.observability.rank_series import PAUSE
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_gateway.engines.health import WorkerHealth
from kvscout_gateway.engines.observation import Observations
from kvscout_gateway.engines.speed import SAMPLE_SECONDS, Key, Speeds
from kvscout_gateway.engines.worker_state import WELL, Judgement, WorkerState

WORKERS_A_TURN = 64
"""Workers judged in a row: about a millisecond."""


class Judge(Collector):
    """Judges the workers of one gateway.

    Args:
        health: Failures of requests and health checks.
        observations: Observations of each rank.
        no_events: Gives the ranks whose events are missing at an indexer, and what says so.
        workers: Gives the registered workers.
        spec_of: Gives one of them by tenant and worker id.
    """

    def __init__(
        self,
        health: WorkerHealth,
        observations: Observations,
        no_events: Callable[[], Mapping[tuple[str, WorkerRank], str]],
        workers: Callable[[], Iterable[WorkerSpec]],
        spec_of: Callable[[str, str], WorkerSpec | None],
    ) -> None:
        self._health = health
        self._observations = observations
        self._no_events = no_events
        self._workers = workers
        self._spec_of = spec_of
        self._speeds = Speeds()

    async def run(self) -> None:
        """Compare the speeds of workers, for ever."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            now = asyncio.get_running_loop().time()
            totals = {
                key: seen.liveness.count()
                for key, seen in self._observations.by_rank.items()
                if seen.liveness.streams or key in self._speeds
            }
            self._speeds.sample(now, totals, self._pool_of)

    def rank(self, spec: WorkerSpec, rank: WorkerRank) -> Judgement:
        """Return the worst that is known of a rank."""
        key = (spec.tenant, rank)
        found = (
            self._health.judge(key),
            self._observations.judge(key),
            Judgement(WorkerState.DRAINING) if spec.draining else WELL,
            self._speeds.judge(key, time.monotonic()),
            Judgement(WorkerState.NO_EVENTS, reason) if (reason := self._no_events().get(key)) else WELL,
        )
        return max(found, key=lambda one: one.state)

    def worker(self, spec: WorkerSpec) -> Judgement:
        """Return the worst that is known of a worker's ranks."""
        return max((self.rank(spec, rank) for rank in spec.ranks), key=lambda one: one.state, default=WELL)

    def _pool_of(self, key: Key) -> Hashable | None:
        tenant, rank = key
        spec = self._spec_of(tenant, rank.worker_id)
        return (tenant, spec.model, spec.role, spec.device_class) if spec is not None else None

    def collect(self) -> Iterator[Metric]:
        """Return the state of each worker rank."""
        states = GaugeMetricFamily(
            "kvscout_worker_state",
            "1 = the state that this gateway judges a worker rank to be in",
            labels=["tenant", "model", "worker", "dp_rank", "state"],
        )
        for number, spec in enumerate(self._workers()):
            if number % WORKERS_A_TURN == WORKERS_A_TURN - 1:
                yield PAUSE
            for rank in spec.ranks:
                state = self.rank(spec, rank).state
                states.add_metric([spec.tenant, spec.model, rank.worker_id, str(rank.dp_rank), str(state)], 1.0)
        yield states


def health_to_proto(one: Judgement) -> types_pb2.WorkerHealth:
    """Return a judgement as the API has it."""
    return types_pb2.WorkerHealth(
        state=types_pb2.WorkerState.ValueType(one.state), cause=one.cause, age_seconds=one.age_seconds
    )
