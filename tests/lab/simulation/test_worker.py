"""One simulated engine: what a step takes, what it holds, and that jumps are steps."""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random

import pytest
from support.laboratory_worlds import ENGINE, SIZE
from support.seeds import test_seed

from kvscout_common.errors import ConfigError
from kvscout_lab.simulation.kv_cache import KvCache
from kvscout_lab.simulation.records import Gaps
from kvscout_lab.simulation.timing import StepTime
from kvscout_lab.simulation.worker import NEVER, EngineSettings, Gap, Job, Worker

MS = 1_000_000_000
PLAIN = EngineSettings(
    block_size=10,
    kv_tokens=1_000,
    max_num_batched_tokens=100,
    max_num_seqs=10,
    step=StepTime(base_ms=1.0, prefill_us_per_token=10.0, decode_us_per_request=100.0, context_ns_per_token=1_000.0),
)


def job(prompt: int, output: int, first_node: int = 1, size: int = 10) -> Job:
    nodes = array("Q", range(first_node, first_node + (prompt + output) // size))
    return Job(None, nodes, prompt, output)


def ends(worker: Worker) -> list[tuple[int, str]]:
    """Runs a worker until it is idle: when tokens that matter came."""
    found = []
    while worker.end != NEVER:
        now = worker.end
        found += [(now, "end" if done.finished else "first") for done in worker.finish()[0]]
        worker.begin(now)
        worker.check_invariants()
    return found


def test_a_prompt_is_computed_in_chunks_of_the_budget_and_each_decode_step_reads_the_whole_context() -> None:
    worker = Worker(PLAIN)
    worker.submit(job(prompt=250, output=3), 0)
    # 100 + 100 + 50 tokens, 1 ms each and 10 µs a token; then contexts of 251 and 252 tokens, 1 µs a token.
    first = 3 * MS + 250 * MS // 100
    decode = 2 * (MS + MS // 10) + (251 + 252) * MS // 1_000
    assert ends(worker) == [(first, "first"), (first + decode, "end")]
    assert worker.busy_time == first + decode


def test_a_prompt_seen_before_computes_its_last_token_only() -> None:
    worker = Worker(PLAIN)
    worker.submit(job(prompt=200, output=1), 0)
    assert ends(worker) == [(2 * MS + 2 * MS, "end")]
    again = job(prompt=200, output=1)
    worker.submit(again, 10 * MS)
    assert ends(worker) == [(11 * MS + 10 * MS // 100, "end")]
    assert again.cached_tokens == 190


def test_a_request_that_arrives_in_a_jump_is_looked_at_at_the_next_boundary() -> None:
    worker = Worker(PLAIN)
    worker.submit(job(prompt=10, output=9), 0)
    now = worker.end
    worker.finish()
    worker.begin(now)
    jump = worker.end
    worker.submit(job(prompt=10, output=1, first_node=100), now + MS // 2)
    assert worker.end < jump
    # One step with a context of 11 tokens.
    assert worker.end == now + MS + MS // 10 + 11 * MS // 1_000


def test_a_request_that_fits_into_no_empty_cache_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        Worker(PLAIN).submit(job(prompt=1_000, output=1), 0)
    assert raised.value.field == "kv_tokens"


def test_speed_divides_every_time() -> None:
    slow, fast = Worker(PLAIN, 0.5, 0.5), Worker(PLAIN, 2.0, 2.0)
    for worker in (slow, fast):
        worker.submit(job(prompt=200, output=5), 0)
    assert [(time // 4, what) for time, what in ends(slow)] == ends(fast)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", 0), ("kv_tokens", 0), ("max_num_batched_tokens", 0), ("max_num_seqs", 128), ("max_jump", 0)],
)
def test_settings_out_of_range_are_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError) as raised:
        replace(ENGINE, **{field: value}).validate()  # type: ignore[arg-type]  # every one is an int
    assert raised.value.field == field


@pytest.mark.parametrize(
    "field", ["base_ms", "prefill_us_per_token", "context_ns_per_token", "attention_ps_per_pair", "host_ms"]
)
def test_rates_out_of_range_are_named(field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        StepTime(**{field: float("nan")}).validate()  # type: ignore[arg-type]  # every one is a rate
    assert raised.value.field == field


def test_random_requests_leave_nothing_behind_and_jumps_equal_steps() -> None:
    rng = Random(test_seed())
    tight = replace(ENGINE, kv_tokens=640)
    jumping, stepping = Worker(tight), Worker(replace(tight, max_jump=1))
    gaps = Gaps(), Gaps()
    times = sorted(rng.randrange(3_000 * MS) for _ in range(120))
    lengths = [(rng.randint(1, 200), rng.randint(1, 200), rng.randrange(1, 40)) for _ in times]

    def run(worker: Worker, counted: Gaps) -> list[tuple[object, ...]]:
        jobs = [
            Job(number, array("Q", range(family * 1_000, family * 1_000 + (prompt + output) // SIZE)), prompt, output)
            for number, (prompt, output, family) in enumerate(lengths)
        ]
        told: list[tuple[object, ...]] = []
        waiting = list(zip(times, jobs, strict=True))
        while waiting or worker.end != NEVER:
            if waiting and waiting[0][0] <= worker.end:
                now, one = waiting.pop(0)
                worker.submit(one, now)
            else:
                now = worker.end
                done, gap, late = worker.finish()
                told += [(now, each.job.request, each.finished, each.job.cached_tokens) for each in done]
                told += [("late", *each) for each in late]
                if gap is not None:
                    counted.add(gap)
                worker.begin(now)
            worker.check_invariants()
        assert not worker.cache.used
        return told

    assert run(jumping, gaps[0]) == run(stepping, gaps[1])
    assert jumping.preemptions == stepping.preemptions > 0
    assert (gaps[0].counts, gaps[0].total) == (gaps[1].counts, gaps[1].total)
    assert jumping.busy_time == stepping.busy_time


def test_growing_steps_are_counted_as_if_one_by_one() -> None:
    rng = Random(test_seed())
    for _ in range(200):
        first, growth, steps, requests = (rng.randrange(1, top) for top in (10**10, 10**8, 400, 20))
        together, one_by_one = Gaps(), Gaps()
        together.add(Gap(first, growth, steps, requests))
        for step in range(steps):
            one_by_one.add(Gap(first + step * growth, 0, 1, requests))
        assert (together.counts, together.total) == (one_by_one.counts, one_by_one.total)
    assert Gaps().percentile(50) == 0


def test_percentiles_of_gaps_are_exact_to_a_hundredth() -> None:
    gaps = Gaps()
    for length in range(1, 1_001):
        gaps.add(Gap(length * MS, 0, 1, 1))
    for percent in (50, 90, 99):
        assert gaps.percentile(percent) == pytest.approx(percent * 10 * MS, rel=0.011)


def test_the_least_recently_used_block_goes_first_and_last_blocks_before_first_ones() -> None:
    cache = KvCache(4)
    for nodes in ((1, 2), (3,)):
        cache.acquire((), len(nodes))
        for node in nodes:
            assert cache.register(node)
        cache.release(nodes, 0)
    assert cache.hit([1, 2, 9]) == 2
    cache.acquire((), 3)
    assert cache.take_events() == [1, 2, 3, -2, -1]
    assert not cache.fits([], 2)
    assert cache.fits([3], 0)
    cache.check_invariants()


def test_what_is_evicted_goes_to_the_offload_tier_and_leaves_it_when_that_is_full() -> None:
    cache = KvCache(2, offload_capacity=2)

    def hold(*nodes: int) -> None:
        cache.acquire((), len(nodes))
        for node in nodes:
            assert cache.register(node)
        cache.release(nodes, 0)
        cache.check_invariants()

    hold(1, 2)
    hold(3, 4)
    assert (cache.hit([1, 2]), cache.offload_hit([1, 2, 9])) == (0, 2)
    assert cache.take_tier_events() == [1, 2, 3, 4], "none has left both"
    hold(1)
    assert cache.take_tier_events() == [-1, 1], "the tier had no room for it beside 4, and the device has it again"
    hold(5)
    assert cache.take_tier_events() == [-2, 5], "3 was evicted, and 2 was used least recently"
    assert (cache.offload_hit([2]), cache.offload_hit([4, 3])) == (0, 2)
