"""Known engines: a model on a number of accelerators, in a number of bits.

::

    prefill µs/token  = 2 · parameters of the layers / (accelerators · FLOP/s · MFU)
    attention ps/pair = 4 · layers · query heads · head dimension / (accelerators · FLOP/s in BF16 · MFU)
    context ns/token  = bytes of keys and values of a token / (accelerators · bytes/s · MBU)
    base ms           = bytes of the weights / (accelerators · bytes/s · MBU) + 2 · layers · one all-reduce
    KV tokens         = (0.9 · memory − weights − activations) / bytes of keys and values of a token

A pair of tokens takes 4 FLOP in a head's dimension: a product and a sum for the score, and again for the value.
Keys and values of a token are 2 · layers · KV heads · head dimension · 2 bytes. MFU and MBU are what is achieved of the
peaks of computing and reading (`first_rates`, with which the scheduler begins). docs/laboratory.md has the figures, and
where they are from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvscout_common.errors import ConfigError
from kvscout_lab.simulation.timing import StepTime
from kvscout_scheduler.estimates.first_rates import GIGA, MBU, MFU, MFU_EXPERTS

ALL_REDUCE_US: Final = 12.0
"""One small all-reduce over NVLink; each layer has two."""
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


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with grouped-query attention."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dimension: int
    parameters_billions: float
    computed_billions: float
    """Parameters in the layers that a token goes through; of experts, only those that it uses."""

    def kv_bytes(self, tensor_parallel: int) -> float:
        """Return the bytes of a token, over all accelerators: each has at least one head."""
        return 2.0 * self.layers * max(self.kv_heads, tensor_parallel) * self.head_dimension * 2


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
    """0 = that of `MFU`."""

    @property
    def step(self) -> StepTime:
        """Return the durations of a step."""
        model, gpu, ways = self.model, self.accelerator, self.tensor_parallel
        mfu = self.mfu or MFU[self.weight_bytes]
        tflops = gpu.bf16_tflops if self.weight_bytes == 2 else gpu.fp8_tflops
        read = ways * gpu.gb_per_second * GIGA * MBU
        weights = model.parameters_billions * GIGA * self.weight_bytes
        pair = 4.0 * model.layers * model.query_heads * model.head_dimension
        reduces = 2 * model.layers * ALL_REDUCE_US / 1e3 if ways > 1 else 0.0
        return StepTime(
            base_ms=1e3 * weights / read + reduces,
            prefill_us_per_token=1e6 * 2 * model.computed_billions * GIGA / (ways * tflops * 1e12 * mfu),
            decode_us_per_request=0.0,
            context_ns_per_token=1e9 * model.kv_bytes(ways) / read,
            attention_ps_per_pair=1e12 * pair / (ways * gpu.bf16_tflops * 1e12 * MFU[2]),
            overlapped=True,
            host_ms=self.host_ms,
            host_us_per_request=self.host_us_per_request,
        )

    @property
    def kv_tokens(self) -> int:
        """That fit beside the weights, in whole thousands."""
        free = self.tensor_parallel * (self.accelerator.gigabytes * MEMORY_USED - ACTIVATIONS_GB)
        free -= self.model.parameters_billions * self.weight_bytes
        return int(free * GIGA / self.model.kv_bytes(self.tensor_parallel) / 1_000) * 1_000


H100: Final = Accelerator("H100 SXM", bf16_tflops=989.4, fp8_tflops=1_978.9, gb_per_second=3_350.0, gigabytes=80.0)
LLAMA_8B: Final = Model("Llama 3.1 8B", 32, 32, 8, 128, parameters_billions=8.03, computed_billions=6.98)
LLAMA_70B: Final = Model("Llama 3.3 70B", 80, 64, 8, 128, parameters_billions=70.6, computed_billions=68.5)
QWEN_235B: Final = Model("Qwen3 235B-A22B", 94, 64, 4, 128, parameters_billions=235.0, computed_billions=20.8)

ENGINES: Final[dict[str, KnownEngine]] = {
    "8b-bf16-h100": KnownEngine(LLAMA_8B, H100, 1, 2, host_ms=2.5, host_us_per_request=20.0),
    "70b-fp8-tp4-h100": KnownEngine(LLAMA_70B, H100, 4, 1, host_ms=3.0, host_us_per_request=20.0),
    "70b-bf16-tp4-h100": KnownEngine(LLAMA_70B, H100, 4, 2, host_ms=3.0, host_us_per_request=20.0),
    "70b-fp8-tp8-h100": KnownEngine(LLAMA_70B, H100, 8, 1, host_ms=3.5, host_us_per_request=20.0),
    "70b-bf16-tp8-h100": KnownEngine(LLAMA_70B, H100, 8, 2, host_ms=3.5, host_us_per_request=20.0),
    "235b-moe-fp8-tp8-h100": KnownEngine(QWEN_235B, H100, 8, 1, host_ms=4.0, host_us_per_request=20.0, mfu=MFU_EXPERTS),
}
"""By name."""


def known_engine(name: str) -> KnownEngine:
    """Return the engine of a name.

    Raises:
        ConfigError: There is none.
    """
    found = ENGINES.get(name)
    if found is None:
        raise ConfigError(f"{name!r} is not one of {', '.join(ENGINES)}", field="engine")
    return found
