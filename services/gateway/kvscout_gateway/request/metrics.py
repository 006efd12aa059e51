"""The gateway's Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout_common.http.http import StreamReport
from kvscout_common.observability.latencies import Latencies
from kvscout_gateway.values.tally import Tally

_ROUTING_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

MAX_MODELS = 1_000
"""Models of tenants that have series of their own; what comes after them, or names no model of a worker, shares one."""
_OTHERS = ("", "")
"""Tenant and model of those."""


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """Metrics of one model's requests."""

    all_ttft: Tally
    """TTFT of all models together."""
    all_itl: Tally
    ttft: Latencies = field(default_factory=lambda: Latencies(_TTFT_BUCKETS))
    itl: Latencies = field(default_factory=lambda: Latencies(_ITL_BUCKETS))
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of requests by outcome."""

    def first_token(self, seconds: float) -> None:
        """Observe a request's TTFT."""
        self.ttft.observe(seconds)
        self.all_ttft.observe(seconds)

    def between_tokens(self, report: StreamReport) -> None:
        """Observe the mean ITL of a stream; tokens of its first output were not waited for."""
        if report.outputs < 2:
            return
        waited_for = report.tokens * (report.outputs - 1) / report.outputs
        seconds = (report.last_output_at - report.first_output_at) / waited_for
        self.itl.observe(seconds)
        self.all_itl.observe(seconds)

    def ended(self, outcome: str) -> None:
        """Count a request by its outcome."""
        self.outcomes[outcome] += 1


class GatewayMetrics(Collector):
    """Metrics of the gateway's requests."""

    def __init__(self, registry: CollectorRegistry, is_served: Callable[[str, str], bool] = lambda *_: True) -> None:
        """Count nothing yet.

        Args:
            registry: Shows it.
            is_served: Whether a tenant has workers of a model: whatever else clients name has no series of its own.
        """
        self._is_served = is_served
        self._hash, self._find_matches = Latencies(_ROUTING_BUCKETS), Latencies(_ROUTING_BUCKETS)
        self._select, self._total = Latencies(_ROUTING_BUCKETS), Latencies(_ROUTING_BUCKETS)
        self.degraded_counts: Counter[str] = Counter()
        """By the upstream or shard that was missed."""
        self.ttft, self.itl = Tally(), Tally()
        """TTFT and ITL of all models."""
        self._models: dict[tuple[str, str], ModelMetrics] = {}
        self._turned_away = 0
        """Requests of models that came when there were too many."""
        registry.register(self)
        self.disaggregation = CounterMetric(
            "kvscout_disaggregated_requests",
            "Requests of models with prefill and decode workers, by the path they took",
            ["path"],
            registry=registry,
        )

    def of(self, tenant: str, model: str) -> ModelMetrics:
        """Return what is counted of a model; of those that nobody serves, together under empty labels.

        Where another one comes, the series of those end that nobody serves any more: tenants and adapters come and go.
        """
        key = (tenant, model)
        known = self._models.get(key)
        if known is None:
            if key != _OTHERS:
                if not self._is_served(tenant, model):
                    return self.of(*_OTHERS)
                if len(self._models) > MAX_MODELS:
                    self._turned_away += 1
                # It looks at all of them, and where there are too many each of their requests comes here.
                if self._turned_away % MAX_MODELS == 0:
                    self._drop_gone()
                if len(self._models) > MAX_MODELS:
                    return self.of(*_OTHERS)
            known = self._models[key] = ModelMetrics(self.ttft, self.itl)
        return known

    def _drop_gone(self) -> None:
        gone = [key for key in self._models if key != _OTHERS and not self._is_served(*key)]
        for key in gone:
            # So that their sum counts every request still.
            self.of(*_OTHERS).outcomes.update(self._models.pop(key).outcomes)

    def observe_routing(
        self, *, hash_seconds: float, find_matches_seconds: float, select_seconds: float, total_seconds: float
    ) -> None:
        """Record the stages of one placement."""
        self._hash.observe(hash_seconds)
        self._find_matches.observe(find_matches_seconds)
        self._select.observe(select_seconds)
        self._total.observe(total_seconds)

    def degraded(self, upstream: str) -> None:
        """Count a decision made without an upstream."""
        self.degraded_counts[upstream] += 1

    def collect(self) -> Iterator[Metric]:
        """Return the current samples."""
        routing = HistogramMetricFamily(
            "kvscout_routing_latency_seconds", "Time to place a request, by stage", labels=["stage"]
        )
        self._hash.add_to(routing, ["hash"])
        self._find_matches.add_to(routing, ["find_matches"])
        self._select.add_to(routing, ["select"])
        self._total.add_to(routing, ["total"])
        degraded = CounterMetricFamily(
            "kvscout_degraded_decisions", "Decisions made without a helper or shard", labels=["helper"]
        )
        for upstream, number in self.degraded_counts.items():
            degraded.add_metric([upstream], number)
        labels = ["tenant", "model"]
        requests = CounterMetricFamily("kvscout_requests", "Requests, by outcome", labels=[*labels, "outcome"])
        ttft = HistogramMetricFamily("kvscout_ttft_seconds", "Time to first token", labels=labels)
        itl = HistogramMetricFamily("kvscout_itl_seconds", "Time between tokens", labels=labels)
        for key, model in self._models.items():
            for outcome, number in model.outcomes.items():
                requests.add_metric([*key, outcome], number)
            model.ttft.add_to(ttft, key)
            model.itl.add_to(itl, key)
        yield from (routing, degraded, requests, ttft, itl)
