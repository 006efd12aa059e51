"""Checks of services: those that answer, and those that do not. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvscout.v1 import gateway_pb2
from kvscout_common.doctor.conditions import (
    HELPER_FAILING,
    NOT_SERVING,
    OUT_OF_SIGHT,
    SERVICE_UNREACHABLE,
    UNTOLD,
    WRONG_SERVICE,
)
from kvscout_common.doctor.overview import out_of_sight, reached_by_gateways
from kvscout_common.doctor.snapshot import Service, Snapshot
from kvscout_common.doctor.symptom import Symptom
from kvscout_common.enum_words import word_of


def check_services(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield every service by itself."""
    reached = reached_by_gateways(snapshot)
    for service in snapshot.services:
        symptom = _of_service(service, reached.get(service.address))
        if symptom is not None:
            yield symptom
        for text in service.untold:
            yield Symptom(UNTOLD, f"{service.name} does not report {text}")


def check_helpers(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield the gateways' last calls to their helpers; other checks may know better why one failed."""
    ages = {service.address: service.age_seconds for service in snapshot.services}
    for gateway, status in snapshot.statuses(gateway_pb2.GatewayGetStatusResponse):
        for helper in status.helpers:
            if helper.last_error:
                kind = word_of(gateway_pb2.HelperKind, helper.kind)
                yield Symptom(
                    HELPER_FAILING,
                    f"{gateway.name} and its {kind} {helper.address}: {helper.last_error} "
                    f"({helper.failures:,} of {helper.calls:,} calls failed)",
                    (helper.address,),
                    min(gateway.age_seconds, ages.get(helper.address, float("inf"))),
                )


def _of_service(service: Service, helper: gateway_pb2.HelperStatus | None) -> Symptom | None:
    named = f" (named by {service.named_by})" if service.named_by else ""
    explains = (service.address,)
    if out_of_sight(service, helper):
        return Symptom(OUT_OF_SIGHT, f"{service.name}{named}: {service.error}", explains)
    if service.actual is not None:
        return Symptom(WRONG_SERVICE, f"{service.name}{named} is {_a(service.actual)}", explains)
    if service.error:
        return Symptom(SERVICE_UNREACHABLE, f"{service.name}{named}: {service.error}", explains, subject=service.name)
    if service.info is not None and (service.info.draining or not service.serving):
        why, age = ("drains", float("inf")) if service.info.draining else ("is not ready", service.age_seconds)
        return Symptom(NOT_SERVING, f"{service.name} {why}", explains, age, service.name)
    return None


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
