"""How fast engines are by their own metrics, and that it is a belief and no more."""

from __future__ import annotations

import time
from random import Random

import pytest
from aiohttp import web
from support.scheduler_builders import ManualClock, scheduler, worker
from support.seeds import test_seed
from support.web_servers import web_server

from kvscout_common.http.factory import http_client
from kvscout_common.registry.registry import Registry
from kvscout_scheduler.estimates.engine_rates import NOTHING, RateSums, rates_by, read_rate_sums
from kvscout_scheduler.estimates.first_rates import UNKNOWN, Rates
from kvscout_scheduler.scraper import EngineScraper
from kvscout_scheduler.values.request import SelectionRequest

VLLM = """
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 100.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 100.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 1.65
vllm:request_prefill_time_seconds_count{engine="1",model_name="m"} 100.0
vllm:request_prefill_time_seconds_sum{engine="1",model_name="m"} 1.65
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 100000.0
vllm:request_prefill_kv_computed_tokens_sum{engine="1",model_name="m"} 100000.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 400000.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 400000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 300000.0
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 20000.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 220.0
"""
SGLANG = """
sglang:time_to_first_token_seconds_sum{model_name="m"} 12.0
sglang:time_to_first_token_seconds_count{model_name="m"} 100.0
sglang:queue_time_seconds_sum{model_name="m",tp_rank="0"} 2.0
sglang:prompt_tokens_total{model_name="m"} 300000.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 150000.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 50000.0
sglang:inter_token_latency_seconds_sum{model_name="m"} 40.0
sglang:inter_token_latency_seconds_count{model_name="m"} 2000.0
"""


def test_vllm_tells_what_its_ranks_have_done() -> None:
    assert read_rate_sums(VLLM.encode()) == pytest.approx(RateSums(3.3, 200, 200_000, 220.0, 20_000))


def test_older_vllm_does_not_tell_what_it_computed_and_calls_gaps_otherwise() -> None:
    page = VLLM.replace("request_prefill_kv_computed", "other").replace("inter_token_latency", "time_per_output_token")
    assert read_rate_sums(page.encode()) == pytest.approx(RateSums(3.3, 200, 100_000, 220.0, 20_000))


def test_sglang_tells_first_tokens_without_the_queue_and_prompts_without_what_was_cached() -> None:
    assert read_rate_sums(SGLANG.encode()) == pytest.approx(RateSums(10.0, 100, 100_000, 40.0, 2_000))


@pytest.mark.parametrize("value", ["-1", "NaN", "+Inf", "1e300"])
def test_nonsense_is_nothing(value: str) -> None:
    for page in (VLLM, SGLANG):
        for line in page.splitlines():
            if line and not line.startswith("#"):
                broken = page.replace(line, line.rpartition(" ")[0] + " " + value)
                sums = read_rate_sums(broken.encode())
                assert all(0 <= each < 2**53 for each in sums), line
                assert rates_by(sums, UNKNOWN) is None or all(
                    1e-10 < rate < 1 for rate in rates_by(sums, UNKNOWN) or ()
                )
    assert read_rate_sums(b"") == read_rate_sums(b"<html>") == NOTHING


def test_rates_are_a_prefills_time_without_its_step_and_the_gap_of_a_usual_batch() -> None:
    rates = rates_by(RateSums(3.3, 200, 200_000, 220.0, 20_000), UNKNOWN)
    # Gaps of 11 ms are 10 ms and 50,000 tokens of 20 ns, as believed; a prefill of 1,000 tokens takes 16.5 ms.
    assert rates == pytest.approx(Rates(6.5e-6, 0.01, 20e-9))


def test_little_says_nothing_and_what_is_not_told_is_believed() -> None:
    assert rates_by(NOTHING, UNKNOWN) is None
    assert rates_by(RateSums(9.0, 2, 10_000, 9.0, 31), UNKNOWN) is None
    assert rates_by(RateSums(0.0, 500, 10_000, 0.0, 500), UNKNOWN) is None
    only_gaps = rates_by(RateSums(gap_seconds=220.0, gaps=10_000), UNKNOWN)
    assert only_gaps == pytest.approx(Rates(50e-6, 0.02, 40e-9))
    only_prompts = rates_by(RateSums(20.0, 100, 100_000), UNKNOWN)
    assert only_prompts == pytest.approx(Rates(190e-6, 0.01, 20e-9))


def test_rates_are_bounded_whatever_engines_say() -> None:
    rng = Random(test_seed())
    for _ in range(2_000):
        sums = RateSums(*(10 ** rng.uniform(-12, 15) for _ in range(5)))
        token, step, context = rates_by(sums, UNKNOWN) or UNKNOWN
        assert 1e-8 <= token <= 0.1
        assert 1e-5 <= step <= 10.0
        assert 0 < context <= 1e-4


def test_what_was_done_lately_is_the_difference_and_what_went_back_is_nothing() -> None:
    before = RateSums(3.0, 200, 1_000, 200.0, 20_000)
    assert RateSums(5.0, 300, 3_000, 210.0, 21_000).since(before) == RateSums(2.0, 100, 2_000, 10.0, 1_000)
    assert RateSums(1.0, 300, 3_000, 210.0, 21_000).since(before) == RateSums(0.0, 0, 0, 10.0, 1_000)
    assert RateSums(0.1, 3, 30, 0.2, 20).since(before) == NOTHING
    assert before.plus(before) == RateSums(6.0, 400, 2_000, 400.0, 40_000)


async def test_a_scheduler_beside_warm_engines_knows_their_speed_before_its_first_request() -> None:
    clock, pages = ManualClock(), [VLLM]
    made, registry = scheduler(clock=clock, policy="kv-time"), Registry(time.monotonic)
    registry.listen(made.workers)
    app = web.Application()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=pages[0])

    app.add_routes([web.get("/metrics", answer)])
    async with web_server(app) as url, http_client() as http:
        for name in ("a", "b"):
            registry.register(worker(name, http_endpoint=url))
        (pool,) = made.workers
        scraper = EngineScraper(made, registry, 60)

        async def look() -> Rates:
            await scraper.round(http, [entry.spec for entry in registry.entries()])
            return pool.times.rates

        assert pool.times.rates == UNKNOWN
        warm = await look()
        assert warm == pytest.approx(Rates(6.5e-6, 0.01, 20e-9))
        assert await look() == warm, "nothing was done since"
        registry.register(worker("c", http_endpoint=f"{url}/nowhere"))
        assert pool.times.rates == warm, "nor do registrations know better"
        # Since then it was half as fast.
        lines = [line.rpartition(" ") for line in VLLM.splitlines() if line and not line.startswith("#")]
        pages[0] = "".join(f"{name} {float(value) * (3 if 'seconds_sum' in name else 2)}\n" for name, _, value in lines)
        assert (await look()).step == pytest.approx(0.02)
        # It began anew, and tells what cannot be read.
        pages[0] = VLLM
        assert (await look()).step == pytest.approx(0.02)
        pages[0] = 'vllm:request_prompt_tokens_sum{engine="0 3\nvllm:num_requests_running 3\n'
        assert (await look()).step == pytest.approx(0.02)
        assert scraper.failures == 3, "of c alone"
        asked = SelectionRequest("m", 1_600, request_id="r", attempt_id=1)
        made.select_and_reserve(asked)
        clock.advance(0.5)
        made.mark_prefill_complete(asked.key, 1)
        made.free(asked.key, 1, output_tokens=1)
        clock.advance(1.0)
        made.select(SelectionRequest("m", 1_600))
        observed = pool.times.rates
        pages[0] = VLLM.replace(" 220.0", " 900000.0")
        assert await look() == observed
