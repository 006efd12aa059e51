"""Bound how many worker ranks have series of their own on `/metrics`.

A service that routes to a thousand workers would have ten thousand series of them, times its replicas. So a page names
a limited number of worker ranks; the others are summed, in series whose labels `worker` and `dp_rank` are empty. This
holds for every family with these labels, whichever collector it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

_WORST: Final[dict[str, Callable[[float, float], float]]] = {
    "kvscout_source_live": min,
    "kvscout_source_blind": max,
    "kvscout_event_age_seconds": max,
    "kvscout_bridge_history_incomplete": max,
}
"""Gauges whose sum says nothing: of the others they show the worst."""

_Rank = tuple[str, str, str]
"""Tenant, worker, dp_rank."""
_Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a sample."""


class RankSeries:
    """Replaces the series of worker ranks beyond a limit by sums.

    A rank keeps its series for as long as it is there. Counters of the others never fall when one of them leaves:
    what is summed is by how much they rose, as between one page and the next.

    Args:
        limit: Worker ranks with series of their own.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._named: dict[_Rank, None] = {}
        self._counted: dict[_Key, float] = {}
        """Counters of the ranks that are summed, as they were on the last page."""
        self._totals: dict[_Key, float] = {}
        """Their sums."""

    def bounded(self, families: Iterable[Metric]) -> Iterator[Metric]:
        """A page with at most `limit` worker ranks in each family, and how many ranks are summed instead."""
        page = list(families)
        ranks = dict.fromkeys(_rank(sample) for family in page for sample in family.samples if _is_of_rank(sample))
        self._choose(ranks)
        counted, totals = self._counted, self._totals
        self._counted, self._totals = {}, {}
        for family in page:
            if len(ranks) > len(self._named) and any(map(_is_of_rank, family.samples)):
                yield self._summed(family, counted, totals)
            else:
                yield family
        yield GaugeMetricFamily(
            "kvscout_metrics_summed_worker_ranks",
            "Worker ranks without series of their own: they are summed under empty labels",
            value=len(ranks) - len(self._named),
        )

    def _choose(self, ranks: dict[_Rank, None]) -> None:
        """Names the ranks that were named before, then others in the order in which they come."""
        self._named = {rank: None for rank in self._named if rank in ranks}
        for rank in ranks:
            if len(self._named) >= self._limit:
                break
            self._named.setdefault(rank)

    def _summed(self, family: Metric, counted: dict[_Key, float], totals: dict[_Key, float]) -> Metric:
        """A family in which the ranks without a name are one series for each set of their further labels."""
        is_gauge = family.type == "gauge"
        add = _WORST.get(family.name, float.__add__)
        shown = Metric(family.name, family.documentation, family.type)
        sums: dict[_Key, float] = {}
        for sample in family.samples:
            if not _is_of_rank(sample) or _rank(sample) in self._named:
                shown.samples.append(sample)
                continue
            key = (sample.name, tuple(sample.labels.items()))
            total = (sample.name, tuple(item for item in key[1] if item[0] not in ("worker", "dp_rank")))
            value = float(sample.value)
            if is_gauge:
                sums[total] = add(sums[total], value) if total in sums else value
                continue
            self._counted[key] = value
            before = counted.get(key, 0.0)
            # A counter that fell began anew.
            rose = value - before if value >= before else value
            sums[total] = sums.get(total, totals.get(total, 0.0)) + rose
        if not is_gauge:
            self._totals |= sums
        for (name, labels), value in sums.items():
            shown.add_sample(name, {**dict(labels), "worker": "", "dp_rank": ""}, value)
        return shown


def _is_of_rank(sample: Sample) -> bool:
    return "worker" in sample.labels


def _rank(sample: Sample) -> _Rank:
    labels = sample.labels
    return labels.get("tenant", ""), labels["worker"], labels.get("dp_rank", "")
