"""What an error on a Lifecycle stream becomes at the gateway: that of a call of its own."""

from __future__ import annotations

import grpc
import pytest

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import Draining, KvscoutError, NotFound, ResourceExhausted, Unavailable
from kvscout_gateway.upstreams.scheduler.link import RETRY_SECONDS, error_of


@pytest.mark.parametrize(
    ("code", "told", "kind", "expected"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 4.5, ResourceExhausted, 4.5),
        (grpc.StatusCode.UNAVAILABLE, 0.0, Unavailable, 0.0),
        (grpc.StatusCode.UNAVAILABLE, None, Unavailable, RETRY_SECONDS),
        (grpc.StatusCode.NOT_FOUND, None, NotFound, None),
    ],
)
def test_an_error_has_its_kind_and_says_when_to_try_again(
    code: grpc.StatusCode, told: float | None, kind: type[KvscoutError], expected: float | None
) -> None:
    result = scheduler_pb2.LifecycleResult(code=code.value[0], message="no", retry_after_seconds=told)
    error = error_of(result)
    assert (type(error), error.message, error.retry_after_seconds) == (kind, "no", expected)
    assert error.answered


def test_a_scheduler_that_drains_is_told_apart_from_one_without_workers() -> None:
    result = scheduler_pb2.LifecycleResult(code=grpc.StatusCode.UNAVAILABLE.value[0], message="draining")
    assert isinstance(error_of(result, draining=True), Draining)
