"""Policies of other packages that fail: the default policy decides in their place, and everybody else goes on."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.processes import DEADLINE_SECONDS
from support.scheduler_builders import ManualClock, key, loads, request, reserve, worker
from support.scheduler_invariants import check_scheduler

from kvscout_common.errors import InternalError, KvscoutError, ResourceExhausted
from kvscout_scheduler.policies import PolicyRegistry
from kvscout_scheduler.policies.builtin import Kv, LeastLoaded
from kvscout_scheduler.policies.decision_feed import DecisionWatcher
from kvscout_scheduler.policies.kv_time import KvTime
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.request import ConfigOverride
from kvscout_scheduler.values.reservation import FreeOutcome
from kvscout_scheduler.values.settings import SchedulerSettings


def failing(method: str, act: Callable[[], Any]) -> type[LeastLoaded]:
    """A policy one of whose methods does something else."""
    return type("Failing", (LeastLoaded,), {method: lambda self, *arguments: act()})


def crash() -> Any:
    raise RuntimeError("out of ideas")


FAILURES = {
    "costs raises": ("costs", crash),
    "costs are too few": ("costs", lambda: [1.0]),
    "costs are no numbers": ("costs", lambda: ["cheap", "dear"]),
    "a cost is NaN": ("costs", lambda: [1.0, math.nan]),
    "costs are nothing": ("costs", lambda: None),
    "pick raises": ("pick", crash),
    "pick leaves the list": ("pick", lambda: 2),
    "pick is negative": ("pick", lambda: -1),
    "pick is nothing": ("pick", lambda: None),
    "probabilities raise": ("probabilities", crash),
    "probabilities are too many": ("probabilities", lambda: [0.5, 0.5, 0.5]),
    "reason raises": ("reason", crash),
    "reason is not text": ("reason", lambda: 7),
}


def with_policy(method: str, act: Callable[[], Any], clock: ManualClock | None = None, **settings: Any) -> Scheduler:
    policies = PolicyRegistry({"kv": Kv, "kv-time": KvTime, "failing": failing(method, act)})
    made = Scheduler(
        SchedulerSettings(**{"policy": "kv", **settings}),
        clock=clock or ManualClock(),
        rng=Random(1),
        policies=policies,
    )
    for name in ("a", "b"):
        made.workers.worker_added(worker(name, max_num_batched_tokens=1000))
    return made


FAILING = ConfigOverride(policy="failing")


@pytest.mark.parametrize("failure", FAILURES)
def test_where_a_policy_fails_the_default_policy_decides_books_and_explains(failure: str) -> None:
    made = with_policy(*FAILURES[failure])
    decision = made.select_and_reserve(request(isl=16, request_id="r", override=FAILING, explain=True))
    assert decision.policy == "kv-time"
    assert decision.policy_problem.startswith("policy 'failing': ")
    assert decision.explanation is not None
    assert decision.explanation.policy == "kv-time"
    assert sum(requests for _, _, requests in loads(made).values()) == 1
    assert made.policies.failures.counts.total == {"failing": 1}
    made.select_and_reserve(request(isl=16, request_id="other"))
    check_scheduler(made)


def test_a_failure_is_told_in_one_line_with_the_place_in_the_policy() -> None:
    made = with_policy("costs", crash)
    decision = made.select(request(isl=16, override=FAILING))
    line = crash.__code__.co_firstlineno + 1
    assert decision.policy_problem == f"policy 'failing': RuntimeError: out of ideas (test_policy_failures.py:{line})"
    assert made.policies.failures.last == {"failing": decision.policy_problem.removeprefix("policy 'failing': ")}


def test_whatever_a_policy_raises_is_a_bounded_line_of_text() -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise SystemError("no text")

    def long() -> Any:
        raise ValueError("line\n" * 10_000 + "\x1b[2J")

    def hostile() -> Any:
        raise Hostile

    for act, says in ((long, "ValueError: line"), (hostile, "Hostile")):
        problem = with_policy("costs", act).select(request(isl=16, override=FAILING)).policy_problem
        assert problem.startswith(f"policy 'failing': {says}")
        assert problem.isprintable()
        assert len(problem) < 600


def test_a_policy_that_cannot_be_made_for_a_pool_gives_way_to_the_default_one() -> None:
    policies = PolicyRegistry({"kv": Kv, "kv-time": KvTime, "failing": crash})
    made = Scheduler(SchedulerSettings(policy="kv"), clock=ManualClock(), rng=Random(1), policies=policies)
    made.workers.worker_added(worker("a"))
    decision = made.select(request(isl=16, override=FAILING))
    assert (decision.rank.worker_id, decision.policy) == ("a", "kv-time")
    assert "RuntimeError: out of ideas" in decision.policy_problem


def test_a_default_policy_that_fails_is_an_internal_error() -> None:
    policies = PolicyRegistry({"kv-time": failing("costs", crash), "failing": failing("costs", crash)})
    made = Scheduler(SchedulerSettings(), clock=ManualClock(), rng=Random(1), policies=policies)
    made.workers.worker_added(worker("a"))
    for override in (FAILING, ConfigOverride()):
        with pytest.raises(InternalError, match="policy 'kv-time': RuntimeError: out of ideas"):
            made.select_and_reserve(request(isl=16, request_id="r", override=override))
    assert loads(made) == {"a": (0, 0, 0)}
    assert made.stats.refusals["PolicyFailed"] == 2


def test_an_error_that_a_policy_means_for_the_caller_is_the_answer() -> None:
    def refuse() -> Any:
        raise ResourceExhausted("not today")

    made = with_policy("costs", refuse)
    with pytest.raises(ResourceExhausted, match="not today"):
        made.select(request(isl=16, override=FAILING))
    assert not made.policies.failures.last


def test_failures_are_logged_with_their_traceback_and_not_each_time(caplog: pytest.LogCaptureFixture) -> None:
    # Under a name that no other test has logged a moment ago.
    policies = PolicyRegistry({"kv-time": KvTime, "noisy": failing("costs", crash)})
    made = Scheduler(SchedulerSettings(policy="noisy"), clock=ManualClock(), rng=Random(1), policies=policies)
    made.workers.worker_added(worker("a"))
    with caplog.at_level(logging.WARNING, "kvscout.scheduler"):
        for _ in range(100):
            made.select(request(isl=16))
    (record,) = caplog.records
    assert "policy noisy failed: RuntimeError: out of ideas" in record.getMessage()
    assert record.exc_info is not None
    assert "out of ideas" in str(record.exc_info[1])
    assert made.policies.failures.counts.total["noisy"] == 100


def test_a_waiter_whose_policy_fails_is_placed_by_the_default_one_and_nobody_else_notices() -> None:
    made = with_policy("pick", crash, queue_threshold=0.5)
    for name in ("a", "b"):
        reserve(made, f"on-{name}", name, isl=501)
    told: dict[str, list[Decision | KvscoutError]] = {"first": [], "second": []}
    made.reserve_or_wait(request(isl=16, request_id="first", override=FAILING), told["first"].append)
    made.reserve_or_wait(request(isl=16, request_id="second"), told["second"].append)
    assert made.free(key("on-a")) is FreeOutcome.FREED
    for name in ("first", "second"):
        (decision,) = told[name]
        assert isinstance(decision, Decision)
        assert bool(decision.policy_problem) is (name == "first")
    assert not len(made.waiting)
    check_scheduler(made)


def test_a_policy_that_fails_while_leases_end_does_not_end_the_process() -> None:
    clock = ManualClock()
    made = with_policy("costs", crash, clock, queue_threshold=0.5, lease_seconds=5.0)
    for name in ("a", "b"):
        reserve(made, f"on-{name}", name, isl=501)
    told: list[Decision | KvscoutError] = []
    made.reserve_or_wait(request(isl=16, request_id="r", override=FAILING), told.append)
    clock.advance(6.0)
    assert made.expire() == 2
    assert isinstance(told[0], Decision)
    assert told[0].policy_problem


def test_a_policy_that_cannot_explain_fails_nobody_who_did_not_ask() -> None:
    made = with_policy("reason", crash, policy="failing")
    watcher = DecisionWatcher("*", "", True, lambda: None)
    made.decision_feed.add(watcher)
    assert made.select(request(isl=16)).rank.worker_id in "ab"
    _, (record,) = watcher.take()
    assert record.decision is not None
    assert record.decision.explanation is None


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("no_such_module:Policy", "no_such_module"),
        ("broken_policy:Missing", "Missing"),
        ("broken_policy:Unmakeable", "not today"),
        ("broken_policy:Incomplete", "probabilities, reason"),
    ],
)
async def test_a_policy_of_a_package_that_cannot_be_loaded_ends_the_start_with_2(
    tmp_path: Path, target: str, says: str
) -> None:
    (tmp_path / "broken_policy.py").write_text(
        "class Unmakeable:\n"
        "    def __init__(self):\n"
        "        raise OSError('not today')\n\n"
        "class Incomplete:\n"
        "    def costs(self, candidates):\n"
        "        return []\n\n"
        "    def pick(self, candidates, costs, rng):\n"
        "        return 0\n"
    )
    package = tmp_path / "broken_policy-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-policy\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[kvscout.policies]\nbroken = {target}\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c",
        f"import sys; sys.path.append({str(tmp_path)!r}); from kvscout_scheduler.main import main; main()",
        "--port", "0", "--metrics-port", "-1",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_SECONDS):
        _, log = await process.communicate()
    assert process.returncode == 2
    assert "broken: " in log.decode()
    assert says in log.decode()
