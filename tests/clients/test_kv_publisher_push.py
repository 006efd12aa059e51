"""Where a publisher that pushes goes on for each indexer: no socket, no clock."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvscout.v1 import events_pb2, indexer_pb2
from kvscout_blocks.bytes.events import Cleared, Removed
from kvscout_blocks.bytes.messages import parse_batch
from kvscout_client.kv_publisher_push import PushOutlet, PushPosition
from kvscout_client.kv_publisher_rank import MAX_EVENT_BLOCKS, PublishedRank, removed_events, stored_events
from kvscout_common.hashing import block_hashes
from kvscout_common.worker import EngineKind, Transport, WorkerRank, WorkerSpec

SPEC = WorkerSpec("w", "m", 4, engine=EngineKind.CUSTOM, transport=Transport.GRPC)


class Publisher:
    """A rank whose outlet pushes to nobody, and the position of one indexer."""

    def __init__(self, *, has_state: bool = True, ring: int = 4) -> None:
        self.rank = PublishedRank(
            SPEC, WorkerRank("w", 0), has_state=has_state, ring_batches=ring, clock=lambda: 0.0, wall_clock=lambda: 5.0
        )
        self.outlet = PushOutlet(self.rank, [], lease_seconds=None)
        self.position = PushPosition(self.rank)

    def publish(self, number: int, *, event_id: int | None = None) -> None:
        for _ in range(number):
            at = self.rank.last_event_id or 0
            self.rank.publish(self.outlet, stored([at] * 4, [at + 1]), event_id)

    def answers(self, last: int | None, *, epoch: int | None = None, resend_from: int | None = None) -> list[str]:
        """What is sent after an answer, in short: event ids, "state <cursor>", "greeting <resend_id>"."""
        epoch = self.rank.epoch if epoch is None else epoch
        self.position.on_answer(
            indexer_pb2.PublishEventsResponse(
                last_event_id=last, epoch=epoch, resend_from=resend_from, resend_id=0 if resend_from is None else 7
            )
        )
        return self.sends()

    def sends(self) -> list[str]:
        sent = []
        while messages := asyncio.run(self.position.take()):
            sent += [self.short(parse_batch(message)) for message in messages]
        return sent

    def short(self, message: events_pb2.KvEventBatch) -> str:
        assert (message.worker_id, message.model, message.epoch) == ("w", "m", self.rank.epoch)
        cursor = str(message.event_id) if message.HasField("event_id") else "-"
        if not message.events:
            return f"greeting {message.resend_id}"
        return f"state {cursor}" if message.events[0].HasField("state") else cursor


def stored(tokens: list[int], hashes: list[int], parent: int | None = None, **fields: object) -> list[Any]:
    given = {"lora_name": None, "medium": None, "cache_salt": None, "mm_items": (), "block_size": 4, **fields}
    return list(stored_events(tokens, [4] * len(hashes), hashes, parent, **given))  # type: ignore[arg-type]


def test_before_an_indexer_has_answered_nothing_is_sent() -> None:
    publisher = Publisher()
    publisher.publish(2)
    assert publisher.sends() == []


def test_who_has_nothing_gets_the_state_and_then_what_comes() -> None:
    publisher = Publisher()
    publisher.publish(2)
    assert publisher.answers(None, epoch=0) == ["state 1"]
    publisher.publish(2)
    assert publisher.sends() == ["2", "3"]
    assert publisher.sends() == []


def test_who_has_a_part_gets_the_rest_and_who_lost_something_gets_it_again() -> None:
    publisher = Publisher()
    publisher.publish(4)
    assert publisher.answers(1) == ["2", "3"]
    assert publisher.answers(1, resend_from=1) == ["1", "2", "3"]
    publisher.publish(1)
    assert publisher.sends() == ["4"]
    assert not publisher.position.caught_up
    publisher.answers(4)
    assert publisher.position.caught_up


def test_what_is_no_longer_in_the_ring_is_in_the_state() -> None:
    publisher = Publisher()
    publisher.publish(1)
    assert publisher.answers(0) == []
    publisher.publish(9)
    assert publisher.sends() == ["state 9"]
    assert publisher.position.dropped == 5
    assert publisher.answers(9, resend_from=3) == ["state 9"]
    # From the beginning on, even where the ring has it: a state makes an incomplete history whole.
    assert publisher.answers(9, resend_from=0) == ["state 9"]


def test_who_asks_for_what_is_not_there_yet_is_told_that_there_is_no_more() -> None:
    publisher = Publisher()
    publisher.publish(1)
    assert publisher.answers(0, resend_from=1) == ["greeting 7"]


def test_without_a_state_what_is_no_longer_in_the_ring_is_a_gap_and_a_greeting_says_so() -> None:
    publisher = Publisher(has_state=False)
    assert publisher.answers(None, epoch=0) == ["state -"]
    publisher.publish(10)
    assert publisher.sends() == ["6", "7", "8", "9"]
    assert publisher.position.dropped == 6
    assert publisher.answers(None, resend_from=0) == ["greeting 7"]
    publisher.publish(1)
    assert publisher.sends() == ["10"]
    assert publisher.answers(10, resend_from=8) == ["8", "9", "10"]


def test_without_a_state_who_comes_late_gets_what_the_ring_has() -> None:
    publisher = Publisher(has_state=False)
    publisher.publish(3)
    assert publisher.answers(None, epoch=0) == ["0", "1", "2"]


def test_a_new_incarnation_begins_with_its_state_whatever_was_asked_of_the_one_before() -> None:
    publisher = Publisher()
    publisher.publish(3)
    assert publisher.answers(2) == []
    publisher.position.on_answer(
        indexer_pb2.PublishEventsResponse(last_event_id=2, epoch=publisher.rank.epoch, resend_from=1)
    )
    publisher.rank.restart(publisher.outlet, None)
    assert publisher.rank.epoch == 5001
    assert publisher.sends() == ["state -"]
    publisher.publish(1)
    assert publisher.sends() == ["0"]


def test_an_indexer_that_knows_a_newer_incarnation_is_a_problem() -> None:
    publisher = Publisher()
    publisher.answers(3, epoch=2**50)
    assert publisher.position.outdated
    assert "newer than ours" in publisher.position.problem


def test_a_batch_too_large_for_a_message_is_in_the_state() -> None:
    publisher = Publisher()
    publisher.publish(1)
    assert publisher.answers(0) == []
    tokens, hashes = list(range(40_000 * 4)), list(range(1, 40_001))
    # More than one event: its own numbers have room, an engine's number has not.
    with pytest.raises(ValueError, match=f"at most {MAX_EVENT_BLOCKS} blocks"):
        publisher.rank.publish(publisher.outlet, stored(tokens, hashes), 1)
    publisher.rank.publish(publisher.outlet, stored(tokens, hashes), None)
    assert publisher.sends() == ["1", "2", "3"]
    publisher.rank.publish(publisher.outlet, [Removed(tuple(range(70_000)))], None)
    assert publisher.sends()[-1] == "state 4"
    assert publisher.outlet.dropped == 1


def test_a_gap_in_the_engines_numbers_makes_history_incomplete_until_the_cache_is_cleared() -> None:
    publisher = Publisher()
    publisher.publish(1, event_id=0)
    publisher.publish(1, event_id=2)
    assert publisher.rank.history_incomplete
    chunk = parse_batch(asyncio.run(publisher.rank.local.state()).messages[0]).events[0].state
    assert chunk.history_incomplete
    assert sum(len(run.local_hashes) for run in chunk.runs) == 1
    publisher.rank.publish(publisher.outlet, [Cleared()], 9)
    assert not parse_batch(asyncio.run(publisher.rank.local.state()).messages[0]).events[0].state.history_incomplete
    with pytest.raises(ValueError, match="event_id 9 must be at least 10"):
        publisher.publish(1, event_id=9)


def test_an_engines_number_is_taken_even_where_no_block_is_full() -> None:
    publisher = Publisher()
    rank, outlet = publisher.rank, publisher.outlet
    assert rank.publish(outlet, stored_short(), None) is None
    assert rank.publish(outlet, stored_short(), 0) == 0
    publisher.publish(1, event_id=1)
    assert not rank.history_incomplete
    assert publisher.answers(None) == ["state 1"]
    assert publisher.answers(1, resend_from=1) == ["1"]


def stored_short() -> list[Any]:
    return list(
        stored_events([1, 2], [2], [1], None, block_size=4, lora_name=None, medium=None, cache_salt=None, mm_items=())
    )


def test_local_hashes_are_those_of_prompts() -> None:
    tokens = list(range(12))
    prompt = block_hashes(tokens, 4, cache_salt="salt", lora_name="adapter")
    whole = stored(tokens, [1, 2, 3], cache_salt="salt", lora_name="adapter")
    assert list(whole[0].local_hashes) == prompt
    later = stored(tokens[4:], [2, 3], parent=1, cache_salt="salt", lora_name="adapter")
    assert list(later[0].local_hashes) == prompt[1:]
    items = stored(tokens, [1, 2, 3], mm_items=[["image"], ["image"], []])
    assert list(items[0].local_hashes) == block_hashes(tokens, 4, mm_items=[("image", 0, 8)])


def test_many_blocks_become_events_that_follow_one_another() -> None:
    number = MAX_EVENT_BLOCKS + 1
    first, second = stored([7] * 4 * number, list(range(number)), parent=99)
    assert (first.parent, second.parent) == (99, MAX_EVENT_BLOCKS - 1)
    assert len(first.engine_hashes) + len(second.engine_hashes) == number
    assert len(second.local_hashes) == 1
    assert len(removed_events(range(number), medium="cpu")) == 2
    assert removed_events([], medium=None) == []


def test_a_worker_of_several_ranks_names_the_rank_in_each_message() -> None:
    spec = replace(SPEC, dp_size=2)
    rank = PublishedRank(spec, WorkerRank("w", 1), has_state=True, clock=lambda: 0.0, wall_clock=lambda: 5.0)
    assert parse_batch(rank.greeting()).dp_rank == 1
    rank.publish(PushOutlet(rank, [], lease_seconds=None), stored([1] * 4, [1]), None)
    assert [parse_batch(message).dp_rank for message in rank.local.batches(0, max_bytes=1)] == [1]


async def test_what_an_indexer_had_before_it_forgot_the_worker_has_not_arrived() -> None:
    rank = Publisher().rank
    outlet = PushOutlet(rank, ["127.0.0.1:1"], lease_seconds=None)
    target = outlet.targets[0]
    rank.publish(outlet, stored([1] * 4, [1]), None)
    target.position.on_answer(indexer_pb2.PublishEventsResponse(last_event_id=0, epoch=rank.epoch))
    target.connected = True
    await outlet.drained()
    # Its stream has ended, and what it answered is of before.
    target.connected = False
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await outlet.drained()
    await outlet.close(deregister=False)
