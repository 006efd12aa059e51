"""Lanes: what is parked of sources that nobody takes, and how far a cut of one reaches."""

from __future__ import annotations

from kvscout_blocks.source.feed import Cursor
from kvscout_common.nats.names import NatsNames
from kvscout_common.shards import Shard
from kvscout_common.worker import WorkerRank
from kvscout_indexer.streams.partitions import Lane, Lanes
from kvscout_indexer.streams.position import Resume, SnapshotSchedule, StreamState
from kvscout_indexer.streams.sources import StreamSources


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Taken:
    """A taker that is settled or not."""

    def __init__(self) -> None:
        self.settled = True
        self.cursor = Cursor(0, None)

    def deliver(self, data: bytes) -> None:
        raise NotImplementedError

    async def caught_up(self) -> None:
        raise NotImplementedError

    def verify(self) -> None:
        raise NotImplementedError

    async def dump(self) -> list[bytes]:
        raise NotImplementedError


def lane(lanes: Lanes, name: str) -> Lane:
    return lanes.of(f"subject.{name}", WorkerRank(name, 0))


def test_lanes_come_in_the_order_of_their_subjects() -> None:
    lanes = Lanes(Clock())
    for name in ("b", "c", "a"):
        lane(lanes, name)
    assert [each.worker.worker_id for each in lanes] == ["a", "b", "c"]
    assert lane(lanes, "b") is lanes.get("subject.b")
    assert lanes.get("subject.d") is None


def test_parked_messages_are_taken_once_and_in_order() -> None:
    lanes = Lanes(Clock())
    a = lane(lanes, "a")
    for data in (b"1", b"22", b"333"):
        lanes.park(a, data)
    assert lanes.parked_bytes == 6
    assert lanes.unpark(a) == [b"1", b"22", b"333"]
    assert (lanes.parked_bytes, lanes.unpark(a)) == (0, [])


def test_a_state_takes_the_place_of_what_is_parked() -> None:
    lanes = Lanes(Clock())
    a = lane(lanes, "a")
    lanes.park(a, b"old")
    lanes.load(a, [b"state"])
    lanes.park(a, b"next")
    assert lanes.parked_bytes == 9
    assert lanes.unpark(a) == [b"state", b"next"]


def test_a_lane_that_is_too_large_is_forgotten_and_to_be_verified() -> None:
    lanes = Lanes(Clock(), max_lane_bytes=10, max_bytes=100)
    a, b = lane(lanes, "a"), lane(lanes, "b")
    lanes.park(a, bytes(10))
    lanes.park(b, bytes(10))
    assert not a.unverified
    lanes.park(a, b"1")
    assert (a.unverified, b.unverified, lanes.parked_bytes, lanes.forgotten) == (True, False, 10, 1)


def test_the_largest_lane_goes_when_all_are_too_large_together() -> None:
    lanes = Lanes(Clock(), max_lane_bytes=100, max_bytes=30)
    a, b, c = (lane(lanes, name) for name in "abc")
    lanes.park(a, bytes(10))
    lanes.park(b, bytes(15))
    lanes.load(c, [bytes(6)])
    assert [each.unverified for each in (a, b, c)] == [False, True, False]
    assert lanes.parked_bytes == 16


def test_lanes_that_nobody_registers_are_forgotten_after_the_retention() -> None:
    clock = Clock()
    lanes = Lanes(clock)
    gone, taken = lane(lanes, "gone"), lane(lanes, "taken")
    lanes.park(gone, b"state")
    taken.taker, taken.unregistered_since = Taken(), 0.0
    clock.now += 60
    lanes.expire(60)
    assert lanes.get(gone.subject) is gone
    clock.now += 1
    lanes.expire(60)
    assert [each.worker.worker_id for each in lanes] == ["taken"]
    assert lanes.parked_bytes == 0


def test_a_cut_of_a_parked_lane_reaches_as_far_as_the_stream_was_read() -> None:
    a = lane(Lanes(Clock()), "a")
    assert a.position(7) == 7
    a.covered = 9
    assert a.position(7) == 9


def test_a_cut_of_a_live_lane_reaches_no_further_than_what_is_in_the_index() -> None:
    a = lane(Lanes(Clock()), "a")
    taker = Taken()
    a.taker, a.live, a.contained, a.doubtful = taker, True, 4, True
    taker.settled = False
    assert (a.position(7), a.doubtful) == (4, True)
    taker.settled = True
    assert (a.position(7), a.doubtful) == (7, False)


class Asked(Taken):
    """One that waits for its publisher's answer from `verify` on."""

    def verify(self) -> None:
        self.settled = False

    async def dump(self) -> list[bytes]:
        return [b"state"]


async def test_a_snapshot_says_what_is_unverified_until_the_publisher_has_answered() -> None:
    names = NatsNames("n")
    worker = WorkerRank("w", 0)
    sources = StreamSources(
        names, "t", "m", shard=Shard(0, 1), schedule=SnapshotSchedule(100, 60.0), arrived=lambda: None
    )
    sources.go_on(StreamState(1, 1, 0), Resume(None, 0, missed=True), None)
    taker = Asked()
    sources.attach(worker, taker)
    await sources.deliver_parked()

    async def unverified() -> list[bool]:
        snapshot = await sources.cut()
        assert snapshot is not None
        return [cut.unverified for cut in snapshot.sources]

    assert await unverified() == [True]
    sources.verify()
    assert not taker.settled
    assert await unverified() == [True]
    taker.settled = True
    assert await unverified() == [False]
