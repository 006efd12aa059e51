"""Causes of failed requests, and whose fault each is."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from kvscout_common.errors import (
    DeadlineExceeded,
    Draining,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    KvscoutError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from kvscout_common.http.http import HttpRefused, SinkGone
from kvscout_gateway.engines.causes import OWNERS, Cause, Owner, cause_of
from kvscout_gateway.engines.faults import RULES, EngineFailed, Fault

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("error", "cause", "owner"),
    [
        (InvalidArgument("wrong", field="model"), Cause.REQUEST, Owner.CALLER),
        (FailedPrecondition("no worker has the labels"), Cause.REQUEST, Owner.CALLER),
        (NotFound("no such model"), Cause.UNKNOWN, Owner.CALLER),
        (Unauthenticated("no key"), Cause.KEY, Owner.CALLER),
        (PermissionDenied("not yours"), Cause.KEY, Owner.CALLER),
        (ResourceExhausted("tenant 'a' has 3 requests", cause="limit"), Cause.LIMIT, Owner.CALLER),
        (SinkGone("gone"), Cause.GONE, Owner.CALLER),
        (asyncio.CancelledError(), Cause.GONE, Owner.CALLER),
        (DeadlineExceeded("the client has read nothing", cause="gone"), Cause.GONE, Owner.CALLER),
        (HttpRefused(413, "too long"), Cause.REQUEST, Owner.CALLER),
        (HttpRefused(503, "no memory"), Cause.GATEWAY, Owner.ROUTER),
        (ResourceExhausted("all busy"), Cause.BUSY, Owner.ROUTER),
        (ResourceExhausted("9 requests wait", cause="queue"), Cause.QUEUE, Owner.ROUTER),
        (ResourceExhausted("from a later release", cause="moon"), Cause.BUSY, Owner.ROUTER),
        (Unavailable("no worker"), Cause.UNSERVED, Owner.ROUTER),
        (Draining("leaving"), Cause.DRAINING, Owner.ROUTER),
        (DeadlineExceeded("too late"), Cause.DEADLINE, Owner.ROUTER),
        (InternalError("a defect"), Cause.INTERNAL, Owner.ROUTER),
        (ZeroDivisionError(), Cause.INTERNAL, Owner.ROUTER),
    ],
)
def test_an_error_has_one_cause_and_one_owner(error: BaseException, cause: Cause, owner: Owner) -> None:
    assert (cause_of(error), OWNERS[cause_of(error)]) == (cause, owner)


@pytest.mark.parametrize(
    ("fault", "owner"),
    [
        (Fault.REQUEST, Owner.CALLER),
        (Fault.OVERLOAD, Owner.ENGINE),
        (Fault.REFUSED, Owner.ENGINE),
        (Fault.WORKER, Owner.ENGINE),
        (Fault.TIME, Owner.ENGINE),
        (Fault.BALANCER, Owner.ENGINE),
        (Fault.GATEWAY, Owner.ROUTER),
    ],
)
def test_a_failure_of_an_engine_has_the_name_of_its_fault_whatever_error_ends_the_request(
    fault: Fault, owner: Owner
) -> None:
    error: KvscoutError = Unavailable("all workers failed")
    error.__cause__ = EngineFailed("broke", fault=fault)
    assert (cause_of(error).value, OWNERS[cause_of(error)]) == (fault.value, owner)


def test_every_fault_and_every_cause_has_an_owner() -> None:
    assert {fault.value for fault in RULES} <= set(Cause)
    assert OWNERS.keys() == set(Cause)


def test_the_page_of_failure_modes_lists_every_cause_with_its_owner() -> None:
    page = (ROOT / "docs" / "failure-modes.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| (caller|engine|router) \|", page, re.MULTILINE))
    assert listed == {cause.value: owner.value for cause, owner in OWNERS.items()}
