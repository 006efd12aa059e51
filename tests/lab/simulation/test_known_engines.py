"""Engines of which it is known what they read and compute: their figures, and what attention makes of long prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.laboratory_worlds import ENGINE, mixed, simulation
from support.seeds import test_seed

from kvscout_common.errors import ConfigError
from kvscout_lab.cells.bound import lower_bound
from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.known_engines import ENGINES, known_engine
from kvscout_lab.simulation.timing import PICOSECONDS, StepTime
from kvscout_lab.simulation.worker import NEVER, EngineSettings, Job, Worker

MS = 1_000_000_000
LONG = EngineSettings(
    block_size=10,
    kv_tokens=1_000,
    max_num_batched_tokens=100,
    max_num_seqs=10,
    step=StepTime(
        base_ms=1.0,
        prefill_us_per_token=20.0,
        decode_us_per_request=0.0,
        context_ns_per_token=1_000.0,
        attention_ps_per_pair=100_000.0,
        overlapped=True,
        host_ms=0.5,
        host_us_per_request=10.0,
    ),
)


def ends(worker: Worker) -> list[int]:
    found = []
    while worker.end != NEVER:
        now = worker.end
        found += [now for _ in worker.finish()[0]]
        worker.begin(now)
    return found


def test_a_chunk_costs_more_the_more_comes_before_it_and_weights_are_read_meanwhile() -> None:
    worker = Worker(LONG, 2.0, 1.0)
    worker.submit(Job(None, range(1, 50), 210, 2), 0)
    # Each step has 0.51 ms of the host; 100 tokens are 1 ms of layers at twice the speed, as are the weights; 0.05 µs
    # a pair. The last chunk is small: its 210 tokens are read in 210 µs, longer than its pairs take.
    host, pair = 510_000_000, 50_000
    chunks = 2 * (MS + host) + (5_050 + 10_000 + 5_050) * pair + max(1 * MS, 10 * MS // 100) + 210 * MS // 1_000 + host
    decode = MS + 211 * MS // 1_000 + host
    assert ends(worker) == [chunks, chunks + decode]
    assert LONG.step.rates(2.0, 1.0).alone(0, 210, 100) == chunks


def test_without_attention_a_step_is_its_four_terms_whatever_speeds() -> None:
    rates = StepTime().rates(2.0, 0.5)
    assert rates.attention(100_000, 8_192) == 0
    assert rates.step(100, 7, 9_000, 0, 9) == 2 * 8 * MS + 100 * 25_000_000 + 7 * 100_000_000 + 9_000 * 30_000


@pytest.mark.parametrize("name", ENGINES)
def test_a_prompt_of_100k_costs_more_than_its_layers(name: str) -> None:
    step = known_engine(name).step
    layers = 100_000 * step.prefill_us_per_token / 1e6
    ratio = step.rates().alone(0, 100_000, 8_192) / PICOSECONDS / layers
    # Attention counts more beside small layers and in FP8.
    assert 1.3 < ratio < 4.0


def test_figures_are_what_the_page_derives() -> None:
    small, large = known_engine("8b-bf16-h100"), known_engine("70b-bf16-tp8-h100")
    assert small.step.context_ns_per_token == pytest.approx(131_072 / (3.35e12 * 0.65) * 1e9)
    assert small.step.base_ms == pytest.approx(7.38, 0.01)
    assert small.step.prefill_us_per_token == pytest.approx(21.7, 0.01)
    assert small.kv_tokens == 403_000
    assert large.step.context_ns_per_token == pytest.approx(18.8, 0.01)
    assert large.step.base_ms == pytest.approx(8.11 + 0.32, 0.01)


def test_the_page_has_the_figures_of_every_engine() -> None:
    page = (Path(__file__).parents[3] / "docs" / "laboratory.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    found = {row[0].strip("`"): row[1:] for row in rows if row[0].strip("`") in ENGINES}
    for name, known in ENGINES.items():
        step = known.step
        took = step.rates().alone(0, 100_000, 8_192) / PICOSECONDS
        assert found[name] == [
            f"{step.base_ms:.1f}",
            f"{step.prefill_us_per_token:.1f}",
            f"{step.attention_ps_per_pair:,.0f}",
            f"{step.context_ns_per_token:.1f}",
            f"{step.host_ms:.1f}",
            f"{known.kv_tokens:,}",
            f"{took:.1f} s = {took / (0.1 * step.prefill_us_per_token):.1f} ×",
        ]


@pytest.mark.parametrize("name", ENGINES)
def test_jumps_are_steps_and_no_policy_beats_the_bound(name: str) -> None:
    engine = replace(ENGINE, step=known_engine(name).step)
    workload = mixed(test_seed(), 100, 30.0)
    cluster = Cluster(workers=3, engine=engine, prefill_speeds=(2.0, 0.5), decode_speeds=(1.5,))
    jumps, steps = (
        simulation(workload, "kv-time", each).run()
        for each in (cluster, replace(cluster, engine=replace(engine, max_jump=1)))
    )
    assert repr(jumps.records) == repr(steps.records)
    bound = lower_bound(workload, cluster)
    first = [0]
    for flow in workload.flows:
        first.append(first[-1] + len(flow.turns))
    for record in jumps.records:
        # Those that come first pay for what others share; who came first is not the order of the bound.
        assert record.first_token > record.arrived
    ttfts = [(record.first_token - record.arrived) / PICOSECONDS for record in jumps.records]
    assert sum(ttfts) >= sum(bound.ttft_seconds)


def test_the_bound_is_of_the_fastest_worker() -> None:
    workload = mixed(test_seed(), 20)
    plain, fast = (
        sum(lower_bound(workload, Cluster(workers=2, engine=ENGINE, speeds=speeds)).ttft_seconds)
        for speeds in ((), (0.5, 2.0))
    )
    assert fast < plain


def test_an_engine_that_is_not_known_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="8b-bf16-h100") as raised:
        known_engine("abacus")
    assert raised.value.field == "engine"
