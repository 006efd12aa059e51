"""Overlaps of one prompt, united from several answers."""

from typing import Any

import pytest

from kvscout.v1 import indexer_pb2, types_pb2
from kvscout_common.rank_sets import RankSet, rank_set
from kvscout_common.worker import WorkerRank
from kvscout_gateway.upstreams.indexer.overlaps import AnsweredRows, hold_for, message_of, unite
from kvscout_gateway.values.overlaps import longest


def columns(overlaps: types_pb2.Overlaps) -> dict[str, list[Any]]:
    return {field.name: list(values) for field, values in overlaps.ListFields()}


def common(device: int, *, ranks: int = 0, exact: bool = True, predicted: int = 0, digest: int = 0) -> Any:
    return types_pb2.CommonOverlap(
        ranks=ranks,
        exact=exact,
        device_blocks=device,
        host_blocks=device,
        disk_blocks=device,
        external_blocks=device,
        predicted_blocks=max(device, predicted),
        ranks_digest=digest,
    )


RANKS = [WorkerRank("a", 0), WorkerRank("b", 0), WorkerRank("c", 1)]


def answer(known: list[WorkerRank], named: int, **others: Any) -> indexer_pb2.FindMatchesResponse:
    """An answer about some ranks, of which the first ones have rows."""
    ranks = rank_set(known)
    rows = types_pb2.Overlaps(worker_ids=[rank.worker_id for rank in known[:named]], device_blocks=[9] * named)
    rows.others.CopyFrom(common(**{"device": 4, "ranks": ranks.ranks - named, "digest": ranks.digest, **others}))
    return indexer_pb2.FindMatchesResponse(overlaps=rows)


def test_few_rows_hold_where_they_are_about_the_ranks_that_are_known() -> None:
    known = rank_set(RANKS)
    assert hold_for([answer(RANKS, 1)], known)
    assert hold_for([answer(RANKS[:1], 1), answer(RANKS[1:], 0)], known)
    rows = indexer_pb2.FindMatchesResponse(overlaps=types_pb2.Overlaps(worker_ids=["a"], device_blocks=[1]))
    assert hold_for([rows], known), "of an indexer that knows only rows"
    for answers in (
        [answer(RANKS[:2], 1)],
        [answer([*RANKS[:2], WorkerRank("c", 2)], 1)],
        [answer(RANKS, 1, exact=False)],
        [answer(RANKS[:1], 1), None],
        [answer(RANKS[:1], 1), rows],
        [answer(RANKS[:1], 1), answer(RANKS[1:], 0, device=5)],
        [answer(RANKS[:1], 1), answer(RANKS[1:], 0, predicted=5)],
    ):
        assert not hold_for(answers, known), answers
    assert not hold_for([answer(RANKS, 1)], RankSet(3, known.digest + 1))


def test_what_ranks_without_a_row_have_is_passed_on() -> None:
    first, second = answer(RANKS[:2], 2), answer(RANKS[2:], 0)
    rows = AnsweredRows([first, second])
    assert (rows.others, rows.message.others.ranks) == ((4, 4, 4, 4, 4), 1)
    assert (list(rows.message.worker_ids), longest(rows)) == (["a", "b"], 9)
    assert message_of(rows) is rows.message
    only = AnsweredRows([second])
    assert (only.others, longest(only), list(only.message.worker_ids)) == ((4, 4, 4, 4, 4), 4, [])
    assert AnsweredRows([indexer_pb2.FindMatchesResponse()]).others is None


def test_one_answer_is_taken_as_it_is() -> None:
    only = types_pb2.Overlaps(worker_ids=["a"], device_blocks=[1])
    assert unite([types_pb2.Overlaps(), only]) is only
    assert unite([]) == types_pb2.Overlaps()


def test_columns_that_one_answer_leaves_out_are_filled_in() -> None:
    plain = types_pb2.Overlaps(worker_ids=["a", "b"], device_blocks=[1, 2])
    tiers = types_pb2.Overlaps(worker_ids=["c"], dp_ranks=[3], device_blocks=[4], disk_blocks=[6])
    predicted = types_pb2.Overlaps(worker_ids=["d"], device_blocks=[0], host_blocks=[5], predicted_blocks=[7])
    assert columns(unite([plain, tiers, predicted])) == {
        "worker_ids": ["a", "b", "c", "d"],
        "dp_ranks": [0, 0, 3, 0],
        "device_blocks": [1, 2, 4, 0],
        "host_blocks": [1, 2, 4, 5],
        "disk_blocks": [1, 2, 6, 5],
        "predicted_blocks": [1, 2, 4, 7],
    }
    assert columns(unite([plain, plain])) == {"worker_ids": ["a", "b"] * 2, "device_blocks": [1, 2] * 2}


# w0 belongs to shard 0 of 2, w1 to shard 1.
@pytest.mark.parametrize(
    ("columns", "worker", "confirmed"),
    [
        ({"device_blocks": [5]}, WorkerRank("w0", 0), 5),
        ({"device_blocks": [2], "predicted_blocks": [5]}, WorkerRank("w0", 0), 2),
        ({"device_blocks": [2], "predicted_blocks": [5]}, WorkerRank("w0", 1), 0),
        ({"device_blocks": [2], "predicted_blocks": [5], "dp_ranks": [1]}, WorkerRank("w0", 1), 2),
        ({"device_blocks": [2], "lower_bound": True}, WorkerRank("w0", 0), 2),
        ({"device_blocks": [2], "lower_bound": True, "incomplete_rows": [0]}, WorkerRank("w0", 0), None),
        ({"device_blocks": [2], "lower_bound": True}, WorkerRank("w4", 0), None),  # 0, or nothing is known of it
        ({"device_blocks": [5]}, WorkerRank("w1", 0), None),  # its shard did not answer
        ({"device_blocks": [5], "others": common(4, predicted=5)}, WorkerRank("w0", 0), 5),
        ({"device_blocks": [5], "others": common(4, predicted=5)}, WorkerRank("w0", 1), 4),
        ({"device_blocks": [5], "others": common(4), "lower_bound": True}, WorkerRank("w0", 1), 4),
        ({"device_blocks": [5], "others": common(0), "lower_bound": True}, WorkerRank("w0", 1), None),
    ],
)
def test_what_events_confirm_of_an_overlap(columns: dict[str, Any], worker: WorkerRank, confirmed: int | None) -> None:
    flags = {name: columns.pop(name) for name in ("lower_bound", "incomplete_rows") if name in columns}
    rows = types_pb2.Overlaps(worker_ids=["w0"] * len(columns["device_blocks"]), **columns)
    first = indexer_pb2.FindMatchesResponse(overlaps=rows, **flags)
    assert AnsweredRows((first, None)).confirmed("default", worker, overlap_blocks=5) == confirmed
