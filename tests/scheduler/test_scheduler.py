"""Whole decisions: overlaps against load, atomic bookings, explanations, mixed pools."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from support.scheduler_builders import key, loads, overlaps, request, reserve, scheduler, worker

from kvscout_common.errors import NotFound, Unavailable
from kvscout_common.worker import Role, WorkerRank
from kvscout_scheduler.load.pool import HitCounts
from kvscout_scheduler.rpc.listing import potential_loads
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.overlaps import Overlaps
from kvscout_scheduler.values.request import ConfigOverride, Prompt, pack_hashes
from kvscout_scheduler.values.reservation import PoolId


def loaded_as_in_the_worked_example() -> Scheduler:
    """A prompt of 2 blocks makes (prefill, decode) blocks of (8, 10), (5, 5), (2, 9) on w0, w1, w2."""
    made = scheduler("w0", "w1", "w2")
    reserve(made, "a", "w0", list(range(100, 108)), cached_tokens=32)
    reserve(made, "b", "w1", list(range(200, 203)))
    reserve(made, "c", "w2", list(range(300, 307)), cached_tokens=112)
    return made


def test_s1_the_worked_example_picks_the_second_worker() -> None:
    decision = loaded_as_in_the_worked_example().select(request([1, 2], explain=True))
    assert decision.explanation is not None
    assert [c.cost for c in decision.explanation.candidates] == [18, 10, 11]
    assert (decision.rank.worker_id, decision.cost) == ("w1", 10)


def test_s1_weight_zero_is_pure_decode_load_and_ignores_caches() -> None:
    made = loaded_as_in_the_worked_example()
    weightless = ConfigOverride(overlap_score_weight=0.0)
    decision = made.select(request([1, 2], on=overlaps(w0=2), override=weightless, explain=True))
    assert decision.explanation is not None
    assert [c.cost for c in decision.explanation.candidates] == [10, 5, 9]
    assert (decision.effective_overlap_blocks, decision.uncached_tokens) == (0, 32)


async def test_s6_concurrent_cold_prompts_spread_evenly() -> None:
    made = scheduler(*(f"w{number}" for number in range(8)))

    async def one(number: int) -> str:
        asked = request(list(range(number * 100, number * 100 + 10)), request_id=f"r{number}")
        await asyncio.sleep(0)
        return made.select_and_reserve(asked).rank.worker_id

    chosen = Counter(await asyncio.gather(*(one(number) for number in range(64))))
    assert chosen == {f"w{number}": 8 for number in range(8)}


def test_s7_cold_prompts_in_flight_balance() -> None:
    made = scheduler("w0", "w1")
    for number in range(20):
        made.select_and_reserve(request(list(range(number * 100, number * 100 + 10)), request_id=f"r{number}"))
        if number % 3 == 0:
            made.mark_prefill_complete(key(f"r{number}"))
    assert {name: load[0] for name, load in loads(made).items()} == {"w0": 10, "w1": 10}


def test_s7_a_small_overlap_loses_against_load_and_wins_without() -> None:
    made = scheduler("holder", "idle")
    reserve(made, "other", "holder", [91, 92])
    made.mark_prefill_complete(key("other"))
    asked = request(list(range(10)), on=overlaps(holder=1))
    assert made.select(asked).rank.worker_id == "idle"
    made.free(key("other"))
    assert made.select(asked).rank.worker_id == "holder"


def test_select_books_nothing() -> None:
    made = scheduler("w0")
    for _ in range(3):
        made.select(request([1], request_id="r"))
    assert loads(made)["w0"] == (0, 0, 0)


def test_blocks_shared_with_active_requests_count_once() -> None:
    made = scheduler("w0", "w1")
    reserve(made, "r", "w0", [1, 2, 3], cached_tokens=48)
    found = {
        load.rank.worker_id: load.potential_decode_blocks
        for load in potential_loads(made, key("r").pool, isl_tokens=70, prompt=Prompt(pack_hashes([1, 2, 9, 10])))
    }
    assert found == {"w0": 3 + 5 - 2, "w1": 5}


def test_the_charge_is_what_is_not_cached_on_the_chosen_worker() -> None:
    made = scheduler("w0")
    on = Overlaps(("w0",), (), (2,), (4,), (4,), (6,))
    decision = made.select_and_reserve(request(list(range(10)), isl=170, on=on, request_id="r"))
    assert decision.overlap_blocks == 2
    assert decision.effective_overlap_blocks == 2 + 0.75 * 2 + 0.25 * 2
    assert decision.uncached_tokens == 170 - 64
    assert loads(made)["w0"] == (1, 106, 11)
    (pool,) = made.workers
    assert pool.hits == [HitCounts(170, 64)]


def test_a_decode_leg_is_not_charged_prefill() -> None:
    made = scheduler(worker("d0", role=Role.DECODE))
    decision = made.select_and_reserve(request([1, 2], role=Role.DECODE, request_id="r", charge_prefill=False))
    assert decision.uncached_tokens == 0
    (load,) = potential_loads(made, key("r", Role.DECODE).pool)
    assert (load.active_prefill_tokens, load.active_decode_blocks) == (0, 2)


def test_prefill_pools_and_untracked_ones_hold_no_blocks() -> None:
    for made, role in (
        (scheduler(worker("p0", role=Role.PREFILL)), Role.PREFILL),
        (scheduler("w0", track_active_blocks=False), Role.AGGREGATED),
    ):
        decision = made.select_and_reserve(request([1, 2], role=role, request_id="r"))
        assert decision.cost == 2
        (load,) = potential_loads(made, key("r", role).pool)
        assert (load.active_prefill_tokens, load.active_decode_blocks) == (32, 0)


def test_ranks_of_a_worker_are_loaded_one_by_one() -> None:
    made = scheduler(worker("w0", dp_size=2))
    ranks = {made.select_and_reserve(request([n], request_id=f"r{n}")).rank for n in range(2)}
    assert ranks == {("w0", 0), ("w0", 1)}
    on = Overlaps(("w0", "w0"), (0, 1), (0, 1))
    assert made.select(request([9], on=on)).rank == ("w0", 1)


def test_overlaps_of_unknown_workers_are_ignored() -> None:
    assert scheduler("w0").select(request([1], on=overlaps(gone=1))).overlap_blocks == 0


def test_workers_of_several_block_sizes_are_compared_in_tokens() -> None:
    made = scheduler("small", worker("large", block_size=64))
    prompts: dict[str, Any] = {
        "prompt": Prompt(pack_hashes(range(8)), block_size=16),
        "other_prompts": (Prompt(pack_hashes([71, 72]), block_size=64, eagle=False, overlaps=overlaps(large=1)),),
    }
    decision = made.select_and_reserve(request(isl=128, request_id="r", explain=True, **prompts))
    assert decision.explanation is not None
    assert {c.rank.worker_id: c.cost for c in decision.explanation.candidates} == {"small": 16, "large": 12}
    assert (decision.rank.worker_id, decision.overlap_blocks, decision.uncached_tokens) == ("large", 1, 64)
    assert loads(made)["large"] == (1, 64, 2)
    assert made.select(request(isl=128, by_lineage=False, **prompts)).rank.worker_id == "small"


def test_workers_nobody_hashed_for_count_as_cold() -> None:
    made = scheduler("small", worker("large", block_size=64))
    asked = request(isl=128, prompt=Prompt(pack_hashes(range(8)), block_size=16), explain=True)
    decision = made.select(asked)
    assert decision.explanation is not None
    assert {c.rank.worker_id: c.cost for c in decision.explanation.candidates} == {"small": 16, "large": 16}


def test_an_explanation_shows_each_tier() -> None:
    made = scheduler("w0", "w1")
    on = Overlaps(("w0",), (), (1,), (2,), (3,), (4,))
    decision = made.select(request([1, 2, 3, 4], on=on, explain=True))
    assert decision.explanation is not None
    first, second = decision.explanation.candidates
    assert (first.device_blocks, first.host_blocks, first.disk_blocks, first.external_blocks) == (1, 2, 3, 4)
    assert (second.device_blocks, second.host_blocks, second.disk_blocks, second.external_blocks) == (0, 0, 0, 0)
    assert first.eligible
    assert second.eligible


def test_potential_loads_add_the_prompt_to_each_worker() -> None:
    made = scheduler(worker("w0", total_kv_blocks=50), "w1")
    reserve(made, "r", "w0", [1, 2])
    made.cool_downs.report("default", WorkerRank("w1", 0), 3.0)
    prompt = Prompt(pack_hashes([1, 2, 3]), overlaps=overlaps(w1=2))
    first, second = potential_loads(made, key("r").pool, isl_tokens=48, prompt=prompt)
    assert (first.potential_prefill_tokens, first.potential_decode_blocks, first.total_kv_blocks) == (80, 3, 50)
    assert (second.potential_prefill_tokens, second.potential_decode_blocks) == (16, 3)
    assert (first.cooldown_seconds, second.cooldown_seconds) == (0.0, 3.0)


def test_loads_of_a_model_without_workers_are_empty_and_of_an_unknown_one_not_found() -> None:
    made = scheduler("w0")
    made.workers.worker_removed(worker("w0"), "removed")
    assert potential_loads(made, key("r").pool) == []
    with pytest.raises(NotFound):
        potential_loads(made, PoolId("default", "other", Role.AGGREGATED))


def test_a_draining_scheduler_takes_nothing_new_and_frees_what_it_has() -> None:
    made = scheduler("w0")
    reserve(made, "r", "w0", [1])
    made.drain()
    for call in (
        lambda: made.select(request([1])),
        lambda: made.select_and_reserve(request([1], request_id="s")),
        lambda: reserve(made, "s", "w0", [1]),
    ):
        with pytest.raises(Unavailable, match="draining"):
            call()
    made.free(key("r"))
    assert loads(made)["w0"] == (0, 0, 0)


def test_refusals_are_counted_by_kind() -> None:
    made = scheduler("w0")
    for model in ("x", "y"):
        with pytest.raises(NotFound):
            made.select(request([1], model=model))
    assert made.stats.refusals == {"NotFound": 2}
