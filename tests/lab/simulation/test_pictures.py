"""What gateways believe of caches that they have no events of."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from support.recorded_runs import conversations
from support.seeds import test_seed

from kvscout_common.errors import ConfigError
from kvscout_lab.cells.cells import Experiment
from kvscout_lab.cells.measures import Measures
from kvscout_lab.simulation.cluster import Cluster, Faults, Picture
from kvscout_lab.simulation.pictures import RoutedPrefixes
from kvscout_lab.simulation.worker import EngineSettings
from kvscout_scheduler.values.settings import SchedulerSettings

ENGINE = EngineSettings(block_size=16, kv_tokens=16_384, max_num_batched_tokens=2_048)
CLUSTER = Cluster(workers=4, engine=ENGINE)


def test_an_lru_forgets_last_blocks_first_and_a_tree_forgets_nothing() -> None:
    lru, tree = RoutedPrefixes(2, 4), RoutedPrefixes(2, 0)
    for picture in (lru, tree):
        picture.routed(0, [1, 2, 3])
        picture.routed(1, [1, 2])
        picture.routed(0, [7, 8])
    assert tree.overlaps([1, 2, 3]) == {0: 3, 1: 2}
    assert lru.overlaps([1, 2, 3]) == {0: 2, 1: 2}
    assert lru.overlaps([7, 8, 9]) == {0: 2}
    lru.routed(0, [1, 2])
    lru.routed(0, [9])
    assert lru.overlaps([1, 2]) == {0: 2, 1: 2}, "used again"
    assert lru.overlaps([7, 8]) == {0: 1}
    lru.clear()
    assert lru.overlaps([1]) == {}


def test_an_unbounded_tree_believes_what_an_lru_believes_and_more() -> None:
    draw = Random(test_seed())
    lru, tree = RoutedPrefixes(3, 20), RoutedPrefixes(3, 0)
    for _ in range(300):
        nodes = [10 * draw.randrange(9) + place for place in range(draw.randrange(1, 9))]
        believed, all_of_it = lru.overlaps(nodes), tree.overlaps(nodes)
        assert all(all_of_it[worker] >= depth for worker, depth in believed.items())
        worker = draw.randrange(3)
        lru.routed(worker, nodes)
        tree.routed(worker, nodes)
        assert lru.overlaps(nodes)[worker] == len(nodes)


def run(cluster: Cluster, seed: int) -> Measures:
    workload = conversations(Random(seed), 120, 16)
    return Experiment(workload, cluster).run(SchedulerSettings(policy="kv-time"), workload.flow_rate)


def test_one_gateway_that_routes_all_needs_no_events_where_caches_are_roomy_and_four_do() -> None:
    seed = test_seed()
    roomy = replace(CLUSTER, engine=replace(ENGINE, kv_tokens=400_000))
    exact = run(roomy, seed).hit_rate
    for picture in (Picture.LRU, Picture.TREE):
        alone = run(replace(roomy, picture=picture), seed).hit_rate
        four = run(replace(roomy, picture=picture, gateways=4), seed).hit_rate
        hashed = run(replace(roomy, picture=picture, gateways=4, sessions_hashed=True), seed).hit_rate
        assert alone == pytest.approx(exact, abs=0.03)
        assert four < hashed < exact + 0.03
        assert four < exact - 0.05
    assert run(replace(roomy, gateways=4), seed).hit_rate == pytest.approx(exact, abs=0.03)


def test_a_tree_believes_in_blocks_that_tight_caches_have_evicted() -> None:
    seed = test_seed()
    tight = replace(CLUSTER, engine=replace(ENGINE, kv_tokens=6_144))
    exact, tree = (run(replace(tight, picture=one), seed) for one in (Picture.EXACT, Picture.TREE))
    assert abs(exact.predicted_hit_rate - exact.hit_rate) < 0.02
    assert tree.predicted_hit_rate > tree.hit_rate + 0.05


def test_what_goes_past_the_gateways_is_served_and_known_by_events_alone() -> None:
    seed = test_seed()
    cluster = replace(CLUSTER, bypass=0.5)
    exact, lru = (run(replace(cluster, picture=one), seed) for one in (Picture.EXACT, Picture.LRU))
    assert exact.errors == lru.errors == 0
    assert exact.requests == lru.requests == 360
    assert abs(exact.predicted_hit_rate - run(CLUSTER, seed).predicted_hit_rate) > 0.05, "half is predicted by nobody"


def test_a_gateway_that_begins_anew_has_forgotten_what_it_routed() -> None:
    seed = test_seed()
    restarted = replace(CLUSTER, picture=Picture.TREE, faults=Faults(restart_gateway=0.5))
    measures = run(restarted, seed)
    assert measures.errors == 0
    assert measures.predicted_hit_rate < run(replace(CLUSTER, picture=Picture.TREE), seed).predicted_hit_rate


def test_pictures_of_prefill_pools_are_not_simulated() -> None:
    with pytest.raises(ConfigError, match="picture"):
        replace(CLUSTER, prefill_workers=1, picture=Picture.LRU).validate()
    with pytest.raises(ConfigError, match="bypass"):
        replace(CLUSTER, bypass=1.5).validate()
