"""Checks of engines: their answers and gateways' observations against the registrations. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvscout.v1 import gateway_pb2
from kvscout_common.doctor.conditions import (
    BLOCK_SIZE_DIFFERS,
    ENGINE_UNREACHABLE,
    MODEL_DIFFERS,
    OUT_OF_SIGHT,
    RANKS_DIFFER,
    UNTOLD,
    WORKER_FAILING,
    Condition,
)
from kvscout_common.doctor.overview import seen_by_gateways
from kvscout_common.doctor.snapshot import Snapshot, WorkerName, observed_name
from kvscout_common.doctor.symptom import Symptom, of_worker
from kvscout_common.errors import InvalidArgument
from kvscout_common.registry.worker_proto import spec_from_proto

_BY_FIELD: dict[str, Condition] = {
    "block_size": BLOCK_SIZE_DIFFERS,
    "model": MODEL_DIFFERS,
    "dp_size": RANKS_DIFFER,
}


def check_engines(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield every worker's engine."""
    silent: set[WorkerName] = set()
    for gateway, status in snapshot.statuses(gateway_pb2.GatewayGetStatusResponse):
        for seen in status.workers:
            name = observed_name(seen)
            if seen.health_check_problem:
                if name.worker not in silent:
                    silent.add(name.worker)
                    evidence = f"worker {name.worker_id}, says {gateway.name}: {seen.health_check_problem}"
                    yield Symptom(ENGINE_UNREACHABLE, evidence, of_worker(name.worker_id))
            elif seen.problem:
                yield Symptom(
                    WORKER_FAILING,
                    f"worker {name}, says {gateway.name}: {seen.problem} "
                    f"({seen.failures:,} of {seen.requests:,} requests failed)",
                    of_worker(name.worker_id),
                )
    yield from _asked(snapshot, silent)


def _asked(snapshot: Snapshot, silent: set[WorkerName]) -> Iterator[Symptom]:
    """Yield the answers of the engines that were queried."""
    served = {name.worker for name, seen in seen_by_gateways(snapshot).items() if seen.requests > seen.failures}
    workers = snapshot.workers
    for engine in snapshot.engines:
        about = of_worker(engine.worker.worker_id)
        if engine.facts is None:
            evidence = f"worker {engine.worker.worker_id}: {engine.error}"
            if engine.reached:
                yield Symptom(UNTOLD, evidence)
            elif engine.worker in served and engine.worker not in silent:
                yield Symptom(OUT_OF_SIGHT, evidence)
            else:
                yield Symptom(ENGINE_UNREACHABLE, evidence, about)
            continue
        try:
            spec = spec_from_proto(workers[engine.worker])
        except InvalidArgument:
            continue  # a newer release's: it was not queried
        for field, text in engine.facts.contradictions(spec).items():
            yield Symptom(_BY_FIELD[field], f"worker {spec.worker_id} at {engine.url}: {text}", about)
