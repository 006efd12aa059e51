"""Checks of requests: what failed lately, or was answered with less knowledge than usual, by cause. Pure.

Shares are of the requests of the last minutes, as each gateway counts them; a few requests are no trouble.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscout.v1 import gateway_pb2, scheduler_pb2
from kvscout_common.doctor.conditions import (
    GATEWAY_FAILING,
    POLICY_FAILING,
    REQUESTS_DEGRADED,
    REQUESTS_FAILING,
    REQUESTS_REFUSED,
    REQUESTS_UNSERVED,
    TENANT_LIMITED,
    TOKENS_LATE,
    Condition,
)
from kvscout_common.doctor.snapshot import Service, Snapshot
from kvscout_common.doctor.symptom import Symptom

FEW: Final = 3
"""Requests that are an accident."""
FAILED_SHARE: Final = 0.01
"""Share of requests that fail for one cause from which it is trouble."""
DEGRADED_SHARE: Final = 0.05

_POLICY, _TOKENS = "policy", "tokens"
_RENDERER: Final = "renderer:"
"""Begin of a gateway's warnings that its renderer does not answer."""
_FAILED: Final[dict[str, Condition]] = {
    "unserved": REQUESTS_UNSERVED,
    **dict.fromkeys(("gateway", "internal"), GATEWAY_FAILING),
    **dict.fromkeys(("busy", "queue", "shed", "deadline"), REQUESTS_REFUSED),
    "limit": TENANT_LIMITED,
}
"""Conditions by cause, of requests that failed; causes of engines have one together, callers' mistakes have none."""


def check_requests(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield what goes wrong with requests."""
    told = False
    for scheduler, known in snapshot.statuses(scheduler_pb2.SchedulerGetStatusResponse):
        for policy in known.policy_failures:
            if policy.recent >= FEW:
                told = True
                yield Symptom(
                    POLICY_FAILING,
                    f"policy {policy.policy!r} of {scheduler.name} failed {policy.recent:,} times in the last "
                    f"{_minutes(policy.recent_seconds)}: {policy.last_error}",
                    subject=f"policy {policy.policy!r}",
                )
    for gateway, status in snapshot.statuses(gateway_pb2.GatewayGetStatusResponse):
        for count in status.failure_counts:
            if count.answered:
                if not (told and count.cause == _POLICY):
                    yield from _answered(gateway, status, count)
            elif (condition := _condition(count)) is not None and _is_much(count.recent, status, FAILED_SHARE):
                yield Symptom(condition, _evidence(gateway, status, count, f"failed ({count.cause})"))
        yield from _late(gateway, status)


def _answered(
    gateway: Service, status: gateway_pb2.GatewayGetStatusResponse, count: gateway_pb2.FailureCount
) -> Iterator[Symptom]:
    """Yield a reason for which requests were placed with less knowledge, or moved."""
    if count.owner != gateway_pb2.FAULT_OWNER_ROUTER:
        return  # they moved to another worker: that is told of the worker
    number = count.recent
    if count.cause == _TOKENS:
        number -= min(number, sum(late.recent for late in status.late_tokens))
    if count.cause == _POLICY:
        if number >= FEW:
            yield Symptom(POLICY_FAILING, _evidence(gateway, status, count, "were placed by the default policy"))
    elif _is_much(number, status, DEGRADED_SHARE):
        yield Symptom(REQUESTS_DEGRADED, _evidence(gateway, status, count, f"were placed without {count.cause}"))


def _late(gateway: Service, status: gateway_pb2.GatewayGetStatusResponse) -> Iterator[Symptom]:
    for warning in status.service.warnings:
        if warning.startswith(_RENDERER):
            yield Symptom(TOKENS_LATE, f"{gateway.name}: {warning}", (_RENDERER,))
    for late in status.late_tokens:
        if _is_much(late.recent, status, DEGRADED_SHARE):
            yield Symptom(
                TOKENS_LATE,
                f"{gateway.name}: the {late.source} of model {late.model!r} did not have the tokens of {late.recent:,} "
                f"of {status.recent_requests:,} requests of the last {_minutes(status.recent_seconds)} in time",
                (_RENDERER,) if late.source == "renderer" else (),
            )


def _condition(count: gateway_pb2.FailureCount) -> Condition | None:
    if count.owner == gateway_pb2.FAULT_OWNER_ENGINE:
        return REQUESTS_FAILING
    return _FAILED.get(count.cause)


def _is_much(number: int, status: gateway_pb2.GatewayGetStatusResponse, share: float) -> bool:
    return number >= FEW and number >= share * status.recent_requests


def _evidence(
    gateway: Service,
    status: gateway_pb2.GatewayGetStatusResponse,
    count: gateway_pb2.FailureCount,
    what: str,
) -> str:
    last = f"; the last one: {count.last_message}" if count.last_message else ""
    return (
        f"{gateway.name}: {count.recent:,} of {status.recent_requests:,} requests of the last "
        f"{_minutes(status.recent_seconds)} {what}{last}"
    )


def _minutes(seconds: int) -> str:
    return f"{seconds // 60} min"
