"""The ingest benchmark end to end, short, over a real indexer process; and what it refuses."""

from __future__ import annotations

import io
import json
from contextlib import closing

import pytest

from kvscout_bench.driver_commands import serve
from kvscout_bench.ingest_bench import IngestBench
from kvscout_bench.ingest_publisher import Publisher, stored
from kvscout_bench.service_process import IndexerProcess, until
from kvscout_bench.strangers import DriverFailed
from kvscout_blocks.bytes.events import Stored
from kvscout_blocks.bytes.wire import decode_batch
from kvscout_common.errors import InvalidArgument


def test_a_quick_run_gives_rows_without_a_verdict_beside_the_published_figures() -> None:
    said: list[str] = []
    rows = list(IngestBench(only=("zmq/message", "zmq/visible"), quick=True).run(said.append))
    assert [row.case.name for row in rows] == ["zmq/message", "zmq/visible", "zmq/visible_p99"]
    message, visible, visible_p99 = rows
    assert message.ours.value > 0
    assert (message.met, message.case.goal, message.case.published, message.peers) == (None, 8.0, (17.0, 25.0), {})
    assert 0 < visible.ours.value <= visible_p99.ours.value
    assert visible.case.published is None
    assert json.loads(json.dumps(message.as_json()))["unit"] == "µs"
    assert "zmq/messages" in said


def test_events_are_found_through_a_bridge() -> None:
    (row,) = IngestBench(only=("bridge/nats-core",), quick=True).run(lambda _: None)
    assert row.ours.value > 0
    assert (row.met, row.case.goal, row.case.unit) == (None, 15.0, "ms")


def test_names_of_rows_are_unique() -> None:
    names = [case.name for case in IngestBench.CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("bench", "field"), [({"rounds": 0}, "rounds"), ({"only": ("x/y",)}, "only")])
def test_a_wrong_value_is_refused_by_name(bench: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        IngestBench(**bench)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_a_batch_is_what_an_engine_sends() -> None:
    decoded = decode_batch(stored([1, 2], 7, list(range(32))))
    assert decoded.faults == ()
    (event,) = decoded.events
    assert isinstance(event, Stored)
    assert (event.engine_hashes, event.parent, event.block_size, len(event.tokens)) == ((1, 2), 7, 16, 32)


def test_the_publisher_answers_every_line() -> None:
    out = io.StringIO()
    with closing(Publisher()) as publisher:
        serve(publisher, ["open sockets=2 blocks=1", "prepare messages=3", "publish rate=0", "dance"], out)
    opened, prepared, published, refused = map(json.loads, out.getvalue().splitlines())
    assert len(set(opened["endpoints"])) == 2
    assert prepared == {}
    assert (published["sent"], published["late_p99_ms"]) == (3, 0.0)
    assert "not a command" in refused["error"]


def test_an_indexer_that_does_not_start_is_told() -> None:
    with pytest.raises(DriverFailed, match="before it was ready"):
        IndexerProcess("--no-such-flag")


def test_what_does_not_come_in_time_is_told() -> None:
    with pytest.raises(DriverFailed, match="a wonder: not within 0 s"):
        until(lambda: False, "a wonder", within_seconds=0.0)
