"""The index benchmark end to end on its smallest case, and what it refuses."""

from __future__ import annotations

import json

import pytest

from kvscout_bench.index_bench import FIXTURES, IndexBench
from kvscout_bench.index_bench_ranks import RankWorkload
from kvscout_bench.machine import usable_cores
from kvscout_common.errors import InvalidArgument


def test_a_quick_run_gives_a_row_without_a_verdict() -> None:
    said: list[str] = []
    rows = list(IndexBench(only=("python/hot/find_hashes",), quick=True).run(said.append))
    assert [row.case.name for row in rows] == ["python/hot/find_hashes"]
    assert rows[0].ours.value > 0
    assert (rows[0].met, rows[0].peers, len(rows[0].ours.values)) == (None, {}, 1)
    assert json.loads(json.dumps(rows[0].as_json()))["unit"] == "µs"
    assert "python/hot/find_hashes" in said


def test_work_on_a_whole_rank_has_its_rows() -> None:
    rows = list(IndexBench(only=("python/rank/",), quick=True).run(lambda _: None))
    names = [
        f"python/rank/{workload}{suffix}"
        for workload in RankWorkload
        # It is done to an index without queries.
        for suffix in (("/call",) if workload is RankWorkload.REPLACE else ("", "/call", "/wait"))
    ]
    assert [row.case.name for row in rows] == (names if len(usable_cores()) > 1 else [])
    assert all(row.ours.value > 0 and row.case.goal for row in rows)


def test_names_of_cases_are_unique_and_their_fixtures_exist() -> None:
    cases = IndexBench.CASES
    assert len({case.name for case in cases}) == len(cases)
    assert {case.workload.split("/")[1] for case in cases} == set(FIXTURES)


@pytest.mark.parametrize("fixture", [name for name in FIXTURES if name.startswith("large")])
def test_a_large_fixture_has_ten_million_memberships(fixture: str) -> None:
    held = FIXTURES[fixture]
    # Lengths are uniform in 1 .. blocks, but of one holder of an unequal prompt.
    mean = (held.blocks + 1) / 2
    blocks = {
        "equal": held.holders * held.blocks,
        "unequal": (held.holders - 1) * mean + held.blocks,
        "random": held.holders * mean,
    }[held.lengths]
    assert held.prompts * blocks == pytest.approx(10e6, rel=0.01)


@pytest.mark.parametrize(
    ("bench", "field"),
    [
        ({"peers": ("nobody",)}, "peer"),
        ({"rounds": 0}, "rounds"),
        ({"seconds": -1.0}, "seconds"),
        ({"only": ("x/y",)}, "only"),
    ],
)
def test_a_wrong_value_is_refused_by_name(bench: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        IndexBench(**bench)  # type: ignore[arg-type]
    assert refused.value.field == field
