"""Busy thresholds, exact at the edge and changed at run time."""

from __future__ import annotations

import math

import pytest
from support.scheduler_builders import key, request, reserve, scheduler, worker

from kvscout_common.errors import InvalidArgument, ResourceExhausted
from kvscout_common.worker import WorkerRank
from kvscout_scheduler.estimates.engine_metrics import EngineMetrics
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.thresholds import DECODE_BLOCKS, NO_LIMIT, PREFILL_TOKENS, BusyThresholds, ThresholdTable

RANK = WorkerRank("w0", 0)


def is_busy(made: Scheduler) -> bool:
    try:
        made.select(request([1]))
    except ResourceExhausted:
        return True
    return False


def with_blocks(blocks: int) -> Scheduler:
    made = scheduler(worker("w0", total_kv_blocks=100))
    reserve(made, "r", "w0", list(range(blocks)))
    made.mark_prefill_complete(key("r"))
    return made


@pytest.mark.parametrize(("blocks", "expected"), [(85, False), (86, True)])
def test_s10_085_of_100_blocks_is_85_not_busy_86_busy(blocks: int, expected: bool) -> None:
    made = with_blocks(blocks)
    made.thresholds.change("default", "m", active_decode_blocks_threshold=0.85)
    assert is_busy(made) is expected


@pytest.mark.parametrize("blocks", range(1, 100))
def test_a_fraction_of_n_hundredths_allows_exactly_n_of_100_blocks(blocks: int) -> None:
    assert BusyThresholds(blocks / 100).limits(total_kv_blocks=100, kv_cache_usage=None) == (NO_LIMIT, blocks)


def test_s10_a_change_takes_effect_on_the_next_selection() -> None:
    made = with_blocks(50)
    assert not is_busy(made)
    made.thresholds.change("default", "m", active_decode_blocks_threshold=0.4)
    assert is_busy(made)
    made.thresholds.change("default", "m", active_decode_blocks_threshold=None)
    assert not is_busy(made)


def test_s10_prefill_tokens_over_the_threshold_are_busy_until_the_first_token() -> None:
    made = scheduler("w0", thresholds=BusyThresholds(active_prefill_tokens_threshold=100))
    reserve(made, "r", "w0", isl=100)
    assert not is_busy(made)
    reserve(made, "s", "w0", isl=1)
    assert is_busy(made)
    made.mark_prefill_complete(key("s"))
    assert not is_busy(made)


@pytest.mark.parametrize(("usage", "expected"), [(0.85, False), (0.86, True), (None, False)])
def test_reported_usage_counts_where_it_is_higher(usage: float | None, expected: bool) -> None:
    made = with_blocks(10)
    made.thresholds.change("default", "m", active_decode_blocks_threshold=0.85)
    made.report_metrics("default", RANK, EngineMetrics(kv_cache_usage=usage))
    assert is_busy(made) is expected


def test_booked_usage_counts_where_it_is_higher() -> None:
    made = with_blocks(86)
    made.thresholds.change("default", "m", active_decode_blocks_threshold=0.85)
    made.report_metrics("default", RANK, EngineMetrics(kv_cache_usage=0.1))
    assert is_busy(made)


def test_without_a_known_cache_size_only_reported_usage_is_judged() -> None:
    made = scheduler("w0", thresholds=BusyThresholds(0.5))
    reserve(made, "r", "w0", list(range(1000)))
    assert not is_busy(made)
    made.report_metrics("default", RANK, EngineMetrics(kv_cache_usage=0.51))
    assert is_busy(made)


def test_what_a_change_does_not_name_stays_as_it_is_in_effect() -> None:
    made = scheduler("w0", thresholds=BusyThresholds(0.9, 1000))
    assert made.thresholds.change("default", "m", active_prefill_tokens_threshold=7) == BusyThresholds(0.9, 7)
    assert made.thresholds.get("default", "other") == BusyThresholds(0.9, 1000)


def test_models_with_any_threshold_are_listed_in_order() -> None:
    made = scheduler("w0")
    made.thresholds.change("default", "z", active_prefill_tokens_threshold=0)
    made.thresholds.change("default", "a", active_decode_blocks_threshold=1.0)
    made.thresholds.change("default", "off", active_decode_blocks_threshold=None)
    made.thresholds.change("other", "b", active_decode_blocks_threshold=1.0)
    assert list(made.thresholds.of_tenant("default", made.workers.models("default"))) == ["a", "z"]
    assert list(ThresholdTable(BusyThresholds(0.5)).of_tenant("default", ["m"])) == ["m"]


@pytest.mark.parametrize(
    ("name", "value"),
    [(DECODE_BLOCKS, 0.0), (DECODE_BLOCKS, 1.01), (DECODE_BLOCKS, math.nan), (PREFILL_TOKENS, -1), ("unknown", 1)],
)
def test_a_threshold_out_of_range_is_named_and_changes_nothing(name: str, value: float) -> None:
    made = scheduler("w0")
    with pytest.raises(InvalidArgument) as error:
        made.thresholds.change("default", "m", **{name: value})
    assert error.value.field == name
    assert made.thresholds.of_tenant("default", made.workers.models("default")) == {}
    with pytest.raises(InvalidArgument, match="model"):
        made.thresholds.change("default", "", active_decode_blocks_threshold=0.5)
