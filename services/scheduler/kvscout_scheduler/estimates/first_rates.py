"""First estimates of the speed of workers, from their registrations, before any request was served; pure.

::

    seconds a prompt token  = 2 · parameters it goes through / (accelerators · FLOP/s · MFU) + two all-reduces a layer
    seconds of a step       = bytes of the weights / (accelerators · bytes/s · MBU) + host
    seconds a context token = bytes of its keys and values / (accelerators · bytes/s · MBU)

A product and a sum for each parameter: Kaplan et al., https://arxiv.org/abs/2001.08361, 2.1. A step reads all weights,
of experts too: batches use them all. MFU and MBU are what engines achieve of the peaks: those of the laboratory's
engine model, which were fitted to published measurements (docs/engine-model.md). Peaks are of data
sheets, without sparsity. Who is wrong by a factor of two is nearer than one belief for all.

The model's size is read from its name ("Llama-3.1-8B", "Qwen3-30B-A3B", "Mixtral-8x7B-Instruct-AWQ"), or known by it
("gpt-oss-120b", "DeepSeek-R1"). Accelerators are named by labels (`DEVICE_LABELS`, `COUNT_LABELS`); one that is not
named is between an A100 and an H100, and where nobody says how many there are, as many as the weights need.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache
from statistics import median_low
from typing import Final, NamedTuple

from kvscout_common.worker import DeviceClass, WorkerSpec

GIGA: Final = 1e9
TERA: Final = 1e12
MFU_EXPERTS: Final = 0.2
"""Experts are many small matrices."""
LINK_SHARE: Final = 0.65
"""Achieved share of the peak of the links between accelerators."""
LINK_GB_PER_SECOND: Final = 450.0
"""Peak of the links of an accelerator, in one direction, where nobody says another: NVLink of the fourth generation."""
HOST_SECONDS: Final = 0.002
"""Seconds of a step in which no accelerator computes."""
WEIGHTS_SHARE: Final = 0.7
"""Largest share of the memory for weights: the rest is for keys and values."""
MOST_ACCELERATORS: Final = 1_024


class Rates(NamedTuple):
    """Speed of workers, all in seconds."""

    prompt_token: float
    step: float
    """Seconds of a decode step, without contexts."""
    context_token: float
    """Seconds a token of context in a decode step."""


UNKNOWN: Final = Rates(50e-6, 0.01, 20e-9)
"""A model of 8B on one current accelerator, or of 70B on some."""


class Accelerator(NamedTuple):
    """Peaks of one accelerator, without sparsity."""

    bf16_tflops: float
    fp8_tflops: float
    """Peak in FP8; that of BF16 where there is no FP8."""
    gb_per_second: float
    gigabytes: float


class Achieved(NamedTuple):
    """Achieved shares of an accelerator's peaks."""

    mfu: dict[int, float]
    """Of computing, by bytes a weight: scaling and casting cost FP8 more of it."""
    mbu: float
    """Of reading."""


USUALLY: Final = Achieved({2: 0.65, 1: 0.58}, 0.65)
INSTINCT: Final = Achieved({2: 0.38, 1: 0.19}, 0.40)
"""The makers' peaks are higher, what is achieved is not; of BF16 nothing was fitted: as many FLOP/s as of FP8."""


class Model(NamedTuple):
    """Size of a model."""

    total_billions: float
    """Parameters, in billions."""
    active_billions: float
    """Parameters that a token goes through, in billions."""
    weight_bytes: float
    """Bytes of a parameter."""


ACCELERATORS: Final[dict[str, Accelerator]] = {
    "gb200": Accelerator(2_500.0, 5_000.0, 8_000.0, 186.0),
    "gb300": Accelerator(2_500.0, 5_000.0, 8_000.0, 279.0),
    "b200": Accelerator(2_250.0, 4_500.0, 8_000.0, 180.0),
    "b300": Accelerator(2_250.0, 4_500.0, 8_000.0, 270.0),
    "gh200": Accelerator(989.4, 1_978.9, 4_000.0, 96.0),
    "h200": Accelerator(989.4, 1_978.9, 4_800.0, 141.0),
    "h100": Accelerator(989.4, 1_978.9, 3_350.0, 80.0),
    "h800": Accelerator(989.4, 1_978.9, 3_350.0, 80.0),
    "h20": Accelerator(148.0, 296.0, 4_000.0, 96.0),
    "a100": Accelerator(312.0, 312.0, 2_039.0, 80.0),
    "a800": Accelerator(312.0, 312.0, 2_039.0, 80.0),
    "l40s": Accelerator(362.0, 733.0, 864.0, 48.0),
    "l40": Accelerator(181.0, 362.0, 864.0, 48.0),
    "l4": Accelerator(121.0, 242.0, 300.0, 24.0),
    "a10g": Accelerator(70.0, 70.0, 600.0, 24.0),
    "a10": Accelerator(125.0, 125.0, 600.0, 24.0),
    "t4": Accelerator(65.0, 65.0, 320.0, 16.0),
    "v100": Accelerator(125.0, 125.0, 900.0, 32.0),
    "mi355x": Accelerator(2_500.0, 5_000.0, 8_000.0, 288.0),
    "mi325x": Accelerator(1_307.0, 2_614.0, 6_000.0, 256.0),
    "mi300x": Accelerator(1_307.0, 2_614.0, 5_300.0, 192.0),
    "mi250x": Accelerator(383.0, 383.0, 3_277.0, 128.0),
    "gaudi3": Accelerator(1_835.0, 1_835.0, 3_700.0, 128.0),
    "gaudi2": Accelerator(432.0, 865.0, 2_450.0, 96.0),
    "rtx4090": Accelerator(165.0, 330.0, 1_008.0, 24.0),
    "rtx5090": Accelerator(210.0, 419.0, 1_792.0, 32.0),
}
"""By name; peaks of their makers' data sheets, T4 and V100 in FP16."""
USUAL: Final = Accelerator(600.0, 1_200.0, 2_600.0, 80.0)
"""One that is not named."""
CPU: Final = Accelerator(4.0, 4.0, 300.0, 512.0)
"""A server's processor with matrix instructions."""
DEVICE_LABELS: Final = frozenset(
    {"gpu", "gpu.product", "gpu-type", "gpu_type", "gke-accelerator", "accelerator", "device", "device_class"}
)
"""Labels that name the accelerator, without what stands before a "/", such as `nvidia.com/gpu.product`."""
COUNT_LABELS: Final = frozenset({"tensor_parallel_size", "tensor-parallel-size", "tp_size", "tp", "gpus"})
"""Labels that say how many accelerators each rank of the worker has."""

_NAMES: Final = re.compile(
    "(?<![a-z0-9])(?:" + "|".join(sorted(ACCELERATORS, key=len, reverse=True)) + ")(?![0-9])", re.ASCII
)
_INSTINCT: Final = re.compile(r"(?<![a-z0-9])mi\d{3}", re.ASCII)
_SIZE: Final = re.compile(
    r"(?<![a-z0-9.])e?(\d{1,4}(?:\.\d{1,3})?)b(?:-a(\d{1,3}(?:\.\d{1,3})?)b)?(?![a-z0-9])", re.ASCII
)
_MILLIONS: Final = re.compile(r"(?<![a-z0-9.])(\d{1,4})m(?![a-z0-9])", re.ASCII)
_MIXTURE: Final = re.compile(r"(?<![a-z0-9.])(\d{1,3})x(\d{1,3}(?:\.\d{1,3})?)b(?![a-z0-9])", re.ASCII)
_EIGHT_BITS: Final = re.compile(r"(?<![a-z0-9])(?:fp8|int8|w8a8|w8a16|8bit|8-bit)(?![0-9])", re.ASCII)
_FOUR_BITS: Final = re.compile(
    r"(?<![a-z0-9])(?:awq|gptq|int4|w4a16|4bit|4-bit|nvfp4|mxfp4|fp4|bnb)(?![0-9])", re.ASCII
)
_BY_NAME: Final = (
    ("gpt-oss-120b", Model(117.0, 5.1, 0.5)),
    ("gpt-oss-20b", Model(21.0, 3.6, 0.5)),
    ("llama-4-scout", Model(109.0, 17.0, 2.0)),
    ("llama-4-maverick", Model(400.0, 17.0, 2.0)),
)
"""Models whose names say less, or something else."""
_BY_FAMILY: Final = (
    ("deepseek-v3", Model(671.0, 37.0, 1.0)),
    ("deepseek-r1", Model(671.0, 37.0, 1.0)),
    ("kimi-k2", Model(1_000.0, 32.0, 1.0)),
    ("glm-4.5-air", Model(106.0, 12.0, 2.0)),
    ("glm-4.5", Model(355.0, 32.0, 2.0)),
    ("glm-4.6", Model(355.0, 32.0, 2.0)),
)
"""Families whose names usually say no size; "DeepSeek-R1-Distill-Qwen-32B" says one."""


def seconds_a_prompt_token(billions: float, tflops: float, mfu: float) -> float:
    """Return the seconds of computing a prompt token.

    Args:
        billions: Parameters that a token goes through.
        tflops: Peak of all accelerators, FLOP/s in units of 10¹².
        mfu: Achieved share of it.
    """
    return 2 * billions * GIGA / (tflops * TERA * mfu)


def seconds_to_read(size: float, gb_per_second: float, mbu: float) -> float:
    """Return the seconds of reading memory.

    Args:
        size: In bytes, over all accelerators.
        gb_per_second: Peak of all accelerators.
        mbu: Achieved share of it.
    """
    return size / (gb_per_second * GIGA * mbu)


def seconds_to_reduce(values: float, ways: int, gb_per_second: float) -> float:
    """Return the seconds of the all-reduces of a token: each layer has two, of two bytes a value.

    Args:
        values: Values between layers, over all layers.
        ways: Accelerators that each have a part of every layer.
        gb_per_second: Peak of the links of one, in one direction.
    """
    return 2 * values * 2 * 2 * (ways - 1) / ways / (gb_per_second * GIGA * LINK_SHARE)


def achieved(device: str) -> Achieved:
    """Return what an accelerator achieves of its peaks.

    Args:
        device: Its name, in small letters.
    """
    return INSTINCT if _INSTINCT.search(device) else USUALLY


def first_rates(specs: Iterable[WorkerSpec]) -> Rates:
    """Return the first estimate of a pool: the lower median of its workers, each rate by itself.

    Args:
        specs: Registrations of its workers.
    """
    found = [rates_of(spec) for spec in specs]
    if not found:
        return UNKNOWN
    return Rates(*(median_low(column) for column in zip(*found, strict=True)))


def rates_of(spec: WorkerSpec) -> Rates:
    """Return the first estimate of a worker; `UNKNOWN` if its model's name says no size."""
    device, count = "", 0
    for key, value in sorted(spec.labels.items()):
        name = key.rpartition("/")[2].lower()
        if name in DEVICE_LABELS:
            device = device or value
        elif name in COUNT_LABELS and value.isdecimal() and value.isascii() and len(value) <= 4:
            count = count or min(int(value), MOST_ACCELERATORS)
    return _rates(spec.model, device, count, spec.device_class is DeviceClass.CPU)


def model_of(name: str) -> Model | None:
    """Return the size of a model by its name; None = it says none."""
    name = name.lower().replace("_", "-")
    weight_bytes = 0.5 if _FOUR_BITS.search(name) else 1.0 if _EIGHT_BITS.search(name) else 0.0
    if known := next((known for part, known in _BY_NAME if part in name), None):
        return known._replace(weight_bytes=weight_bytes or known.weight_bytes)
    if found := _MIXTURE.search(name):
        experts, each = int(found[1]), float(found[2])
        # Attention is shared, and a token goes through two experts: 8x7B is 46.7 and 12.9, 8x22B 141 and 39.
        total, active = 0.82 * experts * each, min(0.82 * experts, 1.8) * each
    elif found := _SIZE.search(name):
        total = float(found[1])
        active = float(found[2]) if found[2] else total
    elif known := next((known for family, known in _BY_FAMILY if family in name), None):
        return known._replace(weight_bytes=weight_bytes or known.weight_bytes)
    elif found := _MILLIONS.search(name):
        total = active = float(found[1]) / 1e3
    else:
        return None
    return Model(total, min(active, total), weight_bytes or 2.0) if active > 0 else None


def accelerator_of(name: str) -> Accelerator | None:
    """Return the accelerator that a label names; None = none that is known."""
    found = _NAMES.search(name.lower().replace("rtx ", "rtx").replace("rtx-", "rtx").replace("geforce-", ""))
    return ACCELERATORS[found[0]] if found else None


@lru_cache(maxsize=1_024)
def _rates(name: str, device: str, count: int, cpu: bool) -> Rates:
    model = model_of(name)
    if model is None:
        return UNKNOWN
    each = accelerator_of(device) or (CPU if cpu else USUAL)
    size = model.total_billions * GIGA * model.weight_bytes
    ways = count or 1
    while not count and ways < MOST_ACCELERATORS and size > ways * each.gigabytes * GIGA * WEIGHTS_SHARE:
        ways *= 2
    # Weights of four bits are unpacked to be computed with.
    eight = model.weight_bytes == 1.0
    shares = achieved(device.lower())
    mfu = MFU_EXPERTS if model.active_billions < model.total_billions else shares.mfu[1 if eight else 2]
    read = ways * each.gb_per_second
    tflops = ways * (each.fp8_tflops if eight else each.bf16_tflops)
    return Rates(
        seconds_a_prompt_token(model.active_billions, tflops, mfu)
        + seconds_to_reduce(_values_between_layers(model), ways, LINK_GB_PER_SECOND),
        seconds_to_read(size, read, shares.mbu) + HOST_SECONDS,
        seconds_to_read(_context_bytes(model), read, shares.mbu),
    )


def _context_bytes(model: Model) -> float:
    """Return keys and values of a token, about: 131,072 bytes of Llama 3.1 8B, 327,680 of 70B, 524,288 of 405B."""
    return 131_072.0 * math.pow(math.sqrt(model.total_billions * model.active_billions) / 8.0, 0.4)


def _values_between_layers(model: Model) -> float:
    """Return layers times hidden size, about: 131,072 of Llama 3.1 8B, 655,360 of 70B, 2,064,384 of 405B."""
    return 131_072.0 * math.pow(model.active_billions / 8.0, 0.7)
