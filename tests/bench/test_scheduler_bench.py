"""The scheduler benchmark end to end, short, over a real scheduler process; and what it refuses."""

from __future__ import annotations

import pytest

from kvscout.v1 import scheduler_pb2
from kvscout_bench.scheduler_bench import SchedulerBench
from kvscout_bench.scheduler_process import prompts
from kvscout_common.errors import InvalidArgument


def test_a_quick_run_gives_rows_without_a_verdict_beside_the_published_figures() -> None:
    said: list[str] = []
    rows = list(SchedulerBench(only=("lifecycle/512", "memory", "replica"), quick=True).run(said.append))
    lifecycle, memory, replica = rows
    assert [row.case.name for row in rows] == ["process/lifecycle/512", "process/memory", "replica/visible_p99"]
    assert lifecycle.ours.value > 0
    assert (lifecycle.met, lifecycle.case.goal, lifecycle.case.published) == (None, 140.0, (136.0, 172.0))
    assert (memory.case.goal, memory.case.published, memory.peers) == (24.0, None, {})
    assert (replica.case.unit, replica.case.goal, replica.met) == ("ms", 5.0, None)
    assert replica.ours.value > 0
    assert "process/memory" in said


def test_dequeues_of_a_long_queue_are_timed() -> None:
    (row,) = SchedulerBench(only=("core/queue",), quick=True).run(lambda said: None)
    assert (row.case.goal, row.case.unit, row.met) == (200.0, "µs", None)
    assert row.ours.p99 is not None and row.ours.p99 >= row.ours.value > 0


def test_lives_are_timed_also_while_workers_are_unwell_and_few_hold_a_prompt() -> None:
    well, unwell = SchedulerBench(only=("core/life/256",), quick=True).run(lambda said: None)
    assert [row.case.name for row in (well, unwell)] == ["core/life/256-workers", "core/life/256-workers/unwell"]
    assert (well.case.unit, well.met, unwell.met) == ("µs", None, None)
    assert well.ours.value > 0 < unwell.ours.value
    (row,) = SchedulerBench(only=("lifecycle/256-workers",), quick=True).run(lambda said: None)
    assert (row.case.goal, row.peers) == (60.0, {})
    assert row.ours.value > 0


def test_names_of_rows_are_unique() -> None:
    names = [case.name for case in SchedulerBench.CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("bench", "field"), [({"rounds": 0}, "rounds"), ({"only": ("x/y",)}, "only")])
def test_a_wrong_value_is_refused_by_name(bench: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        SchedulerBench(**bench)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_prompts_differ_share_their_beginning_round_robin_and_overlap_everywhere() -> None:
    made = [scheduler_pb2.SelectRequest.FromString(raw) for raw in prompts(5, 10, ["a", "b"], seed=1)]
    assert len({tuple(request.block_hashes) for request in made}) == 5
    assert made[0].block_hashes[:8] == made[4].block_hashes[:8] != made[1].block_hashes[:8]
    assert made[0].isl_tokens == 160
    for request in made:
        assert list(request.overlaps.worker_ids) == ["a", "b"]
        assert all(1 <= blocks <= 10 for blocks in request.overlaps.device_blocks)
