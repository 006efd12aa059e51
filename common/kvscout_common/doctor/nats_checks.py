"""Checks of NATS, as each service reports it and compared. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from kvscout.v1 import types_pb2
from kvscout_common.doctor.conditions import (
    NATS_CLUSTERS_DIFFER,
    NATS_NAMESPACES_DIFFER,
    NATS_UNREACHABLE,
    NATS_WITHOUT_JETSTREAM,
)
from kvscout_common.doctor.snapshot import Service, Snapshot
from kvscout_common.doctor.symptom import Symptom
from kvscout_common.nats.names import REGISTRY


def check_nats(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield whether NATS is there, has JetStream, and is the same for all."""
    namespaces: defaultdict[str, list[Service]] = defaultdict(list)
    clusters: defaultdict[str, list[Service]] = defaultdict(list)
    for service in snapshot.services:
        if service.info is None or not service.info.HasField("nats"):
            continue
        nats = service.info.nats
        namespaces[nats.namespace].append(service)
        if nats.cluster and nats.connected:
            clusters[nats.cluster].append(service)
        servers = ", ".join(nats.servers)
        if not nats.connected:
            explains = (REGISTRY, nats.problem)
            evidence = f"{service.name}, {servers}: {nats.problem}"
            yield Symptom(NATS_UNREACHABLE, evidence, explains, subject=service.name)
        elif not nats.jetstream and _misses_jetstream(service.info):
            yield Symptom(
                NATS_WITHOUT_JETSTREAM,
                f"{service.name}: {servers} is there, and has no JetStream",
                (REGISTRY, nats.problem, "JetStream"),
            )
    if len(namespaces) > 1:
        yield Symptom(NATS_NAMESPACES_DIFFER, _who_has_which(namespaces))
    if len(clusters) > 1:
        yield Symptom(NATS_CLUSTERS_DIFFER, _who_has_which(clusters))


def _misses_jetstream(info: types_pb2.ServiceInfo) -> bool:
    """Return whether a server lacks JetStream and cannot pass calls on to others of its cluster that have it."""
    return bool(info.nats.problem) or any(REGISTRY in warning for warning in info.warnings)


def _who_has_which(groups: Mapping[str, list[Service]]) -> str:
    return "; ".join(f"{name!r}: {', '.join(one.name for one in services)}" for name, services in groups.items())
