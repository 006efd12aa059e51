"""Engines' own metrics: vLLM's and SGLang's text, and scrapes of a real engine process."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web
from support.mocker_process import running_mocker
from support.scheduler_builders import ManualClock, key, request, reserve, scheduler, worker
from support.web_servers import web_server

from kvscout_common.errors import ResourceExhausted
from kvscout_common.http.factory import http_client
from kvscout_common.registry.registry import Registry
from kvscout_common.rpc.service_info import TenantWarning
from kvscout_common.worker import EngineKind, WorkerRank
from kvscout_scheduler.estimates.engine_metrics import NO_METRICS, EngineMetrics, read_engine_metrics
from kvscout_scheduler.rpc.listing import potential_loads
from kvscout_scheduler.scraper import EngineScraper
from kvscout_scheduler.values.thresholds import BusyThresholds

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
    assert read_engine_metrics(VLLM.encode(), [0, 1]) == {0: EngineMetrics(0.25, 3, 0), 1: EngineMetrics(None, 5, 7)}


def test_the_samples_of_a_worker_with_one_rank_are_its_own_whatever_they_call_it() -> None:
    text = VLLM.replace('engine="1"', 'other="1"')
    assert read_engine_metrics(text.encode(), [4])[4].running_requests == 5
    assert 2 not in read_engine_metrics(VLLM.encode(), [1, 2])


def test_sglang_tells_of_its_fullest_process() -> None:
    assert read_engine_metrics(SGLANG.encode(), [0]) == {0: EngineMetrics(1.0, 2, 1)}


def test_older_vllm_calls_its_usage_otherwise() -> None:
    text = VLLM.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert read_engine_metrics(text.encode(), [0, 1])[0].kv_cache_usage == 0.25


def test_a_metric_that_cannot_be_read_is_an_error_and_none_at_all_is_nothing() -> None:
    with pytest.raises(ValueError, match="labels"):
        read_engine_metrics(b'vllm:num_requests_running{engine="0" 3', [0])
    assert read_engine_metrics(b"", [0]) == read_engine_metrics(b"<html>{", [0]) == {}


@pytest.mark.parametrize("value", ["-1", "NaN", "+Inf", "1e300", str(2**32)])
def test_numbers_that_are_no_count_are_not_taken(value: str) -> None:
    assert read_engine_metrics(f"vllm:num_requests_running {value}\n".encode(), [0]) == {}


def test_ranks_of_any_length_are_nobodys() -> None:
    text = VLLM.replace('engine="1"', f'engine="{"9" * 5000}"').replace('engine="0"', 'engine="٣"')
    assert read_engine_metrics(text.encode(), [0, 3]) == {}


async def test_the_whole_page_is_read_however_it_comes() -> None:
    """172 KB in chunks: what is asked for stands at the end."""
    made = scheduler()
    registry = Registry(time.monotonic)
    registry.listen(made.workers)
    page = "".join(f'vllm:other_bucket{{le="{number}"}} 0\n' for number in range(6000)) + VLLM

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(page), 10_007):
            await response.write(page[start : start + 10_007].encode())
            await asyncio.sleep(0)
        return response

    app = web.Application()
    app.add_routes([web.get("/metrics", answer)])
    async with web_server(app) as url, http_client() as http:
        registry.register(worker("w", dp_size=2, http_endpoint=url))
        scraper = EngineScraper(made, registry, 60)
        await scraper.round(http, [entry.spec for entry in registry.entries()])
        pool = made.workers.pool(request([1]).pool)
        assert scraper.failures == 0
        assert pool.metrics == {
            pool.slot_of["w", 0]: EngineMetrics(0.25, 3, 0),
            pool.slot_of["w", 1]: EngineMetrics(None, 5, 7),
        }


def test_what_an_engine_said_long_ago_counts_no_more() -> None:
    clock = ManualClock()
    made = scheduler(worker("w", total_kv_blocks=100), clock=clock, thresholds=BusyThresholds(0.5))
    made.report_metrics("default", WorkerRank("w", 0), EngineMetrics(0.9, 3, 7))
    with pytest.raises(ResourceExhausted):
        made.select(request([1]))
    clock.advance(30.0)
    made.expire()
    (load,) = potential_loads(made, key("any").pool)
    assert (load.busy, load.metrics_age_seconds) == (True, 30.0)
    clock.advance(0.1)
    made.expire()
    (load,) = potential_loads(made, key("any").pool)
    assert (load.busy, load.metrics_age_seconds) == (False, None)
    assert made.select(request([1])).rank.worker_id == "w"
    assert made.workers.warnings() == [
        TenantWarning("default", "model m: engine metrics older than 30 s count no more: w/0")
    ]
    made.report_metrics("default", WorkerRank("w", 0), EngineMetrics(0.1))
    assert made.workers.warnings() == []


def test_one_who_waits_for_a_worker_goes_when_what_that_said_is_too_old() -> None:
    clock = ManualClock()
    spec = worker("w", total_kv_blocks=100, max_num_batched_tokens=100)
    made = scheduler(spec, clock=clock, thresholds=BusyThresholds(0.5), queue_threshold=0.5)
    reserve(made, "r", "w", isl=60)
    told: list[object] = []
    made.reserve_or_wait(request(isl=1, request_id="s"), told.append)
    made.report_metrics("default", WorkerRank("w", 0), EngineMetrics(0.9))
    made.free(key("r"))
    assert told == []
    clock.advance(31.0)
    made.expire()
    assert len(told) == 1


async def test_an_engine_is_asked_and_forgotten_when_it_is_gone() -> None:
    made = scheduler()
    registry = Registry(time.monotonic)
    registry.listen(made.workers)
    scraper = EngineScraper(made, registry, 60)
    async with http_client() as http:
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
