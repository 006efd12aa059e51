"""Partitions: what is parked of sources that nobody takes, and how far a cut of one reaches."""

from __future__ import annotations

from kvscout_blocks.source.feed import Cursor
from kvscout_common.nats.names import NatsNames
from kvscout_common.shards import Shard
from kvscout_common.worker import WorkerRank
from kvscout_indexer.streams.partitions import Partition, Partitions
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


def partition(partitions: Partitions, name: str) -> Partition:
    return partitions.of(f"subject.{name}", WorkerRank(name, 0))


def test_lanes_come_in_the_order_of_their_subjects() -> None:
    partitions = Partitions(Clock())
    for name in ("b", "c", "a"):
        partition(partitions, name)
    assert [each.worker.worker_id for each in partitions] == ["a", "b", "c"]
    assert partition(partitions, "b") is partitions.get("subject.b")
    assert partitions.get("subject.d") is None


def test_parked_messages_are_taken_once_and_in_order() -> None:
    partitions = Partitions(Clock())
    a = partition(partitions, "a")
    for data in (b"1", b"22", b"333"):
        partitions.park(a, data)
    assert partitions.parked_bytes == 6
    assert partitions.unpark(a) == [b"1", b"22", b"333"]
    assert (partitions.parked_bytes, partitions.unpark(a)) == (0, [])


def test_a_state_takes_the_place_of_what_is_parked() -> None:
    partitions = Partitions(Clock())
    a = partition(partitions, "a")
    partitions.park(a, b"old")
    partitions.load(a, [b"state"])
    partitions.park(a, b"next")
    assert partitions.parked_bytes == 9
    assert partitions.unpark(a) == [b"state", b"next"]


def test_a_lane_that_is_too_large_is_forgotten_and_to_be_verified() -> None:
    partitions = Partitions(Clock(), max_partition_bytes=10, max_bytes=100)
    a, b = partition(partitions, "a"), partition(partitions, "b")
    partitions.park(a, bytes(10))
    partitions.park(b, bytes(10))
    assert not a.unverified
    partitions.park(a, b"1")
    assert (a.unverified, b.unverified, partitions.parked_bytes, partitions.forgotten) == (True, False, 10, 1)


def test_the_largest_lane_goes_when_all_are_too_large_together() -> None:
    partitions = Partitions(Clock(), max_partition_bytes=100, max_bytes=30)
    a, b, c = (partition(partitions, name) for name in "abc")
    partitions.park(a, bytes(10))
    partitions.park(b, bytes(15))
    partitions.load(c, [bytes(6)])
    assert [each.unverified for each in (a, b, c)] == [False, True, False]
    assert partitions.parked_bytes == 16


def test_lanes_that_nobody_registers_are_forgotten_after_the_retention() -> None:
    clock = Clock()
    partitions = Partitions(clock)
    gone, taken = partition(partitions, "gone"), partition(partitions, "taken")
    partitions.park(gone, b"state")
    taken.taker, taken.unregistered_since = Taken(), 0.0
    clock.now += 60
    partitions.expire(60)
    assert partitions.get(gone.subject) is gone
    clock.now += 1
    partitions.expire(60)
    assert [each.worker.worker_id for each in partitions] == ["taken"]
    assert partitions.parked_bytes == 0


def test_a_cut_of_a_parked_lane_reaches_as_far_as_the_stream_was_read() -> None:
    a = partition(Partitions(Clock()), "a")
    assert a.position(7) == 7
    a.covered = 9
    assert a.position(7) == 9


def test_a_cut_of_a_live_lane_reaches_no_further_than_what_is_in_the_index() -> None:
    a = partition(Partitions(Clock()), "a")
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
