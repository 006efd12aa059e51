"""Plans: a replay of a recorded run is that run, and what it says of another set-up is what that does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from support.recorded_runs import conversations, recorded_run
from support.seeds import test_seed

from kvscout_common.errors import ConfigError
from kvscout_lab.cells.cells import Contender
from kvscout_lab.cells.lab_policies import lab_policies
from kvscout_lab.cells.plan import Change, Outcome, Planner, cheapest
from kvscout_lab.cells.plots import plot_plan
from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.timing import StepTime
from kvscout_lab.simulation.worker import EngineSettings

STEP = StepTime(base_ms=8.0, prefill_us_per_token=50.0, decode_us_per_request=100.0, context_ns_per_token=0.0)
ENGINE = EngineSettings(block_size=16, kv_tokens=32_768, max_num_batched_tokens=2_048, step=STEP)
CLUSTER = Cluster(workers=3, engine=ENGINE)


def contender(text: str) -> Contender:
    return Contender.parse(text, lab_policies())


def test_what_a_plan_says_of_a_change_is_what_the_change_does() -> None:
    seed = test_seed()
    traffic = conversations(Random(seed), 400, 16)
    planner = Planner(recorded_run(Random(seed), CLUSTER, workload=traffic, blocks_per_hash=4))
    assert (planner.cluster.workers, planner.cluster.engine.kv_tokens) == (3, 32_768)
    today = contender("kv-time")
    half = replace(CLUSTER, engine=replace(ENGINE, kv_tokens=16_384))
    for predicted, cluster, policy in (
        (Change("today", planner.cluster, today), CLUSTER, "kv-time"),
        *zip(
            planner.changes(
                today,
                contenders=[contender("round-robin")],
                workers=[3, 5],
                kv_factors=[0.5],
                prefill_workers=[],
            ),
            (CLUSTER, replace(CLUSTER, workers=5), half),
            ("round-robin", "kv-time", "kv-time"),
            strict=True,
        ),
    ):
        said = planner.run(predicted.cluster, predicted.contender)
        did = Planner(recorded_run(Random(seed), cluster, workload=traffic, policy=policy)).recorded()
        assert said.hit_rate == pytest.approx(did.hit_rate, abs=0.03), predicted.label
        assert said.ttft_mean == pytest.approx(did.ttft_mean, rel=0.15), predicted.label


def test_pools_of_a_recording_and_splits_of_a_plan() -> None:
    recording = recorded_run(Random(1), CLUSTER, flows=20)
    prefill = replace(recording.workers[0], role="prefill", dp_size=2)
    paired = Planner(replace(recording, workers=(prefill, *recording.workers[1:])))
    assert (paired.cluster.prefill_workers, paired.cluster.workers) == (2, 2)
    [split] = paired.changes(contender("kv-time"), contenders=[], workers=[], kv_factors=[], prefill_workers=[1])
    assert (split.cluster.prefill_workers, split.cluster.workers, split.label) == (1, 3, "1 prefill + 3 decode workers")
    with pytest.raises(ConfigError, match="there are 4 workers in all"):
        paired.changes(contender("kv-time"), contenders=[], workers=[], kv_factors=[], prefill_workers=[4])


def test_a_recording_that_does_not_say_the_size_of_the_caches_needs_it() -> None:
    recording = recorded_run(Random(1), CLUSTER, flows=20)
    unsized = replace(recording, workers=tuple(replace(one, total_kv_blocks=0) for one in recording.workers))
    with pytest.raises(ConfigError, match="registered without total_kv_blocks"):
        Planner(unsized)
    assert Planner(unsized, kv_tokens=4_096).cluster.engine.kv_tokens == 4_096


def outcome(within: float) -> Outcome:
    return Outcome(0.5, 0.1, 0.1, 0.2, 0.3, within)


def test_the_cheapest_set_up_has_the_fewest_workers_of_those_that_keep_the_target() -> None:
    sizes = {2: 0.8, 4: 0.97, 8: 1.0}
    outcomes = [
        (Change(str(count), replace(CLUSTER, workers=count), contender("kv")), outcome(kept))
        for count, kept in sizes.items()
    ]
    found = cheapest(outcomes, 0.95)
    assert found is not None
    assert found.label == "4"
    assert cheapest(outcomes[:1], 0.95) is None


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_a_plan_is_drawn(tmp_path: Path, name: str) -> None:
    today = contender("kv")
    changes = [Change("today", CLUSTER, today), Change("5", replace(CLUSTER, workers=5), today)]
    changes.append(Change("half", replace(CLUSTER, engine=replace(ENGINE, kv_tokens=16_384)), today))
    plot_plan(outcome(1.0), [(change, outcome(1.0)) for change in changes], tmp_path / name)
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(b"\x89PNG") if name.endswith("png") else b"hit rate" in drawn


def test_an_offload_tier_holds_what_tight_caches_evict_and_costs_the_time_to_copy_it_back() -> None:
    seed = test_seed()
    tight = replace(CLUSTER, engine=replace(ENGINE, kv_tokens=8_192))
    planner = Planner(recorded_run(Random(seed), tight, flows=200, blocks_per_hash=4))
    today = contender("kv-time")
    without = planner.run(planner.cluster, today)
    [change] = planner.changes(
        today, contenders=[], workers=[], kv_factors=[], prefill_workers=[], offload_factors=[4.0]
    )
    assert change.label == "offload tier × 4 (32,768 tokens)"
    held = planner.run(change.cluster, today)
    assert held.hit_rate > without.hit_rate + 0.05
    assert held.ttft_mean < without.ttft_mean
    slow = replace(change.cluster, engine=replace(change.cluster.engine, offload_us_per_token=200.0))
    assert planner.run(slow, today).ttft_mean > held.ttft_mean
