"""Where a replica goes on in a stream, and when a snapshot is due."""

from __future__ import annotations

import pytest

from kvscout_indexer.streams.position import (
    SnapshotId,
    SnapshotSchedule,
    StreamState,
    follows,
    retention,
    superseded,
    to_load,
)

NOW, OLD = 2_000, 1_000
"""Incarnations."""


def at(*sequences: int, incarnation: int = NOW) -> list[SnapshotId]:
    return [SnapshotId(incarnation, sequence) for sequence in sequences]


@pytest.mark.parametrize(
    ("stream", "snapshots", "expected"),
    [
        pytest.param(StreamState(NOW, 0, 0), [], [], id="an empty stream"),
        pytest.param(StreamState(NOW, 1, 9), at(4, 7), at(7, 4), id="the newest first"),
        pytest.param(StreamState(NOW, 9, 9), at(4, 7), at(7, 4), id="purged beyond them"),
        pytest.param(StreamState(NOW, 1, 5), at(4, 7), at(4), id="one of a longer stream"),
        pytest.param(StreamState(NOW, 1, 5), at(7), at(7), id="only of a longer stream"),
        pytest.param(
            StreamState(NOW, 1, 5), at(70, 60, incarnation=OLD), at(70, incarnation=OLD), id="of a former stream"
        ),
        pytest.param(StreamState(NOW, 1, 5), [*at(70, incarnation=OLD), *at(2)], at(2), id="of both"),
    ],
)
def test_the_state_of_a_source_is_looked_for_in_the_newest_snapshot_first(
    stream: StreamState, snapshots: list[SnapshotId], expected: list[SnapshotId]
) -> None:
    assert to_load(stream, snapshots) == expected


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(StreamState(NOW, 20, 40), id="overtaken by a purge"),
        pytest.param(StreamState(NOW + 1, 1, 30), id="made anew"),
        pytest.param(StreamState(NOW + 1, 0, 0), id="made anew, empty"),
        pytest.param(StreamState(NOW, 1, 7), id="lost its end"),
    ],
)
def test_a_replica_at_10_has_to_catch_up(stream: StreamState) -> None:
    assert not follows(stream, NOW, 10)


@pytest.mark.parametrize("stream", [StreamState(NOW, 1, 10), StreamState(NOW, 11, 10), StreamState(NOW, 11, 30)])
def test_a_replica_at_10_can_stay_where_it_is(stream: StreamState) -> None:
    assert follows(stream, NOW, 10)


def test_two_snapshots_are_kept_and_what_both_have_is_purged() -> None:
    assert retention(at(5), NOW) == ((), 0)
    assert retention(at(9, 5), NOW) == ((), 5)
    assert retention(at(5, 9, 14), NOW) == (tuple(at(5)), 9)


def test_snapshots_of_a_former_number_of_shards_go_when_nothing_follows_them() -> None:
    former = [*at(5, 9, 14), *at(90, incarnation=OLD)]
    assert superseded(former, NOW, 0) == ()
    assert superseded(former, NOW, 9) == (*at(5, 9), *at(90, incarnation=OLD))


def test_snapshots_of_a_stream_that_is_gone_are_dropped_first_and_purge_nothing() -> None:
    old = at(90, 80, incarnation=OLD)
    assert retention([*old, *at(3)], NOW) == (tuple(at(80, incarnation=OLD)), 0)
    assert retention([*old, *at(3, 6)], NOW) == (tuple(old), 3)


def test_a_snapshot_is_due_after_so_many_messages() -> None:
    schedule = SnapshotSchedule(threshold=3, max_age_seconds=400)
    assert not schedule.due(0, now=1e9)
    for sequence in (1, 2):
        schedule.on_message(sequence, 1000.0)
        assert not schedule.due(sequence, now=1000.0)
    schedule.on_message(3, 1000.0)
    assert schedule.due(3, now=1000.0)
    schedule.on_snapshot(3, cut_at=1000.0, position=3)
    assert not schedule.due(3, now=1e9)


def test_a_snapshot_is_due_once_a_message_in_none_is_a_quarter_of_the_retention_old() -> None:
    schedule = SnapshotSchedule(threshold=1000, max_age_seconds=400)
    schedule.on_message(1, 1000.0)
    assert not schedule.due(1, now=1099.0)
    assert schedule.due(1, now=1100.0)
    schedule.on_message(2, 1100.0)
    schedule.on_snapshot(1, cut_at=1100.0, position=2)
    assert not schedule.due(2, now=1199.0)
    assert schedule.due(2, now=1200.0)


def test_a_snapshot_of_another_replica_that_is_ahead_covers_what_is_read_later() -> None:
    schedule = SnapshotSchedule(threshold=5, max_age_seconds=400)
    schedule.on_snapshot(10, cut_at=1000.0, position=4)
    schedule.on_message(9, 900.0)
    assert not schedule.due(9, now=1e9)
    schedule.on_message(11, 1000.0)
    assert not schedule.due(11, now=1000.0)
    assert schedule.due(15, now=1000.0)
