"""Bound how many worker ranks have series of their own on `/metrics`.

A service that routes to a thousand workers would have ten thousand series of them, times its replicas. So a page names
a limited number of worker ranks; the others are summed, in series whose labels `worker` and `dp_rank` are empty. This
holds for every family with these labels, whichever collector it comes from. A family of columns (`RankFamily`) costs a
tenth: of ranks that are summed no samples are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

_WORST: Final[dict[str, Callable[[float, float], float]]] = {
    "kvscout_source_live": min,
    "kvscout_source_blind": max,
    "kvscout_event_age_seconds": max,
    "kvscout_bridge_history_incomplete": max,
}
"""Gauges whose sum says nothing: of the others they show the worst."""

PAUSE: Final = Metric("kvscout_pause", "Nothing", "unknown")
"""Family without samples, which a collector of many ranks yields about each millisecond: others may go on there."""

RANKS_A_COLUMN = 512
"""Most ranks of one `RankColumn`, where others shall go on in between."""

_Rank = tuple[str, str, str]
"""Tenant, worker, dp_rank."""


class RankColumn(NamedTuple):
    """One number of many worker ranks."""

    labels: Mapping[str, str]
    """Those that all have."""
    ranks: Sequence[tuple[str, int]]
    """(worker_id, dp_rank), `RANKS_A_COLUMN` at most; families of one page had better share them."""
    values: Sequence[float]

    def sample(self, name: str, index: int) -> Sample:
        """Return the sample of one rank."""
        worker_id, dp_rank = self.ranks[index]
        return Sample(name, {**self.labels, "worker": worker_id, "dp_rank": str(dp_rank)}, self.values[index])


class RankFamily(Metric):
    """A family with a sample for each worker rank, which is made when somebody reads it.

    Args:
        name: Without the `_total` of counters.
        documentation: As shown.
        kind: "gauge" or "counter".
    """

    def __init__(self, name: str, documentation: str, kind: str) -> None:
        self.columns: list[RankColumn] = []
        super().__init__(name, documentation, kind)
        self.sample_name = f"{name}_total" if kind == "counter" else name

    @property
    def samples(self) -> list[Sample]:
        """Those of all ranks, made anew."""
        name = self.sample_name
        return [column.sample(name, index) for column in self.columns for index in range(len(column.ranks))]

    @samples.setter
    def samples(self, samples: Any) -> None:
        """Return nothing: the base class has no samples."""


_Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a sample."""
_Columns = dict[_Key, dict[tuple[str, int], float]]
"""Counters by rank, of columns."""


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
        self._columns: _Columns = {}
        """The same of columns."""
        self._totals: dict[_Key, float] = {}
        """Their sums."""

    def bounded(self, families: Iterable[Metric]) -> Iterator[Metric]:
        """Yield a page with at most `limit` worker ranks in each family, and how many ranks are summed instead.

        Among them comes `PAUSE`, where there is much to do.
        """
        page: list[Metric] = []
        ranks: dict[_Rank, None] = {}
        read: set[tuple[str, int]] = set()
        since_pause = 0
        for family in families:
            if family is PAUSE:
                yield PAUSE
                continue
            page.append(family)
            for some in _ranks_of(family, read):
                if since_pause >= RANKS_A_COLUMN:
                    since_pause = 0
                    yield PAUSE
                since_pause += len(some)
                ranks.update(dict.fromkeys(some))
        self._choose(ranks)
        counted, totals, columns = self._counted, self._totals, self._columns
        self._counted, self._totals, self._columns = {}, {}, {}
        places = _Places(self._named)
        for family in page:
            if isinstance(family, RankFamily):
                many = len(ranks) > len(self._named)
                yield from self._summed_columns(family, places, columns, totals) if many else (family,)
            elif len(ranks) > len(self._named) and any(map(_is_of_rank, family.samples)):
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
        """Return a family in which the ranks without a name are one series for each set of their further labels."""
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
        return _with_sums(shown, sums)

    def _summed_columns(
        self, family: RankFamily, places: _Places, columns: _Columns, totals: dict[_Key, float]
    ) -> Iterator[Metric]:
        """Yield the same of columns."""
        is_gauge, name = family.type == "gauge", family.sample_name
        add = _WORST.get(family.name)
        shown = Metric(family.name, family.documentation, family.type)
        sums: dict[_Key, float] = {}
        summed = 0
        for column in family.columns:
            if summed >= RANKS_A_COLUMN:
                summed = 0
                yield PAUSE
            summed += len(column.ranks)
            named = places.of(column)
            shown.samples += [column.sample(name, index) for index in sorted(named)]
            total = (name, tuple(column.labels.items()))
            others = [index for index in range(len(column.ranks)) if index not in named] if named else None
            values = column.values if others is None else [column.values[index] for index in others]
            if not values:
                continue
            if not is_gauge:
                ranks = column.ranks if others is None else [column.ranks[index] for index in others]
                before = columns.get(total, {})
                self._columns.setdefault(total, {}).update(zip(ranks, values, strict=True))
                sums[total] = sums.get(total, totals.get(total, 0.0)) + _rose(before, ranks, values)
            elif add is None:
                sums[total] = sums.get(total, 0.0) + sum(values)
            else:
                for value in values:
                    sums[total] = add(sums[total], value) if total in sums else value
        if not is_gauge:
            self._totals |= sums
        yield _with_sums(shown, sums)


def _rose(before: Mapping[tuple[str, int], float], ranks: Sequence[tuple[str, int]], values: Sequence[float]) -> float:
    """By how much the counters of some ranks rose."""
    # A counter that fell began anew.
    pairs = ((value, before.get(rank, 0.0)) for rank, value in zip(ranks, values, strict=True))
    return sum(value - then if value >= then else value for value, then in pairs)


class _Places:
    """Places of named ranks in columns, looked up once for the columns that share their ranks."""

    def __init__(self, named: dict[_Rank, None]) -> None:
        self._named = named
        self._known: dict[tuple[str, int], frozenset[int]] = {}

    def of(self, column: RankColumn) -> frozenset[int]:
        tenant = column.labels.get("tenant", "")
        found = self._known.get((tenant, id(column.ranks)))
        if found is None:
            ranks = enumerate(column.ranks)
            places = (at for at, (worker_id, dp_rank) in ranks if (tenant, worker_id, str(dp_rank)) in self._named)
            found = self._known[tenant, id(column.ranks)] = frozenset(places)
        return found


def _with_sums(shown: Metric, sums: dict[_Key, float]) -> Metric:
    for (name, labels), value in sums.items():
        shown.add_sample(name, {**dict(labels), "worker": "", "dp_rank": ""}, value)
    return shown


def _ranks_of(family: Metric, read: set[tuple[str, int]]) -> Iterator[list[_Rank]]:
    """Yield the worker ranks of a family, of columns one after the other; those that columns share once."""
    if not isinstance(family, RankFamily):
        yield [_rank(sample) for sample in family.samples if _is_of_rank(sample)]
        return
    for labels, ranks, _ in family.columns:
        tenant = labels.get("tenant", "")
        if (tenant, id(ranks)) not in read:
            read.add((tenant, id(ranks)))
            yield [(tenant, worker_id, str(dp_rank)) for worker_id, dp_rank in ranks]


def _is_of_rank(sample: Sample) -> bool:
    return "worker" in sample.labels


def _rank(sample: Sample) -> _Rank:
    labels = sample.labels
    return labels.get("tenant", ""), labels["worker"], labels.get("dp_rank", "")
