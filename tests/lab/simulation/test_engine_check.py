"""Engines beside what others measured: the page is what the code says, and the model is as near as the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscout_lab.simulation.engine_check import MARKER, Modelled, check, markdown, summary
from kvscout_lab.simulation.known_engines import A100, H100, H200, LLAMA_8B, LLAMA_70B, MI300X, KnownEngine
from kvscout_lab.simulation.published_engines import Kind, Measure, Use, published
from kvscout_scheduler.estimates.first_rates import ACCELERATORS

PAGE = Path(__file__).parents[3] / "docs" / "engine-model.md"


@pytest.fixture(scope="module")
def rows() -> list[Modelled]:
    """Every row, computed once."""
    return check()


def test_the_page_shows_what_the_worker_says_of_each_row(rows: list[Modelled]) -> None:
    head, mark, tables = PAGE.read_text().partition(MARKER)
    assert head and mark
    assert tables == f"\n\n{markdown(rows)}", "run `make docs-engines`"


def test_what_was_held_out_is_as_near_as_a_few_constants_allow(rows: list[Modelled]) -> None:
    for use, middle, largest in ((Use.FITTED, 0.06, 0.25), (Use.HELD_OUT, 0.1, 0.3)):
        _, found_middle, found_largest = summary(row for row in rows if row.row.use is use)
        assert found_middle < middle
        assert found_largest < largest


def test_of_h200_nothing_was_fitted() -> None:
    assert {row.use for row in published() if row.engine.accelerator is H200} == {Use.HELD_OUT, Use.NOT_MODELLED}


def test_every_row_is_measured_and_named_once() -> None:
    found = list(published())
    keys = [
        (row.source, row.engine, row.kind, row.input_tokens, row.output_tokens, row.requests, row.measure)
        for row in found
    ]
    assert len(set(keys)) == len(keys)
    for row in found:
        assert row.measured > 0
        assert row.source.url.startswith("https://")
        assert row.kind is Kind.CLIENTS or row.measure in (Measure.OUTPUT_RATE, Measure.LATENCY)


def test_the_scheduler_begins_with_the_same_accelerators() -> None:
    for gpu in (A100, H100, H200, MI300X):
        known = ACCELERATORS[gpu.name.lower()]
        mine = (gpu.bf16_tflops, gpu.fp8_tflops, gpu.gb_per_second, gpu.gigabytes)
        assert mine == pytest.approx(known, rel=1e-3)


def test_more_accelerators_compute_less_each_and_send_more() -> None:
    def engine(ways: int) -> KnownEngine:
        return KnownEngine(LLAMA_70B, H100, ways, 1, host_ms=0.0, host_us_per_request=0.0)

    alone, two, eight = (engine(ways).step.prefill_us_per_token for ways in (1, 2, 8))
    assert alone / 2 < two < alone
    # Eight send 14/8 of what is summed, two send one half of that more than once over.
    assert alone / 8 < eight < two
    assert two - alone / 2 == pytest.approx((eight - alone / 8) * 4 / 7)


def test_keys_and_values_in_fp8_take_half_the_room_and_the_time() -> None:
    wide, narrow = (
        KnownEngine(LLAMA_8B, H100, 1, 1, host_ms=0.0, host_us_per_request=0.0, kv_value_bytes=size) for size in (2, 1)
    )
    assert narrow.kv_tokens == pytest.approx(2 * wide.kv_tokens, rel=0.01)
    assert narrow.step.context_ns_per_token == pytest.approx(wide.step.context_ns_per_token / 2)
