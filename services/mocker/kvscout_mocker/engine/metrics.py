"""vLLM's and SGLang's Prometheus metrics, read from the engines when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvscout_mocker.config import MockerConfig
from kvscout_mocker.engine.engine import Engine
from kvscout_mocker.engine.rank import Rank

_LABELS = ("model_name", "engine")


class _Reading(NamedTuple):
    name: str
    help: str
    of: Callable[[Engine], float]


_GAUGES = (
    _Reading("vllm:num_requests_running", "Requests in the batch.", lambda e: e.num_running),
    _Reading("vllm:num_requests_waiting", "Requests waiting to be scheduled.", lambda e: e.num_waiting),
    _Reading("vllm:kv_cache_usage_perc", "Referenced share of the KV blocks, 0 to 1.", lambda e: e.blocks.usage),
)
_COUNTERS = (
    _Reading("vllm:prefix_cache_queries", "Prompt tokens looked up.", lambda e: e.counters.prefix_query_tokens),
    _Reading("vllm:prefix_cache_hits", "Prompt tokens found cached.", lambda e: e.counters.prefix_hit_tokens),
    _Reading("vllm:prompt_tokens", "Prompt tokens of admitted requests.", lambda e: e.counters.prompt_tokens),
    _Reading("vllm:generation_tokens", "Tokens generated.", lambda e: e.counters.generation_tokens),
    _Reading("vllm:num_preemptions", "Requests that lost their blocks.", lambda e: e.counters.preemptions),
    _Reading("vllm:request_success", "Requests finished.", lambda e: e.counters.finished),
    _Reading(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens that another engine was to have computed.",
        lambda e: e.counters.expected_tokens,
    ),
    _Reading(
        "vllm:external_prefix_cache_hits",
        "Prompt tokens that came from another engine.",
        lambda e: e.counters.received_tokens,
    ),
    _Reading("vllm:nixl_num_failed_transfers", "Transfers that did not come.", lambda e: e.counters.failed_transfers),
    _Reading(
        "vllm:nixl_num_kv_expired_reqs",
        "Requests whose blocks nobody came for in time.",
        lambda e: e.counters.expired_transfers,
    ),
)
_SGLANG_GAUGES = (
    _Reading("sglang:num_running_reqs", "Requests in the batch.", lambda e: e.num_running),
    _Reading("sglang:num_queue_reqs", "Requests waiting to be scheduled.", lambda e: e.num_waiting),
    _Reading("sglang:token_usage", "Referenced share of the KV blocks, 0 to 1.", lambda e: e.blocks.usage),
)


class EngineCollector(Collector):
    """One sample a rank, labelled `engine`, of everything above and of the cache's configuration."""

    def __init__(self, config: MockerConfig, ranks: Sequence[Rank]) -> None:
        self._config = config
        self._ranks = ranks

    def collect(self) -> Iterable[Metric]:
        """Return the current values."""
        if self._config.has_sglang_api:
            for reading in _SGLANG_GAUGES:
                yield self._fill(GaugeMetricFamily(reading.name, reading.help, labels=_LABELS), reading)
        if self._config.has_vllm_api:
            yield from self._vllm()

    def _vllm(self) -> Iterable[Metric]:
        for reading in _GAUGES:
            yield self._fill(GaugeMetricFamily(reading.name, reading.help, labels=_LABELS), reading)
        for reading in _COUNTERS:
            yield self._fill(CounterMetricFamily(reading.name, reading.help, labels=_LABELS), reading)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Configuration of the KV cache.",
            labels=("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching"),
        )
        engine = self._config.engine
        for rank in self._ranks:
            info.add_metric((str(rank.dp_rank), str(engine.block_size), str(engine.num_gpu_blocks), "True"), 1.0)
        yield info

    def _fill(
        self, family: GaugeMetricFamily | CounterMetricFamily, reading: _Reading
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for rank in self._ranks:
            family.add_metric((self._config.model, str(rank.dp_rank)), reading.of(rank.engine))
        return family


def engine_registry(config: MockerConfig, ranks: Sequence[Rank]) -> CollectorRegistry:
    """Return a registry of its own that holds the engines' metrics only."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(config, ranks))
    return registry
