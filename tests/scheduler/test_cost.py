"""The cost formula, with the numbers of its worked example."""

from __future__ import annotations

from kvscout_scheduler import cost
from kvscout_scheduler.active_load import ActiveLoad, Lane
from kvscout_scheduler.overlaps import Overlaps
from kvscout_scheduler.request import pack_hashes


def test_s1_worked_example() -> None:
    prefill, decode = [8 * 16.0, 5 * 16.0, 2 * 16.0], [10, 5, 9]
    assert cost.costs(prefill, decode, block_size=16, overlap_score_weight=1.0) == [18, 10, 11]
    assert cost.costs(prefill, decode, block_size=16, overlap_score_weight=2.0) == [26, 15, 13]


def test_s1_weight_zero_is_pure_decode_load() -> None:
    assert cost.costs([1e9, 0.0], [3, 4], block_size=16, overlap_score_weight=0.0) == [3, 4]


def test_prefill_is_what_is_active_and_what_is_not_cached() -> None:
    load = ActiveLoad()
    load.ensure_slot(2)
    load.add(1, Lane(16, eagle=False), b"", prefill_tokens=40)
    assert cost.prefill_tokens(load, [0, 1, 2], [2, 0, 99], isl_tokens=100, block_size=16) == [68, 140, 0]


def test_decode_counts_blocks_that_are_active_already_once() -> None:
    load = ActiveLoad()
    load.ensure_slot(1)
    lane = Lane(16, eagle=False)
    load.add(0, lane, pack_hashes([1, 2, 3]), private_blocks=1)
    shared = load.shared(lane, pack_hashes([1, 2, 9]))
    assert cost.decode_blocks(load, [0, 1], shared, request_blocks=4) == [6, 4]


def test_slower_tiers_are_worth_less() -> None:
    overlaps = Overlaps(("w",), (), (2,), (4,), (5,), (9,))
    assert overlaps.effective(0.75, 0.25) == [2 + 0.75 * 2 + 0.25 * (1 + 4)]


def test_a_prediction_counts_where_it_reaches_further_than_the_device() -> None:
    overlaps = Overlaps(("a", "b"), (), (2, 3), (4, 4), predicted_blocks=(5, 3))
    assert overlaps.device() == [5, 3]
    assert overlaps.effective(0.75, 0.25) == [5, 3.75]
