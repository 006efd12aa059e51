"""What is believed of workers before any request: from models' names, labels and arithmetic."""

from __future__ import annotations

import pytest
from support.scheduler_builders import ManualClock, scheduler, worker

from kvscout_common.worker import DeviceClass
from kvscout_lab.simulation.known_engines import known_engine
from kvscout_scheduler.estimates.first_rates import UNKNOWN, accelerator_of, first_rates, model_of, rates_of
from kvscout_scheduler.values.request import SelectionRequest


@pytest.mark.parametrize(
    ("name", "total", "active", "weight_bytes"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8, 8, 2),
        ("70b-fp8", 70, 70, 1),
        ("/models/llama_70b_w8a8", 70, 70, 1),
        ("Llama-3.3-70B-Instruct-AWQ", 70, 70, 0.5),
        ("gemma-2-9b-it-bnb-4bit", 9, 9, 0.5),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 30, 3, 2),
        ("Qwen3-235B-A22B-FP8", 235, 22, 1),
        ("Qwen2.5-0.5B", 0.5, 0.5, 2),
        ("Qwen2.5-7B-Instruct-1M", 7, 7, 2),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46.7, 12.9, 2),
        ("mixtral-8x22b", 141, 39, 2),
        ("openai/gpt-oss-120b", 117, 5.1, 0.5),
        ("Llama-4-Scout-17B-16E-Instruct-FP8", 109, 17, 1),
        ("deepseek-ai/DeepSeek-R1", 671, 37, 1),
        ("DeepSeek-R1-Distill-Qwen-32B", 32, 32, 2),
        ("google/gemma-3n-E4B-it", 4, 4, 2),
        ("nomic-embed-137M", 0.137, 0.137, 2),
    ],
)
def test_a_models_name_tells_its_size(name: str, total: float, active: float, weight_bytes: float) -> None:
    model = model_of(name)
    assert model is not None
    assert (model.total_billions, model.active_billions) == pytest.approx((total, active), rel=0.04)
    assert model.weight_bytes == weight_bytes


@pytest.mark.parametrize(
    "name", ["m", "", "gpt2", "bge-m3", "0b", "0m", "99999b", "8bits", "v8b1", "٣b", "b" * 256, "1." * 128, "8x" * 128]
)
def test_of_a_name_that_tells_nothing_the_usual_is_believed(name: str) -> None:
    assert model_of(name) is None
    assert rates_of(worker("w", model=name or "m", labels={"gpu": "h100"})) == UNKNOWN


def test_accelerators_are_found_as_their_makers_and_clouds_write_them() -> None:
    for text, tflops in {
        "NVIDIA-H100-80GB-HBM3": 989.4,
        "nvidia-h100-mega-80gb": 989.4,
        "nvidia-tesla-a100": 312.0,
        "NVIDIA-A10G": 70.0,
        "nvidia-l4": 121.0,
        "NVIDIA-L40S": 362.0,
        "AMD_Instinct_MI300X_OAM": 1_307.0,
        "NVIDIA GeForce RTX 4090": 165.0,
        "Tesla-T4": 65.0,
    }.items():
        found = accelerator_of(text.replace("_", "-"))
        assert found is not None, text
        assert found.bf16_tflops == tflops
    assert accelerator_of("abacus") is accelerator_of("") is accelerator_of("h1000") is None


@pytest.mark.parametrize(
    ("engine", "model", "ways"),
    [
        ("8b-bf16-h100", "Llama-3.1-8B", 1),
        ("70b-bf16-tp4-h100", "Llama-3.3-70B", 4),
        ("70b-fp8-tp8-h100", "Llama-3.3-70B-FP8", 8),
        ("235b-moe-fp8-tp8-h100", "Qwen3-235B-A22B-FP8", 8),
    ],
)
def test_rates_are_those_of_engines_that_are_known_within_a_factor_of_two(engine: str, model: str, ways: int) -> None:
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "tensor_parallel_size": str(ways)}
    rates, known = rates_of(worker("w", model=model, labels=labels)), known_engine(engine).step
    assert 0.7 < rates.prompt_token * 1e6 / known.prefill_us_per_token < 1.4
    assert 0.5 < rates.step * 1e3 / (known.base_ms + known.host_ms) < 1.5
    assert 0.5 < rates.context_token * 1e9 / known.context_ns_per_token < 2


def test_who_says_no_number_of_accelerators_has_as_many_as_the_weights_need() -> None:
    one, many = ({"gpu": "h100", "tp": ways} for ways in ("1", "4"))
    assert rates_of(worker("w", model="8b", labels={"gpu": "h100"})) == rates_of(worker("w", model="8b", labels=one))
    assert rates_of(worker("w", model="70b", labels={"gpu": "h100"})) == rates_of(worker("w", model="70b", labels=many))
    for ways in ("0", "-1", "many", "9" * 200, "٣"):
        labels = {"gpu": "h100", "tp": ways}
        assert rates_of(worker("w", model="8b", labels=labels)) == rates_of(worker("w", model="8b", labels=one))


def test_slower_devices_and_larger_models_are_believed_to_be_slower() -> None:
    rates = [rates_of(worker("w", model="8b", labels={"gpu": name})) for name in ("b200", "h100", "a100", "l4")]
    rates.append(rates_of(worker("w", model="8b", device_class=DeviceClass.CPU)))
    assert rates == sorted(rates)
    rates = [rates_of(worker("w", model=name)) for name in ("0.6B", "8B", "32B", "70B")]
    assert rates == sorted(rates)
    assert rates[1].prompt_token == pytest.approx(UNKNOWN.prompt_token, rel=0.25)


def test_a_pool_is_what_most_of_its_workers_are() -> None:
    specs = [worker("a", model="8b", labels={"gpu": "l4"})]
    specs += [worker(name, model="8b", labels={"gpu": "h100"}) for name in "bcd"]
    assert first_rates(specs) == rates_of(specs[1])
    assert first_rates([]) == UNKNOWN


def test_a_pool_begins_with_what_its_registrations_say_and_goes_on_with_what_happens() -> None:
    clock = ManualClock()
    spec = worker("w", model="Qwen3-0.6B", labels={"gpu": "h100"})
    made = scheduler(spec, clock=clock)
    (pool,) = made.workers
    assert pool.times.rates == rates_of(spec)
    # Another worker, another belief, as long as nothing was observed.
    other = worker("v", model="Qwen3-0.6B", labels={"gpu": "a100"})
    made.workers.worker_removed(spec, "removed")
    made.workers.worker_added(other)
    (pool,) = made.workers
    assert pool.times.rates == rates_of(other)
    for number in range(12):
        asked = SelectionRequest("Qwen3-0.6B", 1_600, request_id=f"r{number}", attempt_id=1)
        made.select_and_reserve(asked)
        clock.advance(0.5)
        made.mark_prefill_complete(asked.key, 1)
        made.free(asked.key, 1, output_tokens=1)
        clock.advance(1.0)
    learned = pool.times.rates
    assert pool.times.prefill.at(1_600) == pytest.approx(0.5, rel=0.2)
    made.workers.worker_added(spec)
    assert pool.times.rates == learned
