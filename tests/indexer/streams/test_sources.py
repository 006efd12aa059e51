"""Sources of a stream: which partition gets a message, how far a cut of it reaches, and what it is verified for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvscout_blocks.source.feed import Cursor
from kvscout_common.worker import WorkerRank
from kvscout_indexer.streams.position import SnapshotId, SnapshotSchedule, StreamState
from kvscout_indexer.streams.pull import StreamMessage
from kvscout_indexer.streams.snapshot import Snapshot, SourceCut
from kvscout_indexer.streams.sources import StreamSources


class FeedSpy:
    """A feed that is settled or not, and keeps what it got."""

    def __init__(self) -> None:
        self.settled = True
        self.verified = 0
        self.delivered: list[bytes] = []

    @property
    def cursor(self) -> Cursor:
        return Cursor(0, len(self.delivered))

    def deliver(self, data: bytes) -> None:
        if data == b"defect":
            raise RuntimeError("a defect of ours")
        self.delivered.append(data)

    async def caught_up(self) -> None:
        """Nothing waits."""

    def verify(self) -> None:
        self.verified += 1
        self.settled = False

    async def dump(self) -> list[bytes]:
        return [b"state"]


@pytest.fixture
def sources() -> StreamSources:
    return StreamSources(SnapshotSchedule(100, 60.0))


def attach(sources: StreamSources, name: str = "w") -> FeedSpy:
    feed = FeedSpy()
    sources.attach(name, WorkerRank(name, 0), feed)
    return feed


def message(sequence: int, data: bytes, name: str = "w") -> StreamMessage:
    return StreamMessage(sequence, 0.0, name, data, 0, "")


def stream(first: int, last: int, *, incarnation: int = 1, deleted: int = 0) -> StreamState:
    return StreamState(incarnation, first, last, deleted)


async def each(snapshot: Snapshot) -> AsyncIterator[SourceCut]:
    for one in snapshot.sources:
        yield one


async def cut(sources: StreamSources) -> Snapshot:
    snapshot = await sources.cut()
    assert snapshot is not None
    return snapshot


def test_what_the_tail_passes_over_is_left_to_the_catch_up(sources: StreamSources) -> None:
    sources.place(stream(1, 2))
    feed = attach(sources)
    assert (sources.begin_past(stream(1, 2)), sources.position) == (0, 0)
    sources.deliver(message(3, b"3"))
    sources.deliver(message(4, b"4", "unknown"))
    sources.deliver_past(message(1, b"1"))
    assert (feed.delivered, sources.position, sources.ignored) == ([b"1"], 1, 1)
    assert not sources.caught_up(1), "message 3 is missing"
    sources.deliver_past(message(3, b"3"))
    assert sources.caught_up(3)
    sources.deliver(message(5, b"5"))
    assert (feed.delivered, sources.position) == ([b"1", b"3", b"5"], 5)


def test_what_the_catch_up_read_ahead_is_delivered_once(sources: StreamSources) -> None:
    sources.place(stream(1, 1))
    feed = attach(sources)
    sources.begin_past(stream(1, 1))
    for sequence in (1, 2):
        sources.deliver_past(message(sequence, b"%d" % sequence))
    assert sources.caught_up(2)
    sources.deliver(message(2, b"2"))
    assert feed.delivered == [b"1", b"2"]


async def test_a_snapshot_brings_its_state_to_what_it_brings_further(sources: StreamSources) -> None:
    sources.place(stream(1, 9))
    feed, ahead = attach(sources), attach(sources, "ahead")
    sources.begin_past(stream(1, 9))
    sources.deliver_past(message(8, b"8", "ahead"))
    cuts = [SourceCut(WorkerRank(name, 0), 7, [b"state of " + name.encode()]) for name in ("w", "ahead", "unknown")]
    snapshot = Snapshot(SnapshotId(1, 7), 0.0, cuts)
    positions = {one.worker: one.position for one in cuts}
    assert sources.wants(positions, fits=True)
    await sources.load(each(snapshot), fits=True)
    assert not sources.wants(positions, fits=True)
    assert (feed.delivered, ahead.delivered) == ([b"state of w"], [b"8"])
    assert sources.begin_past(stream(8, 9)) == 7
    assert sources.caught_up(9)
    sources.verify()
    assert feed.verified == ahead.verified == 0


@pytest.mark.parametrize(
    "state", [pytest.param(stream(3, 9), id="purged"), pytest.param(stream(1, 9, deleted=1), id="with a hole")]
)
def test_a_source_that_may_have_missed_messages_is_verified_once_it_caught_up(
    sources: StreamSources, state: StreamState
) -> None:
    sources.place(state)
    feed = attach(sources)
    sources.begin_past(state)
    sources.verify()
    assert feed.verified == 0
    assert sources.caught_up(9)
    sources.verify()
    sources.verify()
    assert feed.verified == 1


def test_a_message_that_continues_the_cursor_proves_that_nothing_was_missed(sources: StreamSources) -> None:
    sources.place(stream(3, 9))
    feed = attach(sources)
    sources.begin_past(stream(3, 9))
    sources.deliver_past(message(9, b"9"))
    assert sources.caught_up(9)
    sources.verify()
    assert feed.verified == 0


def test_a_message_with_a_defect_has_its_source_verified(sources: StreamSources) -> None:
    sources.place(stream(1, 1))
    feed = attach(sources)
    sources.begin_past(stream(1, 1))
    sources.deliver_past(message(1, b"defect"))
    assert sources.caught_up(1)
    sources.verify()
    assert feed.verified == 1


@pytest.mark.parametrize(
    "state", [pytest.param(stream(1, 9, incarnation=2), id="made anew"), pytest.param(stream(1, 3), id="lost its end")]
)
def test_a_stream_that_counts_anew_is_read_from_its_beginning(sources: StreamSources, state: StreamState) -> None:
    feed = attach(sources)
    sources.place(stream(1, 5))
    sources.begin_past(stream(1, 5))
    assert sources.caught_up(5)
    sources.place(state)
    assert (sources.tail, sources.begin_past(state)) == (state.last, 0)
    assert not sources.wants({WorkerRank("w", 0): 5}, fits=False), "it has a state of its own"
    assert sources.caught_up(state.last)
    sources.verify()
    assert feed.verified == 1


async def test_a_state_of_a_former_stream_is_loaded_into_what_has_none_and_verified(sources: StreamSources) -> None:
    sources.place(stream(1, 5, incarnation=2))
    feed = attach(sources)
    snapshot = Snapshot(SnapshotId(1, 70), 0.0, [SourceCut(WorkerRank("w", 0), 70, [b"old"])])
    await sources.load(each(snapshot), fits=False)
    assert (feed.delivered, sources.begin_past(stream(1, 5, incarnation=2))) == ([b"old"], 0)
    assert sources.caught_up(5)
    sources.verify()
    assert feed.verified == 1


async def test_a_cut_reaches_as_far_as_was_read_or_as_is_contained(sources: StreamSources) -> None:
    sources.place(stream(1, 4))
    feed, behind = attach(sources), attach(sources, "behind")
    sources.begin_past(stream(1, 4))
    sources.deliver_past(message(2, b"2", "behind"))
    assert (await cut(sources)).id.sequence == 0
    assert sources.caught_up(4)
    assert [each.position for each in (await cut(sources)).sources] == [4, 4]
    sources.deliver(message(5, b"5"))
    feed.settled = behind.settled = False
    sources.deliver(message(6, b"6"))
    snapshot = await cut(sources)
    assert snapshot.id.sequence == 2
    assert [each.position for each in snapshot.sources] == [2, 5]


async def test_a_snapshot_says_what_is_unverified_until_the_publisher_has_answered(sources: StreamSources) -> None:
    sources.place(stream(3, 9))
    feed = attach(sources)
    sources.begin_past(stream(3, 9))
    assert sources.caught_up(9)

    async def unverified() -> list[bool]:
        return [each.unverified for each in (await cut(sources)).sources]

    assert await unverified() == [True]
    sources.verify()
    assert not feed.settled
    assert await unverified() == [True]
    feed.settled = True
    assert await unverified() == [False]


async def test_without_a_worker_there_is_no_snapshot(sources: StreamSources) -> None:
    sources.place(stream(1, 4))
    assert await sources.cut() is None


def test_a_later_feed_of_the_same_worker_stays_when_the_former_leaves(sources: StreamSources) -> None:
    former, later = attach(sources), attach(sources)
    sources.detach("w", former)
    assert list(sources.behind) == ["w"]
    sources.detach("w", later)
    assert not sources.behind


async def test_what_a_waiting_message_does_not_prove_is_verified_once_the_source_is_settled(
    sources: StreamSources,
) -> None:
    sources.place(stream(3, 9))
    feed = attach(sources)
    sources.begin_past(stream(3, 9))
    assert sources.caught_up(9)
    # Other work on the rank is under way: the message waits behind it.
    feed.settled = False
    sources.deliver(message(10, b"10"))
    sources.verify()
    assert feed.verified == 0
    (waiting,) = (await cut(sources)).sources
    assert waiting.unverified
    feed.settled = True
    sources.verify()
    assert feed.verified == 1


async def test_a_message_that_leaves_a_gap_has_snapshots_say_so_until_it_is_filled(sources: StreamSources) -> None:
    sources.place(stream(3, 9))
    feed = attach(sources)
    sources.begin_past(stream(3, 9))
    assert sources.caught_up(9)

    def deliver(data: bytes) -> None:
        feed.delivered.append(data)
        feed.settled = False

    feed.deliver = deliver  # type: ignore[method-assign]  # its source requests what is missing
    sources.deliver(message(10, b"10"))
    (unfilled,) = (await cut(sources)).sources
    assert unfilled.unverified
    feed.settled = True
    sources.verify()
    (filled,) = (await cut(sources)).sources
    assert not filled.unverified
    assert feed.verified == 0
