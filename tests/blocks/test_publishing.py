"""What a rank has to send: batches in order, or the state where batches would not tell; bounded, and sent again."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.seeds import test_seed

from kvscout_blocks.bytes.events import Cleared, DecodedBatch, Event, EventBatch, Stored
from kvscout_blocks.bytes.messages import parse_batch
from kvscout_blocks.index.backend import make_index
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.publish.history import PublishedHistory
from kvscout_blocks.publish.publication import Confirmed, Outbox, Outgoing, Publication
from kvscout_blocks.source.decisions import SequencedBatch
from kvscout_blocks.source.feed import SourceState
from kvscout_blocks.source.published import PublishedReader
from kvscout_common.hashing import native_available
from kvscout_common.worker import PoolKey, WorkerRank

SEED = test_seed()
POOL = PoolKey("m", "default", 4, False)


class Rank:
    """An index and its publication."""

    def __init__(
        self, outbox: Outbox, name: str = "w", *, max_message_bytes: int = 1 << 19, has_state: bool = True
    ) -> None:
        self.rank = WorkerRank(name, 0)
        self.index = make_index(4)
        self.index.add_worker(self.rank, WorkerOptions())
        self.local = PublishedHistory(self.rank, POOL, self.index, history_incomplete=lambda: False)
        self.publication = Publication(
            self.rank, POOL, {}, self.local, outbox, max_message_bytes=max_message_bytes, has_state=has_state
        )
        self.next_id = 0

    def apply(self, *events: Event, event_id: int | None = None) -> None:
        """The engine sent a batch."""
        number = self.next_id if event_id is None else event_id
        self.next_id = number + 1
        content = EventBatch(events or (Stored((number + 1,), number or None, (1, 2, 3, number), 4),))
        batch: SequencedBatch[DecodedBatch] = SequencedBatch(
            number, 1000 + number, content, 10, cleared=content.cleared
        )
        self.index.apply(self.rank, content, epoch=0, event_id=number)
        self.publication.applied(batch)

    def take(self) -> list[Outgoing]:
        """What is under way."""
        return asyncio.run(self.publication.take()) if self.publication.due else []

    def begin(self, epoch: int = 7) -> None:
        """An epoch begins, and its state has arrived."""
        self.publication.begin(epoch, None)
        assert [outgoing.chunk for outgoing in self.take()] == [0]
        self.publication.confirm()


def ids(outgoing: list[Outgoing]) -> list[int | None]:
    return [item.event_id for item in outgoing if item.chunk is None]


@pytest.fixture
def outbox() -> Outbox:
    return Outbox(1 << 20, lambda: None)


@pytest.fixture
def rank(outbox: Outbox) -> Rank:
    made = Rank(outbox)
    made.begin()
    return made


def test_batches_wait_in_order_and_are_gone_when_confirmed(rank: Rank, outbox: Outbox) -> None:
    for _ in range(5):
        rank.apply()
    taken = rank.take()
    assert ids(taken) == [0, 1, 2, 3, 4]
    assert [parse_batch(item.message).epoch for item in taken] == [7] * 5
    rank.apply()
    assert rank.take() == []  # one burst at a time
    assert rank.publication.waiting == 6
    rank.publication.confirm()
    assert rank.publication.confirmed == Confirmed(4, 1004)
    assert ids(rank.take()) == [5]
    rank.publication.confirm()
    assert outbox.empty
    assert outbox.buffered_bytes == 0


def test_what_failed_is_sent_again_before_what_came_since(rank: Rank) -> None:
    rank.apply()
    rank.apply()
    rank.take()
    rank.apply()
    rank.publication.fail()
    assert ids(rank.take()) == [0, 1, 2]


def test_batches_that_may_have_arrived_out_of_order_are_followed_by_the_state(rank: Rank, outbox: Outbox) -> None:
    rank.apply()
    rank.apply()
    rank.take()
    rank.publication.fail(out_of_order=True)
    (state,) = rank.take()
    assert (state.chunk, state.event_id) == (0, 1)
    assert outbox.buffered_bytes == 0


def test_a_state_that_failed_is_cut_anew_and_has_what_came_since(rank: Rank) -> None:
    rank.publication.lose()
    (first,) = rank.take()
    assert first.event_id is None
    rank.apply()
    rank.publication.fail()
    (again,) = rank.take()
    assert (again.chunk, again.event_id) == (0, 0)
    rank.publication.confirm()
    assert rank.take() == []
    assert rank.publication.confirmed == Confirmed(0, 1000)


def test_batches_after_a_cut_follow_it(rank: Rank) -> None:
    rank.apply()
    rank.publication.lose()
    rank.apply()
    (state,) = rank.take()
    assert state.event_id == 1
    rank.apply()
    rank.publication.confirm()
    assert ids(rank.take()) == [2]


def test_a_batch_that_does_not_follow_or_is_too_large_makes_the_state_due(outbox: Outbox) -> None:
    rank = Rank(outbox, max_message_bytes=600)
    rank.begin()
    rank.apply()
    rank.apply(event_id=5)
    (state,) = rank.take()
    assert (state.chunk, state.event_id) == (0, 5)
    rank.publication.confirm()
    rank.apply(Stored(tuple(range(100, 140)), None, tuple(range(160)), 4))
    (state,) = rank.take()
    assert (state.chunk, state.event_id, rank.publication.oversized) == (0, 6, 1)


def test_a_cleared_cache_needs_nothing_of_before(rank: Rank) -> None:
    rank.apply(Cleared(), event_id=50)
    assert ids(rank.take()) == [50]


def test_when_too_much_waits_the_oldest_rank_gives_up_its_batches_for_its_state() -> None:
    outbox = Outbox(4096, lambda: None)
    slow, other = Rank(outbox, "slow"), Rank(outbox, "other")
    for each in (slow, other):
        each.begin()
    slow.apply()
    for _ in range(30):
        other.apply()
        assert outbox.buffered_bytes <= 4096
    assert slow.publication.dropped == 1
    (state,) = slow.take()
    assert (state.chunk, state.event_id) == (0, 0)
    slow.publication.confirm()
    assert other.publication.dropped > 0
    taken = other.take()
    assert taken[0].chunk == 0
    assert taken[0].event_id == 29
    other.publication.confirm()
    assert (outbox.buffered_bytes, outbox.empty) == (0, True)


def test_another_epoch_voids_what_waits_and_what_is_under_way(rank: Rank, outbox: Outbox) -> None:
    rank.apply()
    rank.take()
    rank.apply()
    rank.index.reset(rank.rank)
    rank.publication.begin(8, None)
    rank.publication.confirm()
    assert rank.publication.confirmed is None
    (state,) = rank.take()
    assert (state.epoch, state.event_id) == (8, None)
    assert outbox.buffered_bytes == 0


def test_an_incarnation_that_goes_on_sends_only_what_was_not_published(outbox: Outbox) -> None:
    rank = Rank(outbox)
    rank.publication.resume(7, Confirmed(2, 1002))
    for _ in range(5):
        rank.apply()
    assert ids(rank.take()) == [3, 4]
    assert [parse_batch(m).event_id for m in asyncio.run(rank.local.recover(1, None)).messages] == [1, 2, 3, 4]


def test_what_is_held_back_is_not_due(rank: Rank) -> None:
    rank.publication.held_back = True
    rank.apply()
    assert rank.take() == []
    rank.publication.held_back = False
    assert ids(rank.take()) == [0]


class Reader:
    """Reads what arrives, as an indexer does."""

    def __init__(self, rank: WorkerRank) -> None:
        self.index = make_index(4)
        self.index.add_worker(rank, WorkerOptions())
        self.last: int | None = None
        self._rank = rank
        self._reader = PublishedReader(self.index, rank, POOL)

    def arrive(self, outgoing: Outgoing) -> None:
        """A message came; NATS and its clients keep the order of what arrives."""
        item = self._reader.read(outgoing.message)
        if isinstance(item, SourceState):
            self.index.load_messages(item.messages)
            self.last = item.last_event_id
        elif item is not None and item.event_id > (-1 if self.last is None else self.last):
            assert item.event_id == (0 if self.last is None else self.last + 1) or item.cleared
            self.index.apply(self._rank, item.content, epoch=0, event_id=item.event_id)
            self.last = item.event_id


@pytest.mark.slow
def test_whatever_fails_a_reader_ends_where_the_index_is() -> None:
    rng = random.Random(SEED)
    for _ in range(40):
        outbox = Outbox(rng.choice([1200, 4096, 1 << 20]), lambda: None)
        rank = Rank(outbox, max_message_bytes=rng.choice([160, 1 << 19]))
        reader = Reader(rank.rank)
        rank.publication.begin(7, None)
        for _ in range(60):
            for _ in range(rng.randrange(4)):
                rank.apply(*([Cleared()] if rng.random() < 0.05 else []))
            taken = rank.take()
            arrived = rng.randrange(len(taken) + 1)
            for outgoing in taken[:arrived]:
                reader.arrive(outgoing)
            if taken and arrived == len(taken) and rng.random() < 0.7:
                rank.publication.confirm()
            elif taken:
                rank.publication.fail()
        while taken := rank.take():
            for outgoing in taken:
                reader.arrive(outgoing)
            rank.publication.confirm()
        theirs, ours = reader.index.dump(rank.rank), rank.index.dump(rank.rank)
        assert theirs is not None
        assert ours is not None
        assert (theirs.blocks, theirs.last_event_id) == (ours.blocks, ours.last_event_id)
        assert (outbox.buffered_bytes, outbox.empty) == (0, True)


def test_who_keeps_no_state_shows_its_beginning_and_leaves_a_gap_where_something_is_lost() -> None:
    outbox = Outbox(2_000, lambda: None)
    rank = Rank(outbox, has_state=False)
    rank.begin()
    rank.apply()
    assert ids(rank.take()) == [0]
    rank.publication.confirm()
    for _ in range(9):
        rank.apply()
    # Under the bound again, the next ones wait.
    assert 0 < outbox.buffered_bytes <= 2_000
    assert rank.publication.dropped > 0
    assert ids(rank.take()) == list(range(rank.publication.dropped + 1, 10))
    rank.publication.confirm()
    assert not rank.publication.due
    assert outbox.buffered_bytes == 0


def test_who_keeps_no_state_sends_what_failed_again_in_whatever_order_it_may_have_arrived() -> None:
    outbox = Outbox(1 << 20, lambda: None)
    rank = Rank(outbox, has_state=False)
    rank.publication.begin(7, None)
    assert [item.chunk for item in rank.take()] == [0]
    rank.publication.fail()
    # An incarnation that nothing has happened in yet is told again; its first batch tells of it as well.
    assert [item.chunk for item in rank.take()] == [0]
    rank.apply()
    rank.publication.fail()
    assert ids(rank.take()) == [0]
    rank.apply()
    rank.publication.fail(out_of_order=True)
    assert ids(rank.take()) == [0, 1]
    rank.apply()
    rank.publication.begin(8, None)
    rank.next_id = 0
    rank.apply()
    rank.publication.fail()
    # Of the incarnation before nothing is sent any more.
    assert [(item.epoch, item.event_id) for item in rank.take()] == [(8, 0)]
    rank.publication.confirm()
    assert (outbox.buffered_bytes, outbox.empty) == (0, True)


def test_what_follows_a_batch_in_the_ring_is_found_in_bursts() -> None:
    rank = Rank(Outbox(1 << 20, lambda: None))
    rank.begin()
    for _ in range(6):
        rank.apply()
    sizes = [len(message) for message in rank.local.batches(0, max_bytes=1 << 20)]
    assert (len(sizes), rank.local.oldest_event_id) == (6, 0)
    assert rank.local.bytes_from(4) == sum(sizes[4:])
    taken = rank.local.batches(2, max_bytes=sum(sizes[2:4]))
    assert [parse_batch(message).event_id for message in taken] == [2, 3]


async def test_what_comes_while_a_state_is_taken_goes_after_it(rank: Rank, outbox: Outbox) -> None:
    rank.publication.begin(7, None)
    rank.apply()
    taking = asyncio.create_task(rank.publication.take())
    await asyncio.sleep(0)
    rank.apply()
    assert not rank.publication.due
    assert not outbox.empty
    (state,) = await taking
    assert (state.chunk, state.event_id) == (0, 0)
    rank.publication.confirm()
    assert ids(await rank.publication.take()) == [1]


@pytest.mark.skipif(not native_available(), reason="the reference takes it at once")
async def test_a_state_that_a_new_beginning_overtakes_is_taken_anew(rank: Rank) -> None:
    rank.publication.begin(7, None)
    large = tuple(range(100, 1_000_100))
    rank.apply(Stored(large, None, block_size=4, local_hashes=large))
    taking = asyncio.create_task(rank.publication.take())
    await asyncio.sleep(0)
    rank.index.reset(rank.rank)
    rank.publication.begin(8, None)
    assert await taking == []
    rank.publication.confirm()
    (state,) = await rank.publication.take()
    assert (state.chunk, state.epoch, state.event_id) == (0, 8, None)
