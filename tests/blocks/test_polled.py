"""Polled events: the engine's JSON in, blocks and what is missing out."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.engine_events import BLOCK_SIZE, prompt
from support.polled_engine import PolledEngine, polled_engine
from support.processes import eventually

from kvscout_blocks.bytes.frames import MalformedBatch
from kvscout_blocks.bytes.polled import PolledReader
from kvscout_blocks.bytes.wire import decode_batch
from kvscout_blocks.index.backend import make_index
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.source import polled_feed
from kvscout_blocks.source.polled_feed import EnginePoll
from kvscout_blocks.source.source import Source
from kvscout_common.hashing import block_hashes
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.worker import CopyMode, EngineKind, WorkerRank, WorkerSpec

LOG = logging.getLogger("tests.polled")


class Reading:
    """An engine that is polled, and what became of its events."""

    def __init__(self, engine: PolledEngine, dp_size: int) -> None:
        self.engine = engine
        spec = WorkerSpec(
            "w", "m", BLOCK_SIZE, engine=EngineKind.TRTLLM, http_endpoint=engine.url, dp_size=dp_size,
            copies=CopyMode.SET,
        )  # fmt: skip
        self.poll = EnginePoll(spec, warnings=RateLimitedLog(LOG), failed=self._failed)
        self.index = make_index(BLOCK_SIZE, False)
        self.sources = []
        for rank in spec.ranks:
            self.index.add_worker(rank, WorkerOptions.of(spec))
            source = Source(
                spec,
                rank,
                self.poll.feed(rank, self.index),
                self.index,
                recoveries=asyncio.Semaphore(1),
                clock=time.monotonic,
                ttl_seconds=60.0,
                warnings=RateLimitedLog(LOG),
                incomplete=lambda incomplete: None,
                failed=self._failed,
            )
            self.sources.append(source)
        for source in self.sources:
            source.open()

    @property
    def sequence(self) -> Any:
        """The state of rank 0."""
        return self.sources[0].sequence

    def tiers(self, tokens: list[int], rank: int = 0) -> tuple[int, int]:
        """Device overlap of a prompt, and with the host's blocks."""
        hashes = block_hashes(tokens, BLOCK_SIZE)
        found = self.index.find_matches(hashes, now=time.monotonic()).by_worker().get(WorkerRank("w", rank))
        return (found.device, found.host) if found is not None else (0, 0)

    async def until(self, **wanted: Any) -> None:
        """Wait for a state of rank 0's sequence."""

        async def reached() -> bool:
            return all(getattr(self.sequence, name) == value for name, value in wanted.items())

        await eventually(reached, what=f"{wanted}")

    def _failed(self, error: BaseException) -> None:
        raise error


@asynccontextmanager
async def reading(engine: PolledEngine, dp_size: int = 1) -> AsyncIterator[Reading]:
    async with polled_engine(engine):
        found = Reading(engine, dp_size)
        try:
            yield found
        finally:
            for source in found.sources:
                source.close()
            assert found.poll.ended
            assert found.poll.task is not None
            await asyncio.gather(found.poll.task, return_exceptions=True)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polled_feed, "POLL_SECONDS", 0.002)
    monkeypatch.setattr(polled_feed, "MAX_PAUSE_SECONDS", 0.01)


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_events_are_fetched_by_the_method_that_the_release_has(method: str) -> None:
    async with reading(PolledEngine(method=method)) as polled:
        polled.engine.store([11, 12, 13], prompt(3))
        await polled.until(last_id=1, history_incomplete=False)
        assert polled.tiers(prompt(4)) == (3, 3)
        polled.engine.remove(13)
        polled.engine.store([21], prompt(1, first=9), parent=12)
        await polled.until(last_id=3)
        assert polled.tiers(prompt(4)) == (3, 3)
        assert polled.sequence.counters["applied"] == 4


async def test_a_part_of_a_block_is_left_out_and_so_is_its_removal() -> None:
    async with reading(PolledEngine()) as polled:
        polled.engine.store([11, 12], prompt(2)[:-1])
        polled.engine.store([13], [5, 6], parent=11)
        polled.engine.remove(12)
        await polled.until(last_id=3)
        assert polled.tiers(prompt(2)) == (1, 1)


async def test_levels_are_tiers_and_a_removal_takes_the_block_from_where_it_is() -> None:
    async with reading(PolledEngine()) as polled:
        engine = polled.engine
        engine.store([11, 12, 13], prompt(3))
        engine.move(12, 0, 1)
        await polled.until(last_id=2)
        assert polled.tiers(prompt(3)) == (1, 3)
        engine.remove(13)
        engine.remove(12)
        await polled.until(last_id=4)
        assert polled.tiers(prompt(3)) == (1, 1)
        engine.store([12], prompt(1, first=5), parent=11, level=1)
        engine.store([12], prompt(1, first=5), parent=11)
        await polled.until(last_id=6)
        assert polled.tiers(prompt(3)) == (2, 2)
        engine.remove(12)
        await polled.until(last_id=7)
        assert polled.tiers(prompt(3)) == (1, 1)


async def test_windows_are_groups_and_the_largest_needs_all_blocks() -> None:
    # A window of 5 tokens needs the last block of the prefix only.
    async with reading(PolledEngine(windows=(5, 4096))) as polled:
        engine = polled.engine
        engine.store([1, 2, 3], prompt(3), window=4096)
        engine.store([1, 2, 3], prompt(3), window=5)
        engine.remove(1, window=5)
        await polled.until(last_id=4)
        assert polled.tiers(prompt(3)) == (3, 3)
        engine.remove(3, window=5)
        await polled.until(last_id=5)
        assert polled.tiers(prompt(3)) == (2, 2)
        engine.remove(1, window=4096)
        await polled.until(last_id=6)
        assert polled.tiers(prompt(3)) == (0, 0)


async def test_each_rank_has_its_own_numbers_and_one_that_is_not_registered_is_said() -> None:
    async with reading(PolledEngine(dp_size=2), dp_size=2) as polled:
        polled.engine.store([1, 2], prompt(2), rank=1)
        await polled.until(last_id=0)
        await eventually(lambda: _is(polled, 1, 1), what="rank 1")
        assert (polled.tiers(prompt(2), 0), polled.tiers(prompt(2), 1)) == ((0, 0), (2, 2))
    async with reading(PolledEngine(dp_size=2)) as polled:
        await polled.until(last_id=0)
        assert "ranks [1]" in polled.sources[0].feed.broken


async def _is(polled: Reading, rank: int, last_id: int) -> bool:
    return polled.sources[rank].sequence.last_id == last_id


async def test_a_restarted_engine_begins_anew_though_it_says_the_same_again() -> None:
    async with reading(PolledEngine()) as polled:
        for _ in range(2):
            polled.engine.store([1, 2], prompt(2))
        await polled.until(last_id=2)
        polled.engine.restart()
        polled.engine.store([1, 2], prompt(2))
        await polled.until(last_id=1)
        assert polled.sources[0].resets == 1
        assert polled.tiers(prompt(2)) == (2, 2)
        polled.engine.restart()
        await polled.until(last_id=0)
        assert polled.tiers(prompt(2)) == (0, 0)


async def test_what_another_reader_drains_is_missing_out_loud() -> None:
    async with reading(PolledEngine()) as polled:
        polled.engine.store([1, 2], prompt(2))
        await polled.until(last_id=1)
        polled.engine.answering.clear()
        polled.engine.remove(2)
        assert len(polled.engine.drain()) == 1
        polled.engine.store([9], prompt(1, first=50))
        polled.engine.answering.set()
        await polled.until(last_id=3, history_incomplete=True, missing="2..2")
        assert polled.sequence.counters["demotions"] == 1
        # What was held is no more than a prediction.
        assert polled.tiers(prompt(2)) == (0, 0)
        assert polled.tiers(prompt(1, first=50)) == (1, 1)


async def test_what_the_engines_buffer_dropped_before_the_first_poll_is_missing() -> None:
    engine = PolledEngine(buffer_size=2)
    for number in range(5):
        engine.store([number + 1], prompt(1, first=100 * number))
    async with reading(engine) as polled:
        await polled.until(last_id=5, history_incomplete=True, missing="0..3")


async def test_events_of_one_answer_come_in_the_order_of_their_numbers() -> None:
    engine = PolledEngine()
    engine.store([1], prompt(1))
    engine.remove(1)
    engine.store([1], prompt(1))
    engine._buffer.reverse()
    async with reading(engine) as polled:
        await polled.until(last_id=3, history_incomplete=False)
        assert polled.tiers(prompt(1)) == (1, 1)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"<html>", "the answer is not a JSON"),
        (b"{}", "the answer is no list"),
        (b"[[]]", "an event has no number"),
        (b'[{"event_id": -1}]', "an event has no number"),
        (b'[{"event_id": 1, "attention_dp_rank": "x"}]', "an event has no valid rank"),
        (b" " * 4096, "answers more than 1024 bytes"),
    ],
)
async def test_an_answer_that_cannot_be_read_is_a_loss_and_the_next_one_is_read(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, says: str
) -> None:
    # More than any other answer here has.
    monkeypatch.setattr(polled_feed, "MAX_ANSWER_BYTES", 1024)
    async with reading(PolledEngine()) as polled:
        polled.engine.store([1], prompt(1))
        await polled.until(last_id=1)
        polled.engine.answering.clear()
        polled.engine.strange.append(answer)
        reasons: list[str] = []
        monkeypatch.setattr(polled.poll, "_report", reasons.append)
        polled.engine.answering.set()
        await polled.until(history_incomplete=True, missing="whatever came after 1, before a reconnect")
        assert says in reasons[0]
        assert polled.sources[0].malformed == 1
        polled.engine.store([2], prompt(1, first=5), parent=1)
        await polled.until(last_id=2)


async def test_an_engine_that_hangs_is_said_and_loses_nothing_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polled_feed, "ANSWER_SECONDS", 0.05)
    engine = PolledEngine()
    engine.answering.clear()
    async with reading(engine) as polled:
        feed = polled.sources[0].feed
        await eventually(lambda: _said(feed), what="an outage")
        # An answer that is under way may take its time now, however slow the machine is.
        monkeypatch.setattr(polled_feed, "ANSWER_SECONDS", 30.0)
        polls = engine.polls + 2

        async def asked_again() -> bool:
            return engine.polls >= polls

        await eventually(asked_again, what="another request")
        engine.store([1], prompt(1))
        engine.answering.set()
        await polled.until(last_id=1, history_incomplete=False)
        assert (feed.outage, feed.broken) == ("", "")


async def _said(feed: Any) -> bool:
    return "does not answer" in feed.outage


async def test_an_engine_without_the_path_is_said_to_be_one() -> None:
    async with reading(PolledEngine(method="PUT")) as polled:
        feed = polled.sources[0].feed

        async def said() -> bool:
            return "is not there" in feed.outage

        await eventually(said, what="an outage")
        assert polled.sequence.last_id is None


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"type": "stored"},
        {"type": "stored", "blocks": [{"block_hash": "no digest", "tokens": [{"token_id": 1}] * 4}]},
        {"type": "stored", "blocks": [{"block_hash": 1, "tokens": [{"token_id": "ab"}] * 4}]},
        {"type": "stored", "blocks": [{"block_hash": 2**70, "tokens": [{"token_id": 1}] * 4}]},
        {"type": "removed", "block_hashes": [None]},
        {"type": "updated", "block_hash": 1, "cache_level": {}},
        {"type": "invented"},
    ],
)
def test_an_event_that_cannot_be_read_costs_itself_and_keeps_its_number(data: Any) -> None:
    events = PolledReader(4, 0).read(json.dumps([{"event_id": 3, "data": data}]).encode())
    ((event_id, payload),) = events[0]
    batch = decode_batch(payload)
    assert (event_id, batch.events, len(batch.faults)) == (3, (), 1)


def test_what_a_newer_release_says_of_a_block_is_part_of_it() -> None:
    engine = PolledEngine()
    engine.store(["ab" * 32], prompt(1), cache_salt="s", mm_keys=[{"type": "mm_key", "hash": "cd" * 32}])
    ((_, _), (_, payload)) = PolledReader(4, 0).read(json.dumps(engine.drain()).encode())[0]
    (event,) = decode_batch(payload).events
    assert (event.engine_hashes, event.cache_salt, event.mm_items) == (  # type: ignore[union-attr]
        (0xABABABABABABABAB,),
        "s",
        (("cd" * 32,),),
    )
    engine.emit({"type": "stored", "parent_hash": None, "blocks": [
        {"block_hash": 1, "tokens": [{"token_id": 1, "token_extra_id": 5}] * 4}
    ]})  # fmt: skip
    ((_, payload),) = PolledReader(4, 0).read(json.dumps(engine.drain()).encode())[0]
    assert decode_batch(payload).events[0].mm_items == (("token_extra_id 5",),)  # type: ignore[union-attr]


def test_blocks_of_another_size_than_registered_are_told_from_parts_of_one() -> None:
    engine = PolledEngine()
    engine.store([1, 2], prompt(2))
    body = json.dumps(engine.drain()).encode()
    for registered in (2, 8):
        (_, (_, payload)) = PolledReader(registered, 0).read(body)[0]
        (event,) = decode_batch(payload).events
        assert event.block_size == 4  # type: ignore[union-attr]


def test_more_windows_than_any_engine_has_are_refused() -> None:
    entries = [{"event_id": n, "data": {"type": "created"}, "window_size": n + 1} for n in range(65)]
    with pytest.raises(MalformedBatch, match="windows"):
        PolledReader(4, 0).read(json.dumps(entries).encode())
