"""Load reported by engines, also in Prometheus text: vLLM's and SGLang's names, one reading a data-parallel rank.

| what | vLLM | SGLang |
|---|---|---|
| running requests | `vllm:num_requests_running` | `sglang:num_running_reqs` |
| waiting requests | `vllm:num_requests_waiting` | `sglang:num_queue_reqs` |
| KV cache in use, 0..1 | `vllm:kv_cache_usage_perc` (before: `vllm:gpu_cache_usage_perc`) | `sglang:token_usage` |
| rank | label `engine` | label `dp_rank` |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvscout_common.errors import InvalidArgument
from kvscout_common.observability.prometheus_text import read_samples

_RUNNING, _WAITING, _USAGE = "running_requests", "waiting_requests", "kv_cache_usage"
_FIELDS: Final[Mapping[str, str]] = {
    "vllm:num_requests_running": _RUNNING,
    "vllm:num_requests_waiting": _WAITING,
    "vllm:kv_cache_usage_perc": _USAGE,
    "vllm:gpu_cache_usage_perc": _USAGE,
    "sglang:num_running_reqs": _RUNNING,
    "sglang:num_queue_reqs": _WAITING,
    "sglang:token_usage": _USAGE,
}
_RANK_LABELS = ("engine", "dp_rank")
MAX_REQUESTS: Final = 2**32
"""More is no number of requests."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Load that an engine reports; None = not reported."""

    kv_cache_usage: float | None = None
    """Fraction of KV blocks in use, 0..1."""
    running_requests: int | None = None
    waiting_requests: int | None = None

    def validate(self) -> EngineMetrics:
        """Return itself, if it is in range.

        Raises:
            InvalidArgument: Naming the field.
        """
        if self.kv_cache_usage is not None and not 0 <= self.kv_cache_usage <= 1:
            raise InvalidArgument(f"must be between 0 and 1, not {self.kv_cache_usage}", field="kv_cache_usage")
        for name in ("running_requests", "waiting_requests"):
            value: int | None = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidArgument("must not be negative", field=name)
        return self


NO_METRICS = EngineMetrics()


def read_engine_metrics(page: bytes, ranks: Sequence[int]) -> dict[int, EngineMetrics]:
    """Return the load of each rank by an engine's `/metrics`.

    Args:
        page: Prometheus text.
        ranks: The ranks that the worker registered. Of a worker with one rank, samples without a rank, or of an engine
            that counts from 0, are its own.

    Returns:
        Readings by rank; ranks of which nothing is said are left out. Several samples of one rank (tensor-parallel
        processes) are one: requests and usage of the fullest.

    Raises:
        ValueError: A metric cannot be parsed.
    """
    found: dict[int, dict[str, float]] = {}
    by_label = {str(rank): rank for rank in ranks}
    for sample in read_samples(page, _FIELDS):
        field = _FIELDS[sample.name]
        if not 0 <= sample.value < MAX_REQUESTS:  # nor is what is no number
            continue
        rank = _rank(sample.labels, by_label)
        if rank is not None:
            values = found.setdefault(rank, {})
            values[field] = max(values.get(field, 0.0), sample.value)
    return {rank: _reading(values) for rank, values in sorted(found.items())}


def _rank(labels: Mapping[str, str], by_label: Mapping[str, int]) -> int | None:
    named = next((labels[name] for name in _RANK_LABELS if labels.get(name, "").isdecimal()), None)
    if named is not None and named in by_label:
        return by_label[named]
    return next(iter(by_label.values())) if len(by_label) == 1 else None


def _reading(values: Mapping[str, float]) -> EngineMetrics:
    usage, running, waiting = values.get(_USAGE), values.get(_RUNNING), values.get(_WAITING)
    return EngineMetrics(
        kv_cache_usage=None if usage is None else min(1.0, usage),
        running_requests=None if running is None else int(running),
        waiting_requests=None if waiting is None else int(waiting),
    )
