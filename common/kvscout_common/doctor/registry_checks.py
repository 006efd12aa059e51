"""Checks of the registry: a gateway and its upstreams know the same workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvscout.v1 import gateway_pb2, indexer_pb2, workers_pb2
from kvscout_common.doctor.conditions import (
    NO_WORKERS,
    REGISTRATIONS_DIFFER,
    SCHEDULER_WITHOUT_WORKERS,
    SHARDS_DIFFER,
    TENANTS_SHARE_ENGINE,
)
from kvscout_common.doctor.snapshot import Service, ServiceKind, Snapshot, worker_name
from kvscout_common.doctor.symptom import Symptom
from kvscout_common.registry.registry import WorkerName

SHOWN = 8
"""Workers named in a sentence."""
_COMPARED = ("model", "block_size", "role", "dp_start_rank", "dp_size", "eagle", "transport")
"""Fields by which two services would index or choose otherwise."""


def check_registrations(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield every gateway, and each of its helpers against it."""
    by_address = {service.address: service for service in snapshot.services}
    for gateway, status in snapshot.statuses(gateway_pb2.GatewayGetStatusResponse):
        if gateway.workers is None:
            continue
        known = _by_name(gateway.workers)
        if not known:
            yield Symptom(NO_WORKERS, f"{gateway.name} has no registration", age_seconds=gateway.age_seconds)
        for one in status.helpers:
            helper = by_address.get(one.address)
            if helper is not None and helper.workers is not None:
                yield from _compared(gateway, known, helper)


def check_tenants(snapshot: Snapshot) -> Iterator[Symptom]:
    """Find engines that are registered as workers of several tenants."""
    workers: dict[str, set[WorkerName]] = {}
    for service in snapshot.services:
        for entry in service.workers or ():
            endpoint = entry.worker.http_endpoint.rstrip("/").lower()
            if endpoint:
                workers.setdefault(endpoint, set()).add(worker_name(entry.worker))
    for endpoint, names in workers.items():
        tenants = sorted({name.tenant for name in names})
        if len(tenants) > 1:
            listed = ", ".join(tenants[:SHOWN]) + (" and others" if len(tenants) > SHOWN else "")
            yield Symptom(TENANTS_SHARE_ENGINE, f"{endpoint} is a worker of the tenants {listed}: {_names(names)}")


def check_shards(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield what gateways expect of indexers, and what these have."""
    actual = {
        service.address: f"{status.shard_index}/{status.shard_count or 1}"
        for service, status in snapshot.statuses(indexer_pb2.IndexerGetStatusResponse)
    }
    for gateway, status in snapshot.statuses(gateway_pb2.GatewayGetStatusResponse):
        for helper in status.helpers:
            has, expected = actual.get(helper.address), f"{helper.shard_index}/{helper.shard_count or 1}"
            if has is not None and has != expected:
                yield Symptom(
                    SHARDS_DIFFER,
                    f"{gateway.name} expects shard {expected} at indexer {helper.address}, which has {has}",
                    ("has shard",),
                )


def _compared(gateway: Service, known: dict[WorkerName, workers_pb2.Worker], helper: Service) -> Iterator[Symptom]:
    there = _by_name(helper.workers or ())
    lacking, further = known.keys() - there.keys(), there.keys() - known.keys()
    age = min(gateway.age_seconds, helper.age_seconds)
    if helper.kind is ServiceKind.SCHEDULER and known and not there:
        yield Symptom(
            SCHEDULER_WITHOUT_WORKERS,
            f"{helper.name} knows no worker, {gateway.name} {len(known):,}",
            (helper.address,),
            age,
        )
    elif lacking:
        yield Symptom(
            REGISTRATIONS_DIFFER, f"{helper.name} lacks {_names(lacking)} of {gateway.name}", (helper.address,), age
        )
    if further:
        yield Symptom(
            REGISTRATIONS_DIFFER, f"{gateway.name} lacks {_names(further)} of {helper.name}", (helper.address,), age
        )
    for name in sorted(known.keys() & there.keys()):
        ours, theirs = known[name], there[name]
        for field in _COMPARED:
            if getattr(ours, field) != getattr(theirs, field):
                yield Symptom(
                    REGISTRATIONS_DIFFER,
                    f"worker {name.worker_id} has {field} {getattr(ours, field)} at {gateway.name}, "
                    f"{getattr(theirs, field)} at {helper.name}",
                )


def _by_name(entries: Iterable[workers_pb2.WorkerEntry]) -> dict[WorkerName, workers_pb2.Worker]:
    return {worker_name(entry.worker): entry.worker for entry in entries}


def _names(names: Iterable[WorkerName]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(name.worker_id for name in listed[:SHOWN]) + more
