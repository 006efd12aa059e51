"""Overlaps of one prompt, united from several answers."""

from typing import Any

import pytest

from kvscout.v1 import indexer_pb2, types_pb2
from kvscout_common.worker import WorkerRank
from kvscout_gateway.upstreams.indexer.overlaps import AnsweredRows, unite


def columns(overlaps: types_pb2.Overlaps) -> dict[str, list[Any]]:
    return {field.name: list(values) for field, values in overlaps.ListFields()}


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
    ("answer", "worker", "confirmed"),
    [
        ({"device_blocks": [5]}, WorkerRank("w0", 0), 5),
        ({"device_blocks": [2], "predicted_blocks": [5]}, WorkerRank("w0", 0), 2),
        ({"device_blocks": [2], "predicted_blocks": [5]}, WorkerRank("w0", 1), 0),
        ({"device_blocks": [2], "predicted_blocks": [5], "dp_ranks": [1]}, WorkerRank("w0", 1), 2),
        ({"device_blocks": [2], "lower_bound": True}, WorkerRank("w0", 0), 2),
        ({"device_blocks": [2], "lower_bound": True, "incomplete_rows": [0]}, WorkerRank("w0", 0), None),
        ({"device_blocks": [2], "lower_bound": True}, WorkerRank("w4", 0), None),  # 0, or nothing is known of it
        ({"device_blocks": [5]}, WorkerRank("w1", 0), None),  # its shard did not answer
    ],
)
def test_what_events_confirm_of_an_overlap(answer: dict[str, Any], worker: WorkerRank, confirmed: int | None) -> None:
    flags = {name: answer.pop(name) for name in ("lower_bound", "incomplete_rows") if name in answer}
    rows = types_pb2.Overlaps(worker_ids=["w0"] * len(answer["device_blocks"]), **answer)
    first = indexer_pb2.FindMatchesResponse(overlaps=rows, **flags)
    assert AnsweredRows((first, None)).confirmed("default", worker, overlap_blocks=5) == confirmed
