"""The last requests and the slowest ones: their steps, and that there is a bounded number of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvscout_common.hashing import block_hashes_packed
from kvscout_common.http.dialect import Usage
from kvscout_common.worker import WorkerRank
from kvscout_gateway.request.attempt import Attempt
from kvscout_gateway.request.recent import LAST, MAX_BLOCKS, PROMPTS, SLOW_SECONDS, SLOWEST, RecentRequests
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.prompt import Geometry, Prompt
from kvscout_gateway.values.request import Request, TokenBody


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def request(request_id: str = "r") -> Request:
    return Request(model="m", tenant="default", prompt=Prompt(64), body=TokenBody({}), request_id=request_id)


def attempt(*, opened_at: float = 100.3, ttft: float = 0.5, freed_at: float = 0.0, tokens: int = 64) -> Attempt:
    """What an attempt has when it is over: looked up for 0.1 s, placed for 0.2 s."""
    blocks = block_hashes_packed(range(tokens), 16)
    decision = Decision("default", "m", WorkerRank("w", 1), Geometry(16, False), blocks)
    decision.seconds, decision.select_seconds = 0.3, 0.2
    made: dict[str, Any] = {
        "request": SimpleNamespace(prompt=SimpleNamespace(isl_tokens=tokens)), "decision": decision,
        "usage": Usage(prompt_tokens=tokens, cached_tokens=32), "output_tokens": 5, "ttft_seconds": ttft,
        "opened_at": opened_at, "freed_at": freed_at,
    }  # fmt: skip
    return cast(Attempt, SimpleNamespace(**made))


def test_the_steps_of_a_request_follow_one_another() -> None:
    clock = Clock()
    recent = RecentRequests(clock, lambda: 1_000.0)
    clock.now = 102.0
    recent.over(request(), [attempt(freed_at=101.5)], "ok", 100.0)
    [one] = recent.last
    assert (one.at, one.request_id, one.outcome, one.seconds, one.ttft_seconds) == (998.0, "r", "ok", 2.0, 0.5)
    [step] = one.attempts
    ends = step.begin, step.looked_up, step.placed, step.first_output, step.end
    assert ends == pytest.approx((0.0, 0.1, 0.3, 0.5, 1.5))
    assert (step.worker, step.prompt_tokens, step.cached_tokens, step.output_tokens) == (WorkerRank("w", 1), 64, 32, 5)


def test_one_that_was_never_placed_has_no_steps() -> None:
    recent = RecentRequests(Clock(), lambda: 1_000.0)
    recent.over(request(), [], "Unavailable", 99.0)
    assert recent.last[0].attempts == ()
    assert recent.slowest()[0].outcome == "Unavailable"
    assert not recent.prompts


def test_the_slowest_outlive_the_last_and_go_after_two_periods() -> None:
    clock = Clock()
    recent = RecentRequests(clock, lambda: 1_000.0)
    recent.over(request("slow"), [attempt(ttft=9.0)], "ok", 100.0)
    for index in range(LAST + SLOWEST + PROMPTS):
        recent.over(request(f"r{index}"), [attempt(ttft=index / 1_000)], "ok", 100.0)
    assert (len(recent.last), len(recent.prompts), len(recent.slowest())) == (LAST, PROMPTS, SLOWEST)
    assert "slow" not in {one.request_id for one in recent.last}
    assert recent.slowest()[0].request_id == "slow"
    assert [one.ttft_seconds for one in recent.slowest()] == sorted(
        (one.ttft_seconds for one in recent.slowest()), reverse=True
    )
    clock.now += SLOW_SECONDS
    recent.over(request("later"), [attempt()], "ok", clock.now)
    assert [one.request_id for one in recent.slowest()][:2] == ["slow", "later"]
    clock.now += SLOW_SECONDS
    assert [one.request_id for one in recent.slowest()] == ["later"]
    clock.now += 2 * SLOW_SECONDS
    assert recent.slowest() == []


def test_of_a_long_prompt_the_first_blocks_are_kept() -> None:
    recent = RecentRequests(Clock(), lambda: 1_000.0)
    recent.over(request(), [attempt(tokens=16 * (MAX_BLOCKS + 9))], "ok", 100.0)
    assert len(recent.prompts[0].block_hashes) == 8 * MAX_BLOCKS
