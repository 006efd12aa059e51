"""/metrics names a limited number of worker ranks; the others are summed, and counters of theirs never fall."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.samples import Sample
from support.seeds import test_seed

from kvscout_common.http.metrics_server import registry_of
from kvscout_common.observability.rank_series import RankColumn, RankFamily, RankSeries

LABELS = ["tenant", "model", "worker", "dp_rank"]


def gauge(name: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, "A gauge", labels=LABELS)
    for worker, value in values.items():
        family.add_metric(["t", "m", worker, "0"], value)
    return family


def counter(values: Mapping[str, float], name: str = "kvscout_events") -> Metric:
    family = CounterMetricFamily(name, "A counter", labels=[*LABELS, "kind"])
    for worker, value in values.items():
        family.add_metric(["t", "m", worker, "0", "applied"], value)
    return family


def page(series: RankSeries, *families: Metric) -> dict[str, dict[str, float]]:
    """Values by family and worker; "" = of the others."""
    return {
        family.name: {sample.labels.get("worker", ""): sample.value for sample in family.samples}
        for family in series.bounded(families)
    }


def test_up_to_the_limit_the_page_is_as_the_collectors_make_it() -> None:
    families = [counter({"a": 1, "b": 2}), gauge("kvscout_active_requests", {"a": 3, "b": 4})]
    *shown, summed = RankSeries(2).bounded(families)
    assert shown == families
    assert [sample.value for sample in summed.samples] == [0]


def test_ranks_above_the_limit_are_summed_under_empty_labels() -> None:
    shown = page(RankSeries(1), counter({"a": 1, "b": 2, "c": 3}), gauge("kvscout_active_requests", {"c": 5, "b": 4}))
    assert shown == {
        "kvscout_events": {"a": 1, "": 5},
        "kvscout_active_requests": {"": 9},
        "kvscout_metrics_summed_worker_ranks": {"": 2},
    }
    assert page(RankSeries(0), counter({"a": 1, "b": 2}))["kvscout_events"] == {"": 3}


def test_of_states_and_ages_the_worst_of_the_others_is_shown_so_that_alerts_fire() -> None:
    shown = page(
        RankSeries(0),
        gauge("kvscout_source_live", {"a": 1, "b": 0, "c": 1}),
        gauge("kvscout_source_blind", {"a": 0, "b": 1, "c": 1}),
        gauge("kvscout_event_age_seconds", {"a": 3, "b": 70, "c": 5}),
    )
    assert [shown[name][""] for name in list(shown)[:3]] == [0, 1, 70]


def test_a_rank_keeps_its_series_and_one_that_waits_takes_the_place_of_one_that_left() -> None:
    series = RankSeries(2)
    assert set(page(series, counter({"b": 1, "c": 1, "d": 1}))["kvscout_events"]) == {"b", "c", ""}
    assert set(page(series, counter({"a": 1, "b": 1, "c": 1, "d": 1}))["kvscout_events"]) == {"b", "c", ""}
    assert set(page(series, counter({"a": 1, "c": 1, "d": 1}))["kvscout_events"]) == {"c", "a", ""}


def test_counters_of_the_others_rise_by_what_the_ranks_counted_whoever_comes_leaves_or_begins_anew() -> None:
    seed = test_seed()
    rng = random.Random(seed)
    series, values, counted, before = RankSeries(0), {"stays": 0.0}, 0.0, 0.0
    for turn in range(200):
        for worker in list(values):
            if worker != "stays" and rng.random() < 0.1:
                del values[worker]
        if rng.random() < 0.5:
            values[f"w{turn}"] = 0.0
        for worker, value in list(values.items()):
            if value and rng.random() < 0.1:
                values[worker] = 0.0
                assert page(series, counter(values))["kvscout_events"][""] == counted
            step = float(rng.randrange(5))
            values[worker] += step
            counted += step
            shown = page(series, counter(values))["kvscout_events"][""]
            assert shown == counted >= before
            before = shown


def test_sums_are_kept_apart_by_model_and_by_further_labels_and_forgotten_with_their_last_rank() -> None:
    family = CounterMetricFamily("kvscout_events", "A counter", labels=[*LABELS, "kind"])
    for model, kind, value in [("m", "applied", 1), ("m", "gaps", 2), ("n", "applied", 3)]:
        for worker in ("a", "b"):
            family.add_metric(["t", model, f"{worker}{model}", "0", kind], value)
    series = RankSeries(0)
    shown, _ = series.bounded([family])
    assert [(one.labels["model"], one.labels["kind"], one.value) for one in shown.samples] == [
        ("m", "applied", 2),
        ("m", "gaps", 4),
        ("n", "applied", 6),
    ]
    list(series.bounded([]))
    assert not series._totals
    assert not series._counted


def test_histograms_of_ranks_are_summed_bucket_by_bucket_and_families_without_ranks_left_alone() -> None:
    times = HistogramMetricFamily("kvscout_times", "Some", labels=["worker"])
    for worker in ("a", "b"):
        times.add_metric([worker], [("1", 1.0), ("+Inf", 2.0)], 3.0)
    plain = GaugeMetricFamily("kvscout_plain", "One", value=7)
    summed, left, _ = RankSeries(0).bounded([times, plain])
    assert {(one.name, one.labels.get("le")): one.value for one in summed.samples} == {
        ("kvscout_times_bucket", "1"): 2,
        ("kvscout_times_bucket", "+Inf"): 4,
        ("kvscout_times_count", None): 4,
        ("kvscout_times_sum", None): 6,
    }
    assert left is plain


class Fleet:
    """As many ranks as a service has."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def collect(self) -> Iterable[Metric]:
        values = {f"worker-{number}": 1.0 for number in range(self.ranks)}
        yield from (counter(values, f"kvscout_counter{number}") for number in range(8))
        yield from (gauge(f"kvscout_gauge{number}", values) for number in range(4))


@pytest.mark.slow
def test_a_thousand_workers_have_a_page_no_longer_than_a_hundred_and_ten_times_the_ranks_ten_times_the_work() -> None:
    series = RankSeries(64)

    def page_of(ranks: int) -> tuple[int, float]:
        """Bytes of a page, and the CPU time of its making, the least of three."""
        seconds = []
        for _ in range(3):
            began = time.process_time()
            families = list(series.bounded(Fleet(ranks).collect()))
            size = sum(len(generate_latest(registry_of(_Made(family)))) for family in families)
            seconds.append(time.process_time() - began)
        return size, min(seconds)

    page_of(100)
    small, _ = page_of(100)
    large, work = page_of(1_000)
    _, more_work = page_of(10_000)
    assert large < small * 1.1
    assert more_work < work * 40, "ten times the ranks are ten times the work; a hundred times would be its square"


def columns(name: str, kind: str, pools: Mapping[str, Mapping[str, float]]) -> RankFamily:
    """A family of columns: by model, values by worker."""
    family = RankFamily(name, "A family", kind)
    for model, values in pools.items():
        ranks = [(worker, 0) for worker in values]
        family.columns.append(RankColumn({"tenant": "t", "model": model}, ranks, list(values.values())))
    return family


def shown(family: Metric) -> list[tuple[str, list[tuple[str, str]], float]]:
    """Samples, in an order of their own."""
    return sorted((sample.name, sorted(sample.labels.items()), sample.value) for sample in family.samples)


def plain(family: RankFamily) -> Metric:
    """The same, all its samples made."""
    made = Metric(family.name, family.documentation, family.type)
    made.samples = family.samples
    return made


def test_columns_are_the_page_that_their_samples_are() -> None:
    seed = test_seed()
    rng = random.Random(seed)
    both = RankSeries(5), RankSeries(5)
    counts = {(model, f"w{number}"): 0 for model in "mn" for number in range(9)}
    for _ in range(60):
        for each, count in counts.items():
            # One that begins anew has counted less.
            counts[each] = rng.randrange(3) if rng.random() < 0.1 else count + rng.randrange(5)
        here = [each for each in counts if rng.random() < 0.7] if rng.random() < 0.7 else list(counts)[:4]
        pools = {m: {worker: counts[m, worker] for model, worker in here if model == m} for m in "mn"}
        families = [
            columns("kvscout_active_requests", "gauge", pools),
            columns("kvscout_expected_prompt_tokens", "counter", pools),
            columns("kvscout_source_live", "gauge", pools),
        ]
        pages = list(both[0].bounded(families)), list(both[1].bounded(map(plain, families)))
        for ours, theirs in zip(*pages, strict=True):
            assert (ours.name, ours.type) == (theirs.name, theirs.type)
            assert shown(ours) == shown(theirs)


def test_of_ranks_that_are_summed_no_samples_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = RankColumn.sample

    def counted(column: RankColumn, name: str, index: int) -> Sample:
        made.append(index)
        return make(column, name, index)

    monkeypatch.setattr(RankColumn, "sample", counted)
    values = {f"worker-{number}": float(number) for number in range(1_000)}
    series = RankSeries(7)
    for family in (columns("a", "gauge", {"m": values}), columns("b", "counter", {"m": values})):
        bounded, _ = series.bounded([family])
        assert len(bounded.samples) == 8
    assert len(made) == 14


class _Made:
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]
