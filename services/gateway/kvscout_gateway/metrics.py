"""The gateway's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_ROUTING_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class GatewayMetrics:
    """Everything the gateway counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        routing = Histogram(
            "kvscout_routing_latency_seconds",
            "Time to place a request, by stage",
            ["stage"],
            buckets=_ROUTING_BUCKETS,
            registry=registry,
        )
        self._hash = routing.labels("hash")
        self._find_matches = routing.labels("find_matches")
        self._select = routing.labels("select")
        self._total = routing.labels("total")
        self._degraded = Counter(
            "kvscout_degraded_decisions", "Decisions made without a helper", ["helper"], registry=registry
        )
        self.degraded_counts: dict[str, int] = {}
        self.requests = Counter("kvscout_requests", "Generate requests, by outcome", ["outcome"], registry=registry)
        self.in_flight = Gauge("kvscout_requests_in_flight", "Generate requests running", registry=registry)
        self.hit_rate = Gauge(
            "kvscout_kv_hit_rate",
            "Cached / prompt tokens as the engines report them, since start",
            ["worker"],
            registry=registry,
        )
        self.prediction_error = Counter(
            "kvscout_prediction_error_tokens",
            "Sum of |predicted - reported| cached tokens",
            ["worker"],
            registry=registry,
        )
        self.ttft = Histogram("kvscout_ttft_seconds", "Time to first token", buckets=_TTFT_BUCKETS, registry=registry)
        self.itl = Histogram("kvscout_itl_seconds", "Time between tokens", buckets=_ITL_BUCKETS, registry=registry)
        self.unfreed = Counter(
            "kvscout_frees_left_to_lease", "Bookings whose Free could not be delivered", registry=registry
        )

    def observe_routing(
        self, *, hash_seconds: float, find_matches_seconds: float, select_seconds: float, total_seconds: float
    ) -> None:
        """Records the stages of one placement."""
        self._hash.observe(hash_seconds)
        self._find_matches.observe(find_matches_seconds)
        self._select.observe(select_seconds)
        self._total.observe(total_seconds)

    def degraded(self, helper: str) -> None:
        """Counts a decision made without a helper."""
        self._degraded.labels(helper).inc()
        self.degraded_counts[helper] = self.degraded_counts.get(helper, 0) + 1
