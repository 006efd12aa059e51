"""The scheduler's Prometheus metrics, read from the core when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout_common.observability.rank_series import RankColumn, RankFamily
from kvscout_scheduler.load.pool import Pool

if TYPE_CHECKING:
    from kvscout_scheduler.scheduler import Scheduler

_POOL = ["tenant", "model", "role"]


class _Samples(Protocol):
    def collect(self) -> Iterator[Metric]: ...


class SchedulerCollector(Collector):
    """Turns loads and counters into samples."""

    def __init__(self, scheduler: Scheduler, replicas: _Samples | None = None) -> None:
        self._scheduler = scheduler
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Return samples of now."""
        requests = RankFamily("kvscout_active_requests", "Active requests", "gauge")
        prefill = RankFamily("kvscout_active_prefill_tokens", "Uncached tokens in prefill", "gauge")
        decode = RankFamily("kvscout_active_decode_blocks", "Distinct active blocks", "gauge")
        expected_prompt = RankFamily("kvscout_expected_prompt_tokens", "Prompt tokens of bookings", "counter")
        expected_cached = RankFamily(
            "kvscout_expected_cached_tokens", "Of those, tokens expected to be cached", "counter"
        )
        balance = GaugeMetricFamily("kvscout_load_balance_score", "std / mean of active blocks", labels=_POOL)
        queued = GaugeMetricFamily("kvscout_queue_length", "Requests that wait for a worker", labels=_POOL)
        classes = GaugeMetricFamily(
            "kvscout_queue_requests", "Requests that wait for a worker, by priority", labels=[*_POOL, "priority"]
        )
        ahead = GaugeMetricFamily(
            "kvscout_queue_ahead_seconds",
            "Fair share that a caller who waits has had more than the one that goes next: the largest",
            labels=_POOL,
        )
        for pool in list(self._scheduler.workers):
            for priorities, count in self._scheduler.waiting.by_sign(pool.id).items():
                classes.add_metric([pool.id.tenant, pool.id.model, pool.id.role, priorities], count)
            queued.add_metric([pool.id.tenant, pool.id.model, pool.id.role], self._scheduler.waiting.length(pool.id))
            names = [pool.id.tenant, pool.id.model, pool.id.role]
            queue = self._scheduler.waiting.queue(pool.id)
            ahead.add_metric(names, queue.ahead_seconds if queue is not None else 0.0)
            balance.add_metric(names, balance_score(pool))
            labels = dict(zip(_POOL, names, strict=True))
            ranks, hits = [pool.ranks[slot] for slot in pool.order], [pool.hits[slot] for slot in pool.order]
            for family, column in (
                (requests, pool.load.requests),
                (prefill, pool.load.prefill_tokens),
                (decode, pool.load.decode_blocks),
            ):
                family.columns.append(RankColumn(labels, ranks, [column[slot] for slot in pool.order]))
            expected_prompt.columns.append(RankColumn(labels, ranks, [each.isl_tokens for each in hits]))
            expected_cached.columns.append(RankColumn(labels, ranks, [each.cached_tokens for each in hits]))
        yield from (requests, prefill, decode, expected_prompt, expected_cached, balance, queued, classes, ahead)
        stats = self._scheduler.stats
        decisions = CounterMetricFamily("kvscout_decisions", "Workers picked, by policy", labels=["policy"])
        yield _counted(decisions, stats.decisions)
        failed = CounterMetricFamily("kvscout_policy_failures", "Calls of policies that failed", labels=["policy"])
        yield _counted(failed, self._scheduler.policies.failures.counts.total)
        refusals = CounterMetricFamily("kvscout_refusals", "Selections that failed, by error", labels=["error"])
        yield _counted(refusals, stats.refusals)
        ended = CounterMetricFamily(
            "kvscout_reservations_expired", "Bookings that ended without a Free, by reason", labels=["reason"]
        )
        yield _counted(ended, stats.ended)
        waits = HistogramMetricFamily("kvscout_queue_wait_seconds", "How long requests that were booked had waited")
        stats.queue_waits.add_to(waits)
        yield waits
        revisions = CounterMetricFamily(
            "kvscout_revision_bookings",
            "Bookings by the revision that the weights say, and the one that took them",
            labels=["revision", "taken_by"],
        )
        for meant_and_taken, count in stats.revisions.items():
            revisions.add_metric(list(meant_and_taken), count)
        yield revisions
        yield CounterMetricFamily(
            "kvscout_placed_over_target", "Requests placed while no worker kept their targets", stats.over_target
        )
        if self._replicas is not None:
            yield from self._replicas.collect()


def _counted(family: CounterMetricFamily, counts: Mapping[str, int]) -> Metric:
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def balance_score(pool: Pool) -> float:
    """Return standard deviation over mean of the active blocks of a pool's worker ranks; 0 where nothing is active."""
    column = pool.load.decode_blocks
    blocks = [column[slot] for slot in pool.order]
    mean = sum(blocks) / len(blocks) if blocks else 0.0
    if mean == 0:
        return 0.0
    return float((sum((value - mean) ** 2 for value in blocks) / len(blocks)) ** 0.5 / mean)
