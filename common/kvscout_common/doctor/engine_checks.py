"""Checks of engines: their answers and gateways' observations against the registrations. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvscout_common.doctor.conditions import (
    BLOCK_SIZE_DIFFERS,
    ENGINE_SUSPECTED,
    ENGINE_UNREACHABLE,
    MODEL_DIFFERS,
    OUT_OF_SIGHT,
    RANKS_DIFFER,
    UNTOLD,
    WORKER_FAILING,
    WORKER_SLOW,
    Condition,
)
from kvscout_common.doctor.overview import seen_by_gateways
from kvscout_common.doctor.snapshot import Snapshot
from kvscout_common.doctor.symptom import Symptom, of_worker
from kvscout_common.doctor.worker_health import LEFT_OUT, SLOW, SUSPECTED, judged_healths
from kvscout_common.errors import InvalidArgument
from kvscout_common.registry.registry import WorkerName
from kvscout_common.registry.worker_proto import spec_from_proto

_BY_STATE = {LEFT_OUT: WORKER_FAILING, SUSPECTED: ENGINE_SUSPECTED, SLOW: WORKER_SLOW}
_BY_FIELD: dict[str, Condition] = {
    "block_size": BLOCK_SIZE_DIFFERS,
    "model": MODEL_DIFFERS,
    "dp_size": RANKS_DIFFER,
}


def check_engines(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield every worker's engine, as gateways judge it and as it answers."""
    seen = seen_by_gateways(snapshot)
    lost = set()
    said: set[tuple[WorkerName, str]] = set()
    for name, health in judged_healths(snapshot).items():
        if health.state == LEFT_OUT and health.is_down:
            condition = ENGINE_UNREACHABLE
        elif (found := _BY_STATE.get(health.state)) is not None:
            condition = found
        else:
            continue
        if health.is_down:
            lost.add(name.worker)
        # What is wrong with an engine is wrong with all of its ranks.
        if (name.worker, health.cause) in said:
            continue
        said.add((name.worker, health.cause))
        evidence = health.sentence(name.worker_id if health.is_down else str(name))
        if condition is WORKER_FAILING:
            evidence += f" ({seen[name].failures:,} of {seen[name].requests:,} requests failed)"
        yield Symptom(condition, evidence, of_worker(name.worker_id), subject=f"worker {name.worker_id}")
    yield from _asked(snapshot, lost)


def _asked(snapshot: Snapshot, lost: set[WorkerName]) -> Iterator[Symptom]:
    """Yield the answers of the engines that were queried, but for what gateways have found."""
    served = {name.worker for name, seen in seen_by_gateways(snapshot).items() if seen.requests > seen.failures}
    workers = snapshot.workers
    for engine in snapshot.engines:
        about, subject = of_worker(engine.worker.worker_id), f"worker {engine.worker.worker_id}"
        if engine.facts is None:
            evidence = f"worker {engine.worker.worker_id}: {engine.error}"
            if engine.worker in lost:
                continue
            if engine.reached or (snapshot.is_own and engine.worker in served):
                yield Symptom(UNTOLD, evidence)
            elif engine.worker in served:
                yield Symptom(OUT_OF_SIGHT, evidence)
            else:
                yield Symptom(ENGINE_UNREACHABLE, evidence, about, subject=subject)
            continue
        try:
            spec = spec_from_proto(workers[engine.worker])
        except InvalidArgument:
            continue  # a newer release's: it was not queried
        for field, text in engine.facts.contradictions(spec).items():
            yield Symptom(_BY_FIELD[field], f"{subject} at {engine.url}: {text}", about, subject=subject)
