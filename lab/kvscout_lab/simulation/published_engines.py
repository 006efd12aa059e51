"""What others measured of engines and published, as data: nothing here was measured or chosen by the laboratory.

Set-ups are what the sources say of them. Where they do not say, the common default is assumed: at most 2,048 requests
and 8,192 tokens a step, and 95 % of the memory, for TensorRT-LLM. Keys and values are in FP8 where the weights are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from kvscout_lab.simulation.known_engines import (
    A100,
    H100,
    H200,
    LLAMA_7B,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    MEMORY_USED,
    MI300X,
    Accelerator,
    KnownEngine,
    Model,
)


class Host(NamedTuple):
    """What the program that serves takes on the host."""

    name: str
    ms: float
    """Of a step."""
    us_per_request: float


TRT_LLM: Final = Host("TensorRT-LLM", 1.9, 3.7)
VLLM_2024: Final = Host("vLLM of 2024", 3.0, 40.0)
VLLM: Final = Host("vLLM 0.10.2", 3.0, 20.0)


class Kind(StrEnum):
    """How it was measured."""

    ALL_AT_ONCE = "all at once"
    """Many requests, as many at a time as fit with their outputs."""
    BATCH = "batch"
    """One batch from its begin to its end."""
    CLIENTS = "clients"
    """So many clients that each send a request when the one before is answered."""


class Measure(StrEnum):
    """What was measured."""

    OUTPUT_RATE = "output tokens/s"
    LATENCY = "latency, s"
    TTFT = "TTFT, ms"
    ITL = "ITL, ms"


class Use(StrEnum):
    """What the row is to the model's constants."""

    FITTED = "fitted"
    """The constants were fitted to it."""
    HELD_OUT = "held out"
    """They were not."""
    NOT_MODELLED = "not modelled"
    """The engine does what the model has no term for; shown, and in no summary."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows are from."""

    title: str
    url: str


@dataclass(frozen=True, slots=True)
class Published:
    """One measured figure."""

    source: Source
    engine: KnownEngine
    host: Host
    kind: Kind
    input_tokens: int
    output_tokens: int
    requests: int
    """At a time: batch, clients or limit of the engine."""
    measure: Measure
    measured: float
    use: Use


TRT_LLM_0_17: Final = Source(
    "TensorRT-LLM 0.17, performance overview",
    "https://github.com/NVIDIA/TensorRT-LLM/blob/258c7540c03517def55d9a5aadfa9288af474e1b/docs/source/performance/perf-overview.md",
)
TRT_LLM_0_5: Final = Source(
    "TensorRT-LLM 0.5.0, performance",
    "https://github.com/NVIDIA/TensorRT-LLM/blob/release/0.5.0/docs/source/performance.md",
)
H200_LAUNCH: Final = Source(
    "TensorRT-LLM 0.5.0, H200 launch",
    "https://github.com/NVIDIA/TensorRT-LLM/blob/1555478c1b417a0b34de05209862ea5a2ab9add1/docs/source/blogs/H200launch.md",
)
NIM: Final = Source("NVIDIA NIM 1.8.0, Llama 3.3 70B", "https://docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance")
ORACLE: Final = Source(
    "Oracle, Llama 3.1 405B on MI300X",
    "https://blogs.oracle.com/cloud-infrastructure/serving-llama-31-405b-model-with-amd-mi300x-gpus",
)
AMD: Final = Source(
    "AMD, vLLM 0.10.2 on MI300X",
    "https://www.amd.com/zh-cn/developer/resources/rocm-hub/dev-ai/performance-results.html",
)

_SHAPES: Final = ((128, 128), (128, 2_048), (2_048, 128), (2_048, 2_048), (5_000, 500), (20_000, 2_000))
_THROUGHPUT: Final = (
    (LLAMA_8B, H100, 1, 1, (28_836.77, 21_109.38, 3_556.73, 9_488.42, 3_559.36, 1_401.31)),
    (LLAMA_8B, H200, 1, 1, (29_526.04, 25_398.86, 3_794.14, 11_968.5, 3_987.79, 1_804.1)),
    (LLAMA_8B, A100, 1, 2, (6_627.27, 5_255.99, 799.61, 2_424.96, 825.13, 330.04)),
    (LLAMA_70B, H200, 1, 1, (4_020.75, 4_165.68, 465.99, 1_913.8, 560.16, 279.52)),
    (LLAMA_70B, H100, 2, 1, (6_645.12, 6_169.58, 772.66, 2_898.16, 919.73, 443.01)),
    (LLAMA_70B, H200, 2, 1, (6_823.01, 8_290.35, 809.0, 4_183.88, 1_025.38, 640.62)),
    (LLAMA_70B, H100, 4, 1, (11_127.53, 11_511.93, 1_302.6, 5_480.03, 1_602.78, 920.19)),
    (LLAMA_70B, H200, 4, 1, (11_098.63, 14_156.0, 1_358.06, 7_130.44, 1_811.55, 1_199.68)),
    (LLAMA_70B, A100, 4, 2, (2_733.48, 2_811.27, 325.15, 1_393.64, 392.62, 212.08)),
    (LLAMA_70B, H100, 8, 1, (14_730.69, 17_061.82, 1_923.41, 8_801.95, 2_457.42, 1_512.6)),
    (LLAMA_70B, H200, 8, 1, (15_355.84, 21_195.88, 1_983.03, 11_142.47, 2_717.83, 1_920.45)),
    (LLAMA_405B, H200, 8, 1, (3_874.19, 5_938.09, 463.42, 2_940.62, 669.13, 535.31)),
)
"""Model, accelerator, tensor parallelism, bytes of a weight, and output tokens/s of each shape."""
_FITTED_SHAPES: Final = ((128, 128), (2_048, 128), (2_048, 2_048), (5_000, 500))
"""Of H100, and of the 8B model on A100; other shapes and set-ups were held out."""
_BATCHES: Final = (
    (TRT_LLM_0_5, LLAMA_7B, H100, 1, 64, 128, 128, 9_193.0, Use.HELD_OUT),
    (TRT_LLM_0_5, LLAMA_7B, H100, 1, 64, 128, 2_048, 5_367.0, Use.HELD_OUT),
    (TRT_LLM_0_5, LLAMA_7B, H100, 1, 64, 2_048, 128, 2_058.0, Use.HELD_OUT),
    (TRT_LLM_0_5, LLAMA_7B, H100, 1, 32, 2_048, 2_048, 2_230.0, Use.HELD_OUT),
    (TRT_LLM_0_5, LLAMA_70B, H100, 4, 64, 128, 128, 3_317.0, Use.NOT_MODELLED),
    (TRT_LLM_0_5, LLAMA_70B, H100, 4, 64, 128, 2_048, 2_616.0, Use.NOT_MODELLED),
    (TRT_LLM_0_5, LLAMA_70B, H100, 4, 64, 2_048, 128, 843.0, Use.NOT_MODELLED),
    (TRT_LLM_0_5, LLAMA_70B, H100, 4, 64, 2_048, 2_048, 1_583.0, Use.NOT_MODELLED),
    (H200_LAUNCH, LLAMA_70B, H200, 1, 512, 128, 128, 3_014.0, Use.NOT_MODELLED),
    (H200_LAUNCH, LLAMA_70B, H200, 1, 64, 2_048, 128, 341.0, Use.NOT_MODELLED),
)
_NIM_ROWS: Final = (
    (1, 406.77, 18.58, 51.67),
    (5, 546.7, 21.83, 218.48),
    (25, 688.69, 38.75, 623.4),
    (50, 834.51, 59.73, 814.37),
    (100, 7_996.0, 92.91, 917.26),
    (150, 34_794.0, 92.86, 920.9),
)
"""Clients, TTFT and ITL in ms, output tokens/s; of 5,000 in and 500 out."""
_NIM_FITTED: Final = (1, 25, 50)
_ORACLE_ROWS: Final = (
    (1, 3.530),
    (2, 3.583),
    (4, 3.734),
    (8, 3.974),
    (16, 4.375),
    (32, 5.130),
    (64, 6.919),
    (128, 10.340),
    (256, 17.750),
)
"""Batch and latency."""
_ORACLE_FITTED: Final = (1, 4, 16, 64, 256)
_AMD_RATES: Final = (
    (LLAMA_70B, 128, 2_048, 3_200, 13_212.5),
    (LLAMA_70B, 500, 2_000, 2_000, 11_376.7),
    (LLAMA_70B, 2_048, 2_048, 1_500, 7_252.1),
    (LLAMA_405B, 128, 2_048, 1_500, 4_201.7),
    (LLAMA_405B, 500, 2_000, 2_000, 2_992.0),
    (LLAMA_405B, 2_048, 2_048, 500, 2_153.7),
)
"""Model, tokens in and out, requests, output tokens/s."""
_AMD_LATENCIES: Final = ((1, 15.882), (2, 17.934), (4, 18.487))
MOST_REQUESTS: Final = 2_048
"""Of TensorRT-LLM at a time."""


def published() -> Iterator[Published]:
    """Yield every row, source by source."""
    for model, gpu, ways, weight_bytes, rates in _THROUGHPUT:
        engine = _engine(model, gpu, ways, weight_bytes, TRT_LLM)
        is_fitted = gpu is H100 or (gpu is A100 and model is LLAMA_8B)
        for (isl, osl), rate in zip(_SHAPES, rates, strict=True):
            use = Use.FITTED if is_fitted and (isl, osl) in _FITTED_SHAPES else Use.HELD_OUT
            limit = min(MOST_REQUESTS, engine.kv_tokens // (isl + osl))
            yield Published(
                TRT_LLM_0_17, engine, TRT_LLM, Kind.ALL_AT_ONCE, isl, osl, limit, Measure.OUTPUT_RATE, rate, use
            )
    engine = _engine(LLAMA_70B, H100, 2, 1, TRT_LLM)
    for clients, ttft, itl, rate in _NIM_ROWS:
        use = Use.FITTED if clients in _NIM_FITTED else Use.HELD_OUT
        for measure, value in ((Measure.TTFT, ttft), (Measure.ITL, itl), (Measure.OUTPUT_RATE, rate)):
            yield Published(NIM, engine, TRT_LLM, Kind.CLIENTS, 5_000, 500, clients, measure, value, use)
    for measure, value in ((Measure.TTFT, 47.77), (Measure.ITL, 18.91), (Measure.OUTPUT_RATE, 52.85)):
        yield Published(NIM, engine, TRT_LLM, Kind.CLIENTS, 500, 2_000, 1, measure, value, Use.HELD_OUT)
    for source, model, gpu, ways, batch, isl, osl, rate, use in _BATCHES:
        engine = _engine(model, gpu, ways, 1, TRT_LLM)
        yield Published(source, engine, TRT_LLM, Kind.BATCH, isl, osl, batch, Measure.OUTPUT_RATE, rate, use)
    engine = _engine(LLAMA_405B, MI300X, 8, 1, VLLM_2024)
    for batch, latency in _ORACLE_ROWS:
        use = Use.FITTED if batch in _ORACLE_FITTED else Use.HELD_OUT
        yield Published(ORACLE, engine, VLLM_2024, Kind.BATCH, 128, 128, batch, Measure.LATENCY, latency, use)
    for model, isl, osl, limit, rate in _AMD_RATES:
        engine = _engine(model, MI300X, 8, 1, VLLM)
        yield Published(AMD, engine, VLLM, Kind.BATCH, isl, osl, limit, Measure.OUTPUT_RATE, rate, Use.HELD_OUT)
    engine = _engine(LLAMA_70B, MI300X, 8, 1, VLLM)
    for batch, latency in _AMD_LATENCIES:
        yield Published(AMD, engine, VLLM, Kind.BATCH, 128, 2_048, batch, Measure.LATENCY, latency, Use.HELD_OUT)


def _engine(model: Model, gpu: Accelerator, ways: int, weight_bytes: int, host: Host) -> KnownEngine:
    return KnownEngine(
        model,
        gpu,
        ways,
        weight_bytes,
        host.ms,
        host.us_per_request,
        kv_value_bytes=weight_bytes,
        memory_used=0.95 if host is TRT_LLM else MEMORY_USED,
    )
