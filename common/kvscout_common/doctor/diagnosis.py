"""A snapshot as findings: what is wrong, how that shows, and what helps. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvscout_common.doctor.conditions import (
    CONDITIONS,
    LEFT_OUT,
    PASSING,
    SERVICE_WARNING,
    STARTING,
    YOUNG_SECONDS,
    Condition,
    Severity,
)
from kvscout_common.doctor.engine_checks import check_engines
from kvscout_common.doctor.event_checks import check_events
from kvscout_common.doctor.machine_checks import check_machines
from kvscout_common.doctor.nats_checks import check_nats
from kvscout_common.doctor.prediction_checks import check_predictions
from kvscout_common.doctor.proxy_checks import check_proxies
from kvscout_common.doctor.registry_checks import check_registrations, check_shards, check_tenants
from kvscout_common.doctor.replica_checks import check_replicas
from kvscout_common.doctor.request_checks import check_requests
from kvscout_common.doctor.service_checks import check_helpers, check_services
from kvscout_common.doctor.snapshot import Snapshot
from kvscout_common.doctor.symptom import Symptom
from kvscout_common.plain_text import printable

SHOWN = 20
"""Places listed for one condition; the others are counted."""
MAX_CHARACTERS = 1_000
"""Characters of one item of evidence, part of which comes from outside."""

CHECKS: tuple[Callable[[Snapshot], Iterator[Symptom]], ...] = (
    check_services,
    check_requests,
    check_proxies,
    check_nats,
    check_registrations,
    check_tenants,
    check_shards,
    check_engines,
    check_events,
    check_predictions,
    check_replicas,
    check_machines,
)
_ORDER = {severity: index for index, severity in enumerate(Severity)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One condition that a kvscout is in."""

    id: str
    severity: Severity
    what: str
    """One sentence, which names what it is about where that is one worker, service or policy."""
    evidence: tuple[str, ...]
    """Symptoms, a sentence each."""
    remedy: str


def diagnose(snapshot: Snapshot) -> list[Finding]:
    """Return what is wrong, the worst first; empty = nothing."""
    symptoms = [symptom for check in CHECKS for symptom in check(snapshot)]
    symptoms += _unexplained(snapshot, symptoms)
    if snapshot.left_out:
        symptoms.append(Symptom(LEFT_OUT, f"{snapshot.left_out} were not asked"))
    evidence: defaultdict[Condition, list[str]] = defaultdict(list)
    subjects: defaultdict[Condition, set[str]] = defaultdict(set)
    for symptom in symptoms:
        condition, text = symptom.condition, symptom.evidence
        if condition in PASSING and symptom.age_seconds < YOUNG_SECONDS:
            condition, text = STARTING, f"{text}, {symptom.age_seconds:.0f} s after the start"
        evidence[condition].append(printable(text, MAX_CHARACTERS))
        subjects[condition].add(symptom.subject)
    found = [
        _finding(condition, evidence[condition], subjects[condition])
        for condition in CONDITIONS
        if condition in evidence
    ]
    return sorted(found, key=lambda finding: _ORDER[finding.severity])


def is_wrong(findings: list[Finding]) -> bool:
    """Return whether any of them is more than a note."""
    return any(finding.severity is not Severity.NOTE for finding in findings)


def _finding(condition: Condition, evidence: list[str], subjects: set[str]) -> Finding:
    shown = list(dict.fromkeys(evidence))
    if len(shown) > SHOWN:
        shown = [*shown[:SHOWN], f"and {len(shown) - SHOWN} more"]
    what = condition.what_of(printable(min(subjects), MAX_CHARACTERS) if len(subjects) == 1 else "")
    return Finding(condition.id, condition.severity, what, tuple(shown), condition.remedy)


def _unexplained(snapshot: Snapshot, symptoms: list[Symptom]) -> Iterator[Symptom]:
    """Yield what services complain of and no check has found the cause of."""
    explained = {text for symptom in symptoms for text in symptom.explains if text}
    for symptom in check_helpers(snapshot):
        if explained.isdisjoint(symptom.explains):
            yield symptom
            explained.update(symptom.explains)
    for service in snapshot.services:
        for warning in service.info.warnings if service.info is not None else ():
            if not any(text in warning for text in explained):
                yield Symptom(SERVICE_WARNING, f"{service.name}: {warning}")
