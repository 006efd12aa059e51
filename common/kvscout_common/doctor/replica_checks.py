"""Checks of replicas: the schedulers share their bookings. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvscout_common.doctor.conditions import REPLICA_SILENT, REPLICAS_ALONE, REPLICAS_DIVERGED
from kvscout_common.doctor.snapshot import Snapshot
from kvscout_common.doctor.symptom import Symptom


def check_replicas(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield every scheduler, and what it says of the others."""
    replicated = [(service, service.replicas) for service in snapshot.services if service.replicas is not None]
    for service, answer in replicated:
        if answer.problem and (len(replicated) > 1 or answer.replicas):
            yield Symptom(REPLICAS_ALONE, f"{service.name}: {answer.problem}", (answer.problem,))
        for replica in answer.replicas:
            if replica.diverged:
                yield Symptom(
                    REPLICAS_DIVERGED,
                    f"{service.name} and replica {replica.replica_id} disagree at event {replica.sequence:,}, "
                    f"for the {replica.divergences:,}. time",
                )
            elif not (replica.self or replica.live):
                yield Symptom(
                    REPLICA_SILENT,
                    f"last message to {service.name} from replica {replica.replica_id} {replica.silent_seconds:.0f} s "
                    f"ago; it owns {replica.owned_requests:,} requests",
                )
