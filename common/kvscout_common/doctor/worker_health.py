"""Health of each worker rank, as the gateways of a snapshot judge it: one word, the same wherever it is shown. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2
from kvscout_common.doctor.snapshot import RankName, ServiceKind, Snapshot, observed_name
from kvscout_common.enum_words import word_of

OK: Final = "ok"
UNJUDGED: Final = "unknown"
"""Word for a worker that no gateway judges."""
NO_EVENTS: Final = "no events"
SLOW: Final = "slow"
SUSPECTED: Final = "suspected"
LEFT_OUT: Final = "left out"
TROUBLED: Final = frozenset({NO_EVENTS, SLOW, SUSPECTED, LEFT_OUT})
"""States in which something is wrong with a worker."""
_GRAVITY = {UNJUDGED: 0} | {
    word_of(types_pb2.WorkerState, number): number for number in types_pb2.WorkerState.values() if number
}


@dataclass(frozen=True, slots=True)
class Health:
    """Health of one worker rank."""

    state: str = OK
    """State as in the API, in lower case, such as "left out"."""
    cause: str = ""
    """Part of a sentence; "" = the state says it."""
    age_seconds: float | None = None
    """Since the cause was first seen; None = not known."""
    gateway: str = ""
    """Address of the gateway that judges so; "" = there is only one, or it is well."""
    is_down: bool = False
    """Its engine does not answer, or may not."""

    @property
    def well(self) -> bool:
        """Return whether nothing is wrong with the worker."""
        return self.state not in TROUBLED

    @property
    def why(self) -> str:
        """Return the cause, for how long, and who says so; "" = the state says it."""
        since = f"for {self.age_seconds:.0f} s" if self.age_seconds is not None else ""
        notes = ", ".join(part for part in (since, f"says gateway {self.gateway}" if self.gateway else "") if part)
        return f"{self.cause} ({notes})" if self.cause and notes else self.cause or notes

    def sentence(self, name: str) -> str:
        """Return all of it as one sentence about a worker of this name."""
        since = "is" if self.age_seconds is None else "has been"
        by = f", says gateway {self.gateway}," if self.gateway else ""
        duration = "" if self.age_seconds is None else f" for {self.age_seconds:.0f} s"
        return f"worker {name}{by} {since} {self.state}{duration}{f': it {self.cause}' if self.cause else ''}"


def health_of(message: types_pb2.WorkerHealth, gateway: str = "") -> Health:
    """Return a health as people read it.

    Args:
        message: As the API has it.
        gateway: Address of the gateway that judges; "" = there is only one.
    """
    return Health(
        state=word_of(types_pb2.WorkerState, message.state) or UNJUDGED,
        cause=message.cause,
        age_seconds=message.age_seconds if message.HasField("age_seconds") else None,
        gateway=gateway if message.state != types_pb2.WORKER_STATE_OK else "",
    )


def load_healths(load: scheduler_pb2.WorkerLoad) -> list[types_pb2.WorkerHealth]:
    """Return what a scheduler knows of the health of a worker rank."""
    found = []
    if load.cooldown_seconds > 0:
        cause = f"was reported as failing: no requests for {load.cooldown_seconds:.0f} s"
        found.append(types_pb2.WorkerHealth(state=types_pb2.WORKER_STATE_LEFT_OUT, cause=cause))
    if load.draining:
        found.append(types_pb2.WorkerHealth(state=types_pb2.WORKER_STATE_DRAINING))
    if load.busy:
        found.append(types_pb2.WorkerHealth(state=types_pb2.WORKER_STATE_BUSY, cause="is over a busy threshold"))
    return found


def worst(*healths: Health) -> Health:
    """Return the gravest of several, at least one; of equal ones, the first."""
    return max(healths, key=lambda one: _GRAVITY.get(one.state, 0))


def judged_healths(snapshot: Snapshot) -> dict[RankName, Health]:
    """Return the health of the worker ranks that gateways observe; of several gateways, the gravest judgement."""
    several = len(snapshot.of_kind(ServiceKind.GATEWAY)) > 1
    found: dict[RankName, Health] = {}
    for service, status in snapshot.statuses(gateway_pb2.GatewayGetStatusResponse):
        for one in status.workers:
            name = observed_name(one)
            message = one.health if one.HasField("health") else _of_earlier_release(one)
            health = health_of(message, service.address if several else "")
            if health.state == SUSPECTED or (health.state == LEFT_OUT and one.health_check_problem):
                health = replace(health, is_down=True)
            found[name] = worst(found[name], health) if name in found else health
    return found


def shown_health(judged: Health | None, load: scheduler_pb2.WorkerLoad | None, *, has_gateway: bool) -> Health:
    """Return the health to show of a worker rank.

    Args:
        judged: What gateways judge; None = none has observed it.
        load: What a scheduler knows; None = nothing.
        has_gateway: A gateway has answered: what it has not observed is well.
    """
    known = judged or Health(OK if has_gateway or load is not None else UNJUDGED)
    return worst(known, *map(health_of, load_healths(load))) if load is not None else known


def _of_earlier_release(one: gateway_pb2.WorkerObservation) -> types_pb2.WorkerHealth:
    if not one.problem:
        return types_pb2.WorkerHealth(state=types_pb2.WORKER_STATE_OK)
    return types_pb2.WorkerHealth(state=types_pb2.WORKER_STATE_LEFT_OUT, cause=one.health_check_problem or one.problem)
