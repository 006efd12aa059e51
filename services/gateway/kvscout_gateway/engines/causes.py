"""Causes of failed requests, and whose fault each is: one word for each, wherever failures are counted or listed.

Engines' failures have the names of the fault table (`faults.py`); the others are refusals, and what is missed where a
request is answered with less knowledge than usual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from kvscout_common.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Draining,
    FailedPrecondition,
    InvalidArgument,
    KvscoutError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from kvscout_common.http.http import HttpRefused, SinkGone, SinkStalled
from kvscout_gateway.engines.faults import RULES, EngineFailed, Fault, Payer, failure_behind


class Owner(StrEnum):
    """Whose fault a failure is."""

    CALLER = "caller"
    ENGINE = "engine"
    ROUTER = "router"


class Cause(StrEnum):
    """Cause of a failure."""

    # The caller's.
    REQUEST = Fault.REQUEST.value
    """The request is wrong: a field, a prompt that is too long, an id that is taken, labels that no worker has."""
    UNKNOWN = "unknown"
    """It names a model, worker or answer that nobody knows."""
    KEY = "key"
    """Its API key is missing, unknown, or does not allow it."""
    LIMIT = "limit"
    """Its tenant is at a limit of its own."""
    GONE = "gone"
    """The client went away, or reads nothing."""
    # The engine's.
    OVERLOAD = Fault.OVERLOAD.value
    REFUSED = Fault.REFUSED.value
    WORKER = Fault.WORKER.value
    TIME = Fault.TIME.value
    BALANCER = Fault.BALANCER.value
    # The router's.
    BUSY = "busy"
    """Every worker that could take it is busy, or this gateway is."""
    QUEUE = "queue"
    """The scheduler's queue is full, or no worker had room in time."""
    SHED = "shed"
    """It may be shed (priority below 0), and no worker keeps its targets."""
    DEADLINE = "deadline"
    """Its deadline passed, or would pass before its first token."""
    UNSERVED = "unserved"
    """No worker can take it now: all drain, cool down or are gone."""
    DRAINING = "draining"
    """This gateway, or its scheduler, is about to stop."""
    GATEWAY = Fault.GATEWAY.value
    """This process has no descriptors or no memory left."""
    INTERNAL = "internal"
    """A defect; the log has it."""
    # The router's, of requests that are answered all the same.
    POLICY = "policy"
    """The policy failed: the default policy decided."""
    SCHEDULER = "scheduler"
    """No scheduler answered: the workers take turns."""
    INDEXER = "indexer"
    """No indexer answered for all workers: placed without (all) overlaps."""
    TOKENS = "tokens"
    """Nobody had the prompt's tokens, or not all of them, or not in time: placed without overlaps."""


_OWNERS: Final[Mapping[Payer, Owner]] = {
    Payer.CLIENT: Owner.CALLER,
    Payer.WORKER: Owner.ENGINE,
    Payer.GATEWAY: Owner.ROUTER,
    Payer.NOBODY: Owner.ENGINE,
}
"""Owners of the faults of engines, by who pays."""
OWNERS: Final[Mapping[Cause, Owner]] = {
    **dict.fromkeys(Cause, Owner.ROUTER),
    **dict.fromkeys((Cause.UNKNOWN, Cause.KEY, Cause.LIMIT, Cause.GONE), Owner.CALLER),
    **{Cause(fault.value): _OWNERS[rule.payer] for fault, rule in RULES.items()},
}
"""Whose fault each cause is."""
_BY_ERROR: Final[Mapping[type[BaseException], Cause]] = {
    InvalidArgument: Cause.REQUEST,
    AlreadyExists: Cause.REQUEST,
    FailedPrecondition: Cause.REQUEST,
    Unimplemented: Cause.REQUEST,
    NotFound: Cause.UNKNOWN,
    Unauthenticated: Cause.KEY,
    PermissionDenied: Cause.KEY,
    Cancelled: Cause.GONE,
    SinkGone: Cause.GONE,
    SinkStalled: Cause.GONE,
    asyncio.CancelledError: Cause.GONE,
    ResourceExhausted: Cause.BUSY,
    DeadlineExceeded: Cause.DEADLINE,
    Draining: Cause.DRAINING,
    Unavailable: Cause.UNSERVED,
}
"""Causes by class; of a class that is not here, its nearest base counts, and a defect where there is none."""
_NAMED: Final = frozenset(Cause)


def cause_of(error: BaseException) -> Cause:
    """Return the cause of a request's end."""
    failed = error if isinstance(error, EngineFailed) else failure_behind(error)
    if failed is not None:
        return Cause(failed.fault.value)
    if isinstance(error, HttpRefused):
        # Whatever a client cannot help is memory that requests share.
        return Cause.GATEWAY if error.status in (429, 503) else Cause.REQUEST
    if isinstance(error, KvscoutError) and error.cause in _NAMED:
        return Cause(error.cause)
    return next((_BY_ERROR[base] for base in type(error).__mro__ if base in _BY_ERROR), Cause.INTERNAL)
