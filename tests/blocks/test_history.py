"""What a publisher answers to those who lost events: the slice, the state, or that there is nothing."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from kvscout.v1 import bridge_pb2
from kvscout_blocks.bytes.events import EventBatch, Stored
from kvscout_blocks.bytes.messages import parse_batch
from kvscout_blocks.index.backend import encode_batch, make_index
from kvscout_blocks.index.block_index import BlockIndex, WorkerOptions
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_blocks.publish.history import Outcome, PublishedHistory
from kvscout_blocks.source.recovery import recover_request
from kvscout_common.errors import Unavailable
from kvscout_common.hashing import native_available
from kvscout_common.worker import PoolKey, WorkerRank

RANK = WorkerRank("w", 0)
POOL = PoolKey("m", "default", 4, False)
EVENTS, DUMP = Outcome.RECOVER_OUTCOME_EVENTS, Outcome.RECOVER_OUTCOME_DUMP
TOO_NEW, INVALID = Outcome.RECOVER_OUTCOME_TOO_NEW, Outcome.RECOVER_OUTCOME_INVALID_RANGE


class Local:
    """A local index with the ring of the last four batches."""

    def __init__(self) -> None:
        self.index: BlockIndex = make_index(4)
        self.index.add_worker(RANK, WorkerOptions())
        self.incomplete = False
        self.local = PublishedHistory(
            RANK, POOL, self.index, history_incomplete=lambda: self.incomplete, max_batches=4, max_bytes=100_000
        )

    def publish(self, event_id: int, *, whole: bool = True) -> None:
        batch = EventBatch((Stored((event_id + 1,), event_id or None, (1, 2, 3, event_id), 4),))
        self.index.apply(RANK, batch, epoch=0, event_id=event_id)
        message = encode_batch(RANK, POOL, {}, batch, epoch=self.local.epoch, event_id=event_id)
        self.local.add(event_id, message if whole else None)

    def ask(self, first: int | None, last: int | None = None) -> tuple[int, list[int | None]]:
        """Outcome and event ids of an answer."""
        request = recover_request("default", RANK, first)
        if last is not None:
            request.to_event_id = last
        parts = list(asyncio.run(self.local.answer(request)))
        assert [part.part for part in parts] == list(range(len(parts)))
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
        outcomes = {part.outcome for part in parts}
        assert len(outcomes) == 1
        return outcomes.pop(), [part.batch.event_id for part in parts if part.HasField("batch")]


@pytest.fixture
def local() -> Local:
    made = Local()
    made.local.restart(7)
    for event_id in range(10):
        made.publish(event_id)
    return made


def test_a_range_within_the_ring_is_answered_with_exactly_that(local: Local) -> None:
    assert local.ask(6) == (EVENTS, [6, 7, 8, 9])
    assert local.ask(7, 8) == (EVENTS, [7, 8])
    assert local.ask(9, 9) == (EVENTS, [9])
    assert local.ask(9, 500) == (EVENTS, [9])


def test_from_older_than_the_ring_or_unset_is_answered_with_the_state(local: Local) -> None:
    assert local.ask(5) == (DUMP, [9])
    assert local.ask(0, 3) == (DUMP, [9])
    assert local.ask(None) == (DUMP, [9])


def test_from_after_the_last_is_too_new_and_backwards_is_invalid(local: Local) -> None:
    assert local.ask(10) == (TOO_NEW, [])
    assert local.ask(9, 8) == (INVALID, [])
    assert local.ask(11, 10) == (INVALID, [])
    answer = next(asyncio.run(local.local.answer(recover_request("default", RANK, 10))))
    assert answer.last_event_id == 9


def test_after_a_state_the_cursor_is_its_last_event_and_nothing_more_is_to_be_had(local: Local) -> None:
    (part,) = asyncio.run(local.local.answer(recover_request("default", RANK, None)))
    assert (part.batch.epoch, part.batch.event_id, part.last_event_id) == (7, 9, 9)
    assert local.ask(part.batch.event_id) == (EVENTS, [9])
    assert local.ask(part.batch.event_id + 1) == (TOO_NEW, [])


def test_a_state_says_that_it_may_lack_something(local: Local) -> None:
    local.incomplete = True
    (message,) = asyncio.run(local.local.recover(None, None)).messages
    assert parse_batch(message).events[0].state.history_incomplete


def test_a_batch_that_is_no_message_and_one_out_of_order_are_in_the_state_only(local: Local) -> None:
    local.publish(10, whole=False)
    assert local.ask(9) == (DUMP, [10])
    assert local.ask(11) == (TOO_NEW, [])
    local.publish(11)
    assert local.ask(11) == (EVENTS, [11])
    assert local.ask(10) == (DUMP, [11])
    local.publish(15)
    assert local.ask(11) == (DUMP, [15])
    assert local.ask(15) == (EVENTS, [15])


def test_the_ring_is_bounded_in_bytes_too(local: Local) -> None:
    local.local.add(10, b"x" * 99_000)
    assert asyncio.run(local.local.recover(10, None)).outcome == EVENTS
    local.local.add(11, b"x" * 99_000)
    assert asyncio.run(local.local.recover(10, None)).outcome == DUMP


def test_nothing_is_reported_before_the_epoch_is_known_and_nothing_of_a_former_one() -> None:
    made = Local()
    with pytest.raises(Unavailable):
        asyncio.run(made.local.answer(recover_request("default", RANK, None)))
    made.local.restart(7)
    (empty,) = asyncio.run(made.local.answer(recover_request("default", RANK, None)))
    assert (empty.outcome, empty.HasField("last_event_id"), empty.batch.epoch) == (DUMP, False, 7)
    assert made.ask(0) == (TOO_NEW, [])
    made.publish(0)
    made.local.restart(8)
    assert made.ask(0) == (TOO_NEW, [])


def test_the_reference_answers_the_same(local: Local) -> None:
    reference = ReferenceIndex(4)
    reference.add_worker(RANK, WorkerOptions())
    dump = local.index.dump(RANK)
    assert dump is not None
    reference.load(dump)
    other = PublishedHistory(RANK, POOL, reference, history_incomplete=lambda: False)
    other.restart(7, 9)
    assert asyncio.run(other.recover(None, None)) == asyncio.run(local.local.recover(None, None))


def test_answers_are_messages_of_the_protocol(local: Local) -> None:
    parts = [
        bridge_pb2.RecoverResponse.FromString(p.SerializeToString())
        for p in asyncio.run(local.local.answer(recover_request("default", RANK, 8)))
    ]
    assert [part.batch.event_id for part in parts] == [8, 9]


async def test_a_state_is_of_when_it_was_requested_whatever_is_applied_meanwhile(local: Local) -> None:
    asked = asyncio.create_task(local.local.state())
    await asyncio.sleep(0)
    local.publish(10)
    state = await asked
    (message,) = state.messages
    (run,) = parse_batch(message).events[0].state.runs
    assert (state.epoch, state.last_event_id, parse_batch(message).event_id) == (7, 9, 9)
    assert len(run.local_hashes) == 10


@pytest.mark.skipif(not native_available(), reason="the reference takes it at once")
async def test_a_rank_that_begins_anew_has_no_state_of_before(local: Local) -> None:
    large = tuple(range(100, 1_000_100))
    local.index.apply(RANK, EventBatch((Stored(large, None, block_size=4, local_hashes=large),)))
    asked = asyncio.create_task(local.local.state())
    await asyncio.sleep(0)
    local.index.reset(RANK)
    with pytest.raises(Unavailable):
        await asked
    local.local.restart(8)
    assert (await local.local.state()).epoch == 8


@pytest.mark.skipif(not native_available(), reason="the reference takes it at once")
async def test_the_state_of_a_large_rank_is_taken_and_encoded_beside_the_event_loop() -> None:
    index = make_index(4)
    index.add_worker(RANK, WorkerOptions())
    for prompt in range(64):
        hashes = tuple(range(prompt * 2048 + 1, prompt * 2048 + 2049))
        index.apply(RANK, EventBatch((Stored(hashes, None, block_size=4, local_hashes=hashes),)))
    local = PublishedHistory(RANK, POOL, index, history_incomplete=lambda: False)
    local.restart(7)
    gc.disable()  # a collection would run on either thread
    try:
        of_loop, of_all = time.thread_time(), time.process_time()
        state = await local.state()
        of_loop, of_all = time.thread_time() - of_loop, time.process_time() - of_all
    finally:
        gc.enable()
    assert sum(map(len, state.messages)) > 1 << 20
    assert of_loop < of_all / 2, f"{of_loop * 1000:.1f} of {of_all * 1000:.1f} ms"
