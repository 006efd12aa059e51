"""Speeds of engines by their own metrics, in Prometheus text: first estimates of a scheduler that starts beside them.

| sum over | vLLM | SGLang |
|---|---|---|
| prefills, s | `vllm:request_prefill_time_seconds_sum` | `sglang:time_to_first_token_seconds_sum` − `sglang:queue_time_seconds_sum` |
| their number | `…_count` of the same | `…_count` of the first |
| tokens that they computed | `vllm:request_prefill_kv_computed_tokens_sum`, else `vllm:request_prompt_tokens_sum` without the share of `vllm:prefix_cache_hits_total` in `vllm:prefix_cache_queries_total` | `sglang:prompt_tokens_total` − `sglang:cached_tokens_total` |
| gaps between tokens, s | `vllm:inter_token_latency_seconds_sum`, else `vllm:time_per_output_token_seconds_sum` | `sglang:inter_token_latency_seconds_sum` |
| their number | `…_count` of the same | `…_count` of the same |

It is a belief: bounded, and gone with the first observations.
"""  # noqa: E501  # a table

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Final, NamedTuple

from kvscout_common.observability.prometheus_text import read_samples
from kvscout_scheduler.estimates.first_rates import Rates

MOST: Final = 2.0**53
"""More is no sum of seconds or tokens."""
LEAST_PREFILLS: Final = 3.0
LEAST_PROMPT_TOKENS: Final = 256.0
LEAST_GAPS: Final = 32.0
"""Fewest gaps between tokens from which a rate is derived."""
PROMPT_TOKEN_SECONDS: Final = (1e-8, 0.1)
STEP_SECONDS: Final = (1e-4, 10.0)
"""Bounds of a step, in seconds."""
LEAST_SHARE: Final = 0.2
"""Least share of a prefill that its tokens take, however long a step without them is."""
USUAL_CONTEXT: Final = 50_000.0
"""Tokens in all contexts of a batch for which the gaps between tokens are taken."""

_NAMES: Final = (
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_prefill_kv_computed_tokens_sum",
    "vllm:request_prompt_tokens_sum",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:time_per_output_token_seconds_sum",
    "vllm:time_per_output_token_seconds_count",
    "sglang:time_to_first_token_seconds_sum",
    "sglang:time_to_first_token_seconds_count",
    "sglang:queue_time_seconds_sum",
    "sglang:prompt_tokens_total",
    "sglang:cached_tokens_total",
    "sglang:inter_token_latency_seconds_sum",
    "sglang:inter_token_latency_seconds_count",
)


class RateSums(NamedTuple):
    """Sums of an engine since its start; none negative."""

    prefill_seconds: float = 0.0
    prefills: float = 0.0
    prompt_tokens: float = 0.0
    """Prompt tokens that were computed."""
    gap_seconds: float = 0.0
    gaps: float = 0.0
    """Between two tokens of an output."""

    def since(self, before: RateSums) -> RateSums:
        """Return the sums since an earlier reading; zeros where a sum went back, as when the engine began anew."""
        less = tuple(after - earlier for after, earlier in zip(self, before, strict=True))
        prefill, gaps = less[:3], less[3:]
        return RateSums(*(prefill if min(prefill) >= 0 else (0.0,) * 3), *(gaps if min(gaps) >= 0 else (0.0,) * 2))

    def plus(self, other: RateSums) -> RateSums:
        """Return the sums of both."""
        return RateSums(*(mine + others for mine, others in zip(self, other, strict=True)))


NOTHING: Final = RateSums()


def read_rate_sums(page: bytes) -> RateSums:
    """Return the sums of an engine's `/metrics` over all its ranks; zeros where there are none, or nonsense.

    Args:
        page: Prometheus text.

    Raises:
        ValueError: A metric cannot be parsed.
    """
    said: dict[str, float] = {}
    for sample in read_samples(page, _NAMES):
        value = sample.value if 0.0 <= sample.value <= MOST else float("nan")
        said[sample.name] = said.get(sample.name, 0.0) + value
    if any(name.startswith("vllm:") for name in said):
        prefill = _vllm_prefill(said)
        gaps = _pair(said, "vllm:inter_token_latency_seconds") or _pair(said, "vllm:time_per_output_token_seconds")
    else:
        prefill = _sglang_prefill(said)
        gaps = _pair(said, "sglang:inter_token_latency_seconds")
    return RateSums(*_sane(prefill, 3), *_sane(gaps, 2))


def rates_by(sums: RateSums, shape: Rates) -> Rates | None:
    """Return the rates of engines by their sums; None = too little to say.

    Args:
        sums: Of engines that have the same model.
        shape: What is believed without them: it counts where they say nothing, and says what of a gap is contexts.
    """
    step, context, token = shape.step, shape.context_token, shape.prompt_token
    known = False
    if sums.gaps >= LEAST_GAPS and sums.gap_seconds > 0:
        gap = _within(sums.gap_seconds / sums.gaps, STEP_SECONDS)
        scale = gap / (step + context * USUAL_CONTEXT)
        step, context, known = scale * step, scale * context, True
    if sums.prefills >= LEAST_PREFILLS and sums.prompt_tokens >= LEAST_PROMPT_TOKENS and sums.prefill_seconds > 0:
        each = sums.prefill_seconds / sums.prefills
        computing = max(each - step, LEAST_SHARE * each)
        token, known = _within(computing * sums.prefills / sums.prompt_tokens, PROMPT_TOKEN_SECONDS), True
    return Rates(token, step, context) if known else None


def _vllm_prefill(said: Mapping[str, float]) -> tuple[float, ...]:
    tokens = said.get("vllm:request_prefill_kv_computed_tokens_sum", 0.0)
    if not tokens:
        queried = said.get("vllm:prefix_cache_queries_total", 0.0)
        missed = 1.0 - said.get("vllm:prefix_cache_hits_total", 0.0) / queried if queried else 1.0
        tokens = said.get("vllm:request_prompt_tokens_sum", 0.0) * missed
    return *(_pair(said, "vllm:request_prefill_time_seconds") or (0.0, 0.0)), tokens


def _sglang_prefill(said: Mapping[str, float]) -> tuple[float, ...]:
    seconds, number = _pair(said, "sglang:time_to_first_token_seconds") or (0.0, 0.0)
    tokens = said.get("sglang:prompt_tokens_total", 0.0) - said.get("sglang:cached_tokens_total", 0.0)
    return seconds - said.get("sglang:queue_time_seconds_sum", 0.0), number, tokens


def _pair(said: Mapping[str, float], name: str) -> tuple[float, ...]:
    """Return the sum and number of a histogram; () = there are none."""
    number = said.get(f"{name}_count", 0.0)
    return (said.get(f"{name}_sum", 0.0), number) if number else ()


def _sane(values: Iterable[float], length: int) -> tuple[float, ...]:
    found = tuple(values)
    return found if len(found) == length and all(isfinite(each) and each >= 0 for each in found) else (0.0,) * length


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
