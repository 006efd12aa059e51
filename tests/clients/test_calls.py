"""What a client tries again: calls that nobody answered, if making them twice is the same as making them once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvscout_client import calls
from kvscout_client.calls import Calls
from kvscout_common.errors import DeadlineExceeded, KvscoutError, NotFound, Unavailable
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.transport.statuses import ANSWERED_TRAILER

CODE = grpc.StatusCode


def failed(code: grpc.StatusCode, said: str = "") -> grpc.aio.AioRpcError:
    """An rpc's end; `said` is what a service raised, "" where the connection failed."""
    trailers = grpc.aio.Metadata(*([(ANSWERED_TRAILER, said)] if said else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, "why")


def scripted(*outcomes: Any) -> tuple[Callable[..., Any], list[float | None]]:
    """A stub's method that ends so, one call after the other, and the deadlines that it was given."""
    left, seen = list(outcomes), []

    async def method(request: object, timeout: float | None) -> object:
        seen.append(timeout)
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return method, seen


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PAUSE_SECONDS", 0.001)


def caller(**settings: Any) -> Calls:
    return Calls("127.0.0.1:1", ClientSecurity(), **{"timeout_seconds": 5.0, **settings})


async def test_what_nobody_answered_is_asked_again_within_one_deadline() -> None:
    method, seen = scripted(failed(CODE.UNAVAILABLE), failed(CODE.UNAVAILABLE, "Draining"), "answer")
    assert await caller().unary(method, "request", repeatable=True) == "answer"
    first, second, third = (seconds or 0.0 for seconds in seen)
    assert 5.0 >= first > second > third > 0.0


@pytest.mark.parametrize(
    ("outcome", "raised", "repeatable"),
    [
        (failed(CODE.UNAVAILABLE), Unavailable, False),
        (failed(CODE.UNAVAILABLE, "Unavailable"), Unavailable, True),
        (failed(CODE.NOT_FOUND, "NotFound"), NotFound, True),
        (failed(CODE.DEADLINE_EXCEEDED), DeadlineExceeded, True),
    ],
)
async def test_everything_else_is_told_at_once(
    outcome: Exception, raised: type[KvscoutError], repeatable: bool
) -> None:
    method, seen = scripted(outcome)
    with pytest.raises(raised):
        await caller().unary(method, "request", repeatable=repeatable)
    assert len(seen) == 1


async def test_tries_end_with_their_number_and_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    method, seen = scripted(*[failed(CODE.UNAVAILABLE)] * 5)
    with pytest.raises(Unavailable):
        await caller(retries=3).unary(method, "request", repeatable=True)
    assert len(seen) == 4
    monkeypatch.setattr(calls, "PAUSE_SECONDS", 60.0)
    method, seen = scripted(*[failed(CODE.UNAVAILABLE)] * 5)
    with pytest.raises(Unavailable):
        await caller(timeout_seconds=0.5).unary(method, "request", repeatable=True)
    assert len(seen) == 1
