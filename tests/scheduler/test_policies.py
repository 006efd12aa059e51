"""Each policy by its worked example, and the registry."""

from __future__ import annotations

import math
from collections import Counter
from importlib.metadata import EntryPoint
from random import Random
from typing import Any

import pytest
from support.scheduler_builders import ManualClock, overlaps, request, reserve, scheduler, worker

from kvscout_common.errors import ConfigError, InvalidArgument
from kvscout_scheduler.policies import PolicyRegistry, installed_policies
from kvscout_scheduler.policies.builtin import Kv
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.request import ConfigOverride
from kvscout_scheduler.values.settings import SchedulerSettings


def chosen(made: Scheduler, draws: int, **fields: Any) -> list[str]:
    return [made.select(request([1], **fields)).rank.worker_id for _ in range(draws)]


def test_kv_worked_example() -> None:
    made = scheduler("w0", "w1", "w2")
    reserve(made, "other", "w1", list(range(100, 130)), cached_tokens=480)
    decision = made.select(request(list(range(10)), on=overlaps(w0=2, w1=5), explain=True))
    assert decision.explanation is not None
    rows = [(c.prefill_blocks, c.decode_blocks, c.cost) for c in decision.explanation.candidates]
    assert rows == [(8, 10, 18), (5, 40, 45), (10, 10, 20)]
    assert (decision.rank.worker_id, decision.cost, decision.overlap_blocks) == ("w0", 18, 2)
    assert decision.uncached_tokens == 128
    assert decision.explanation.reason == "least cost: 8 prefill and 10 decode blocks, cost 18"


def test_kv_draws_by_temperature_and_tells_the_probabilities() -> None:
    made = scheduler("w0", "w1")
    hot = ConfigOverride(router_temperature=1.0)
    decision = made.select(request([1, 2], on=overlaps(w0=2), override=hot, explain=True))
    assert decision.explanation is not None
    probabilities = [c.probability for c in decision.explanation.candidates]
    assert probabilities == pytest.approx([1 / (1 + math.exp(-1)), math.exp(-1) / (1 + math.exp(-1))])
    assert "drawn at temperature 1" in decision.explanation.reason
    assert set(chosen(made, 60, override=hot, on=overlaps(w0=1))) == {"w0", "w1"}


def test_least_loaded_takes_the_fewest_active_requests_and_draws_ties() -> None:
    made = scheduler("w0", "w1", "w2", policy="least-loaded")
    for number in range(3):
        reserve(made, f"a{number}", "w0", isl=1)
    reserve(made, "b", "w1", isl=5000)
    reserve(made, "c", "w2", isl=1)
    counts = Counter(chosen(made, 4000, on=overlaps(w0=1)))
    assert set(counts) == {"w1", "w2"}
    assert abs(counts["w1"] - 2000) < 5 * math.sqrt(1000)


def test_random_is_uniform_whatever_the_load() -> None:
    made = scheduler("w0", "w1", "w2", policy="random")
    reserve(made, "r", "w0", isl=100_000)
    counts = Counter(chosen(made, 9000))
    assert all(abs(counts[name] - 3000) < 5 * math.sqrt(2000) for name in ("w0", "w1", "w2"))


def test_round_robin_cycles_in_the_order_of_ranks() -> None:
    made = scheduler("c", worker("a", dp_size=2), "b", policy="round-robin")
    ranks = [made.select(request([1])).rank for _ in range(5)]
    assert ranks == [("a", 0), ("a", 1), ("b", 0), ("c", 0), ("a", 0)]


def test_round_robin_skips_who_is_not_eligible_and_keeps_the_others_turns() -> None:
    made = scheduler("a", "b", "c", policy="round-robin")
    without_b = frozenset({"b"})
    assert chosen(made, 3, excluded_worker_ids=without_b) == ["a", "c", "a"]
    assert chosen(made, 2) == ["b", "c"]
    made.workers.worker_removed(worker("a"), "removed")
    made.workers.worker_added(worker("d"))
    assert chosen(made, 3) == ["d", "b", "c"]


def test_round_robin_queries_do_not_use_up_the_turns_of_bookings() -> None:
    made = scheduler("a", "b", policy="round-robin")
    booked = []
    for number in range(4):
        made.select(request([1]))
        booked.append(made.select_and_reserve(request([1], request_id=f"r{number}")).rank.worker_id)
    assert booked == ["a", "b", "a", "b"]


def test_round_robin_has_a_turn_of_its_own_in_each_pool() -> None:
    made = scheduler("a", "b", worker("x", model="n"), worker("y", model="n"), policy="round-robin")
    assert chosen(made, 1) == ["a"]
    assert chosen(made, 1, model="n") == ["x"]
    assert chosen(made, 1) == ["b"]


def test_a_request_may_name_its_policy() -> None:
    made = scheduler("a", "b")
    turn = ConfigOverride(policy="round-robin")
    assert chosen(made, 4, on=overlaps(a=1), override=turn) == ["a", "b", "a", "b"]
    assert set(chosen(made, 4, on=overlaps(a=1))) == {"a"}
    assert made.stats.decisions == {"round-robin": 4, "kv": 4}


def test_s2_a_request_with_a_seed_is_repeatable() -> None:
    made = scheduler(*(f"w{n}" for n in range(16)))
    seeded = {chosen(made, 1, override=ConfigOverride(seed=5))[0] for _ in range(20)}
    assert len(seeded) == 1
    assert len(set(chosen(made, 200))) == 16


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"policy: unknown policy 'best', known are .*kv.*round-robin"):
        chosen(scheduler("a"), 1, override=ConfigOverride(policy="best"))
    with pytest.raises(InvalidArgument, match=r"unknown policy 'kv-tiem'; did you mean 'kv-time'\? Known are .*kv"):
        chosen(scheduler("a"), 1, override=ConfigOverride(policy="kv-tiem"))


def test_other_packages_add_policies_through_entry_points() -> None:
    entry = EntryPoint("last-rank", "support.scheduler_policy_plugin:LastRank", "kvscout.policies")
    registry = PolicyRegistry({"kv": Kv}, [entry])
    assert registry.names == ("kv", "last-rank")
    made = Scheduler(SchedulerSettings(policy="kv"), clock=ManualClock(), rng=Random(1), policies=registry)
    for name in ("a", "b"):
        made.workers.worker_added(worker(name))
    decision = made.select(request([1], override=ConfigOverride(policy="last-rank"), explain=True))
    assert decision.rank.worker_id == "b"
    assert decision.explanation is not None
    assert decision.explanation.reason == "the last"


def test_a_package_cannot_take_the_name_of_a_policy() -> None:
    with pytest.raises(ConfigError, match="kv"):
        PolicyRegistry({"kv": Kv}, [EntryPoint("kv", "somewhere:Kv", "kvscout.policies")])


def test_installed_policies_are_all_there() -> None:
    assert {"kv", "least-loaded", "random", "round-robin"} <= set(installed_policies().names)
