"""Rates between two moments."""

from __future__ import annotations

import pytest

from kvscout.v1 import gateway_pb2, types_pb2
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.snapshot import Service, ServiceKind, Snapshot


def moment(at: float, **ranks: tuple[int, int]) -> Moment:
    """Prompt and cached tokens of each worker at that time."""
    status = gateway_pb2.GatewayGetStatusResponse(
        workers=[
            gateway_pb2.WorkerObservation(
                tenant="t",
                worker=types_pb2.WorkerRank(worker_id=name),
                prompt_tokens=prompt,
                cached_tokens=cached,
            )
            for name, (prompt, cached) in ranks.items()
        ]
    )
    return Moment(at, Snapshot((Service("g:1", ServiceKind.GATEWAY, serving=True, status=status),)), {})


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"a": (100, 50)}, {"a": (300, 150)}, 0.5),
        # One that is gone takes nothing away from what the others had since.
        ({"a": (100, 50), "b": (900, 0)}, {"a": (1100, 1000)}, 0.95),
        ({"a": (100, 50)}, {"a": (100, 50), "b": (40, 10)}, 0.25),
        # A gateway was started anew.
        ({"a": (1000, 900)}, {"a": (100, 10)}, None),
        ({"a": (100, 50)}, {"a": (100, 50)}, None),
    ],
)
def test_the_hit_rate_of_a_while_is_that_of_the_ranks_that_are_there(
    before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]], expected: float | None
) -> None:
    assert moment(10.0, **now).hit_rate(moment(0.0, **before)) == expected


def test_prompt_tokens_of_requests_that_run_are_not_compared_with_cached_ones() -> None:
    def reported(at: float, dispatched: int, prompt: int, cached: int) -> Moment:
        made = moment(at, a=(dispatched, cached))
        [service] = made.snapshot.services
        assert isinstance(service.status, gateway_pb2.GatewayGetStatusResponse)
        service.status.workers[0].reported_prompt_tokens = prompt
        return made

    assert reported(1.0, 1100, 1000, 800).hit_rate(reported(0.0, 1000, 0, 0)) == 0.8


def test_without_an_earlier_moment_it_is_that_since_the_start() -> None:
    assert moment(10.0, a=(100, 50), b=(100, 0)).hit_rate(None) == 0.25
