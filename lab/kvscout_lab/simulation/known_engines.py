"""Known engines: a model on a number of accelerators, in a number of bits.

::

    prefill µs/token  = 2 · parameters of the layers / (accelerators · FLOP/s · MFU) + all-reduces of a token
    attention ps/pair = 4 · layers · query heads · head dimension / (accelerators · FLOP/s in BF16 · MFU of attention)
    context ns/token  = bytes of keys and values of a token / (accelerators · bytes/s · MBU)
    base ms           = bytes of the weights / (accelerators · bytes/s · MBU) + 2 · layers · start of one all-reduce
    KV tokens         = (0.9 · memory − weights − activations) / bytes of keys and values of a token

    all-reduces of a token = 2 · layers · hidden · 2 bytes · 2 (n − 1) / n / (bytes/s of links · share)

A pair of tokens takes 4 FLOP in a head's dimension: a product and a sum for the score, and again for the value.
Keys and values of a token are 2 · layers · KV heads · head dimension · 2 bytes, or 1 in FP8. An all-reduce of n sends
and receives 2 (n − 1) / n of what it sums, as a ring does. MFU and MBU are what is achieved of the peaks of computing
and reading; those of weights are the scheduler's (`first_rates`). They were fitted to what others measured:
`published_engines`, docs/engine-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvscout_common.errors import ConfigError
from kvscout_lab.simulation.timing import StepTime
from kvscout_scheduler.estimates.first_rates import (
    GIGA,
    MFU_EXPERTS,
    Achieved,
    achieved,
    seconds_a_prompt_token,
    seconds_to_reduce,
)

MEMORY_USED: Final = 0.9
"""vLLM's `gpu_memory_utilization`."""
ACTIVATIONS_GB: Final = 3.0
"""Memory of activations, of each accelerator."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One of them; peaks without sparsity."""

    name: str
    bf16_tflops: float
    fp8_tflops: float
    gb_per_second: float
    gigabytes: float
    link_gb_per_second: float
    """Of its links to the others, in one direction."""
    all_reduce_us: float
    """Start of an all-reduce; each layer has two."""
    attention_mfu: float
    """Achieved share of the peak in BF16 by the attention of prompts."""

    @property
    def achieved(self) -> Achieved:
        """Return what is achieved of its other peaks."""
        return achieved(self.name.lower())


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with grouped-query attention."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dimension: int
    hidden: int
    """Values of a token between two layers."""
    parameters_billions: float
    computed_billions: float
    """Parameters in the layers that a token goes through; of experts, only those that it uses."""

    def kv_bytes(self, tensor_parallel: int, value_bytes: int = 2) -> float:
        """Return the bytes of a token, over all accelerators: each has at least one head."""
        return 2.0 * self.layers * max(self.kv_heads, tensor_parallel) * self.head_dimension * value_bytes


@dataclass(frozen=True, slots=True)
class KnownEngine:
    """A model on accelerators."""

    model: Model
    accelerator: Accelerator
    tensor_parallel: int
    weight_bytes: int
    """Bytes of a parameter: 2 = BF16, 1 = FP8. Attention is BF16 always."""
    host_ms: float
    host_us_per_request: float
    mfu: float = 0.0
    """0 = that of the accelerator."""
    kv_value_bytes: int = 2
    """Bytes of a key's or value's number: 2 = BF16, 1 = FP8."""
    memory_used: float = MEMORY_USED

    @property
    def step(self) -> StepTime:
        """Return the durations of a step."""
        model, gpu, ways = self.model, self.accelerator, self.tensor_parallel
        mfu = self.mfu or gpu.achieved.mfu[self.weight_bytes]
        tflops = gpu.bf16_tflops if self.weight_bytes == 2 else gpu.fp8_tflops
        read = ways * gpu.gb_per_second * GIGA * gpu.achieved.mbu
        weights = model.parameters_billions * GIGA * self.weight_bytes
        pair = 4.0 * model.layers * model.query_heads * model.head_dimension
        reduces = 2 * model.layers * gpu.all_reduce_us / 1e3 if ways > 1 else 0.0
        computed = seconds_a_prompt_token(model.computed_billions, ways * tflops, mfu)
        reduced = seconds_to_reduce(model.layers * model.hidden, ways, gpu.link_gb_per_second)
        return StepTime(
            base_ms=1e3 * weights / read + reduces,
            prefill_us_per_token=1e6 * (computed + reduced),
            decode_us_per_request=0.0,
            context_ns_per_token=1e9 * model.kv_bytes(ways, self.kv_value_bytes) / read,
            attention_ps_per_pair=1e12 * pair / (ways * gpu.bf16_tflops * 1e12 * gpu.attention_mfu),
            overlapped=True,
            host_ms=self.host_ms,
            host_us_per_request=self.host_us_per_request,
        )

    @property
    def kv_tokens(self) -> int:
        """That fit beside the weights, in whole thousands."""
        free = self.tensor_parallel * (self.accelerator.gigabytes * self.memory_used - ACTIVATIONS_GB)
        free -= self.model.parameters_billions * self.weight_bytes
        of_token = self.model.kv_bytes(self.tensor_parallel, self.kv_value_bytes)
        return int(free * GIGA / of_token / 1_000) * 1_000


A100: Final = Accelerator("A100", 312.0, 312.0, 2_039.0, 80.0, 300.0, all_reduce_us=2.0, attention_mfu=0.6)
H100: Final = Accelerator("H100", 989.4, 1_978.9, 3_350.0, 80.0, 450.0, all_reduce_us=2.0, attention_mfu=0.75)
H200: Final = Accelerator("H200", 989.4, 1_978.9, 4_800.0, 141.0, 450.0, all_reduce_us=2.0, attention_mfu=0.75)
MI300X: Final = Accelerator("MI300X", 1_307.4, 2_614.9, 5_300.0, 192.0, 448.0, all_reduce_us=5.0, attention_mfu=0.4)
"""SXM and OAM modules; peaks of their makers' data sheets, without sparsity."""
LLAMA_7B: Final = Model("Llama 7B", 32, 32, 32, 128, 4_096, parameters_billions=6.74, computed_billions=6.48)
LLAMA_8B: Final = Model("Llama 3.1 8B", 32, 32, 8, 128, 4_096, parameters_billions=8.03, computed_billions=6.98)
LLAMA_70B: Final = Model("Llama 3.3 70B", 80, 64, 8, 128, 8_192, parameters_billions=70.6, computed_billions=68.5)
LLAMA_405B: Final = Model(
    "Llama 3.1 405B", 126, 128, 8, 128, 16_384, parameters_billions=405.9, computed_billions=401.7
)
QWEN_235B: Final = Model("Qwen3 235B-A22B", 94, 64, 4, 128, 4_096, parameters_billions=235.0, computed_billions=20.8)

ENGINES: Final[dict[str, KnownEngine]] = {
    "8b-bf16-h100": KnownEngine(LLAMA_8B, H100, 1, 2, host_ms=2.5, host_us_per_request=20.0),
    "8b-fp8-h100": KnownEngine(LLAMA_8B, H100, 1, 1, host_ms=2.5, host_us_per_request=20.0),
    "70b-fp8-tp2-h100": KnownEngine(LLAMA_70B, H100, 2, 1, host_ms=2.5, host_us_per_request=20.0),
    "70b-fp8-tp2-h200": KnownEngine(LLAMA_70B, H200, 2, 1, host_ms=2.5, host_us_per_request=20.0),
    "70b-fp8-tp4-h100": KnownEngine(LLAMA_70B, H100, 4, 1, host_ms=3.0, host_us_per_request=20.0),
    "70b-bf16-tp4-h100": KnownEngine(LLAMA_70B, H100, 4, 2, host_ms=3.0, host_us_per_request=20.0),
    "70b-fp8-tp8-h100": KnownEngine(LLAMA_70B, H100, 8, 1, host_ms=3.5, host_us_per_request=20.0),
    "70b-bf16-tp8-h100": KnownEngine(LLAMA_70B, H100, 8, 2, host_ms=3.5, host_us_per_request=20.0),
    "70b-fp8-tp8-mi300x": KnownEngine(LLAMA_70B, MI300X, 8, 1, host_ms=3.0, host_us_per_request=20.0),
    "405b-fp8-tp8-h200": KnownEngine(LLAMA_405B, H200, 8, 1, host_ms=3.5, host_us_per_request=20.0),
    "405b-fp8-tp8-mi300x": KnownEngine(LLAMA_405B, MI300X, 8, 1, host_ms=3.0, host_us_per_request=20.0),
    "235b-moe-fp8-tp8-h100": KnownEngine(QWEN_235B, H100, 8, 1, host_ms=4.0, host_us_per_request=20.0, mfu=MFU_EXPERTS),
}
"""By name; hosts as of vLLM."""


def known_engine(name: str) -> KnownEngine:
    """Return the engine of a name.

    Raises:
        ConfigError: There is none.
    """
    found = ENGINES.get(name)
    if found is None:
        raise ConfigError(f"{name!r} is not one of {', '.join(ENGINES)}", field="engine")
    return found
