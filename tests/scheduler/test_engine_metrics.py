"""Engines' own metrics: vLLM's and SGLang's text, and scrapes of a real engine process."""

from __future__ import annotations

import time

import aiohttp
import pytest
from mocker_process import running_mocker
from scheduler_builders import request, scheduler, worker

from kvscout_common.registry import Registry
from kvscout_common.worker import EngineKind
from kvscout_scheduler.engine_metrics import NO_METRICS, EngineMetrics, read_engine_metrics
from kvscout_scheduler.scraper import EngineScraper

VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 7.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} NaN
"""
SGLANG = """
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 1.0
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.5
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"} 1.5
"""


def test_vllm_tells_each_rank() -> None:
    assert read_engine_metrics(VLLM, [0, 1]) == {0: EngineMetrics(0.25, 3, 0), 1: EngineMetrics(None, 5, 7)}


def test_the_samples_of_a_worker_with_one_rank_are_its_own_whatever_they_call_it() -> None:
    text = VLLM.replace('engine="1"', 'other="1"')
    assert read_engine_metrics(text, [4])[4].running_requests == 5
    assert 2 not in read_engine_metrics(VLLM, [1, 2])


def test_sglang_tells_of_its_fullest_process() -> None:
    assert read_engine_metrics(SGLANG, [0]) == {0: EngineMetrics(1.0, 2, 1)}


def test_older_vllm_calls_its_usage_otherwise() -> None:
    text = VLLM.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert read_engine_metrics(text, [0, 1])[0].kv_cache_usage == 0.25


def test_what_is_no_prometheus_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_engine_metrics("<html>{", [0])
    assert read_engine_metrics("", [0]) == {}


async def test_an_engine_is_asked_and_forgotten_when_it_is_gone() -> None:
    made = scheduler()
    registry = Registry(time.monotonic)
    registry.listen(made.workers)
    scraper = EngineScraper(made, registry, 60)
    async with aiohttp.ClientSession() as http:
        async with running_mocker("--dp-size", "2") as mocker:
            registry.register(worker("w", dp_size=2, engine=EngineKind.MOCK, http_endpoint=mocker.url + "/"))
            registry.register(worker("custom", engine=EngineKind.CUSTOM, http_endpoint=mocker.url))
            await scraper.round(http, [entry.spec for entry in registry.entries()])
            pool = made.workers.pool(request([1]).pool)
            assert pool.metrics == {pool.slot_of["w", rank]: EngineMetrics(0.0, 0, 0) for rank in (0, 1)}
        await scraper.round(http, [entry.spec for entry in registry.entries()])
        assert scraper.failures == 1
        assert set(pool.metrics.values()) == {NO_METRICS}
        # Nobody asks again to forget it, and a worker that is gone meanwhile disturbs nothing.
        gone = registry.get("default", "w").spec
        registry.remove("default", "w")
        await scraper.round(http, [gone])
        assert scraper.failures == 2
