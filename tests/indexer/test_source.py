"""Sources over real sockets: what becomes of lost, repeated, malformed and restarted event streams."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from support.engine_events import BLOCK_SIZE, CLEARED, batch, chain, prompt, removed, stored
from support.indexer_client import MODEL, IndexerClient, local_indexer
from support.recorded_engine import RecordedEngine, recorded_engine
from support.tcp_server import tcp_server
from support.vllm_publisher import vllm_publisher

from kvscout.v1 import indexer_pb2
from kvscout.v1.types_pb2 import GetStatusRequest
from kvscout.v1.workers_pb2 import EventEndpoint, RegisterWorkerRequest, Worker
from kvscout_blocks.index.backend import make_index
from kvscout_blocks.index.block_index import TWIN_LIMIT
from kvscout_blocks.source import subscriber
from kvscout_common.hashing import native_available
from kvscout_indexer.config import IndexerConfig
from kvscout_indexer.indexer import MAX_RECOVERIES

LIVE = indexer_pb2.SOURCE_STATE_LIVE
DISCONNECTED = indexer_pb2.SOURCE_STATE_DISCONNECTED
INCOMPLETE = indexer_pb2.SOURCE_STATE_INCOMPLETE


@pytest.fixture(params=["intake", "loop"])
async def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[IndexerClient]:
    """An indexer whose sockets a native thread reads, or the event loop: nobody must be able to tell."""
    if request.param == "loop":
        monkeypatch.setattr("kvscout_blocks.source.zmq_reader.make_intake", lambda **_: None)
    async with local_indexer() as (started, _):
        yield started


@pytest.fixture
async def engine() -> AsyncIterator[RecordedEngine]:
    async with recorded_engine() as started:
        yield started


@pytest.fixture
async def mute() -> AsyncIterator[RecordedEngine]:
    """An engine without a replay socket."""
    async with recorded_engine(has_replay=False) as started:
        yield started


async def connect(client: IndexerClient, engine: RecordedEngine, **fields: object) -> None:
    """Registers an engine and waits until its events come through and nothing is being replayed."""
    await client.register(engine, **fields)  # type: ignore[arg-type]  # fields of a worker
    await engine.subscribed()
    await client.until(lambda s: s.replays >= bool(engine.replay_endpoint) and "wait" not in s.reason)


async def test_batches_of_a_live_engine_are_applied_in_order(client: IndexerClient, engine: RecordedEngine) -> None:
    await connect(client, engine)
    await engine.publish(*chain(5), batch(removed([4])))
    status = await client.until_applied(5)
    assert await client.overlap(prompt(5)) == 3
    assert (status.state, status.reason, status.applied, status.gaps) == (LIVE, "", 6, 0)
    assert status.last_event_age_seconds >= 0
    assert (status.blocks, status.hidden) == (4, 1)


async def test_a_gap_is_replayed_from_the_last_batch_applied_and_each_batch_applied_once(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await connect(client, engine)
    batches = chain(9)
    await engine.publish(*batches[:6])
    await client.until_applied(5)
    asked_before = len(engine.replays_asked)
    engine.lose(*batches[6:8])
    await engine.publish(batches[8])
    status = await client.until_applied(8)
    # 5 is asked for again to compare it, and dropped.
    assert engine.replays_asked[asked_before:] == [5]
    assert (status.applied, status.gaps, status.state) == (9, 1, LIVE)
    assert await client.overlap(prompt(9)) == 9
    # One copy each: had a batch been applied twice, a removal would leave one.
    await engine.publish(*[batch(removed([number])) for number in range(9, 0, -1)])
    assert (await client.until_applied(17)).blocks == 0


async def test_live_batches_wait_while_a_replay_runs(client: IndexerClient, engine: RecordedEngine) -> None:
    await connect(client, engine)
    batches = chain(3)
    await engine.publish(batches[0])
    await client.until_applied(0)
    engine.answering.clear()
    engine.lose(batches[1])
    # A removal that overtook the replayed store would leave the block for ever.
    await engine.publish(batches[2], batch(removed([3])))
    status = await client.until(lambda s: s.lag_batches == 2)
    assert status.state == indexer_pb2.SOURCE_STATE_REPLAYING
    assert status.reason == "2 live batches wait"
    assert await client.overlap(prompt(3)) == 1
    engine.answering.set()
    await client.until_applied(3)
    assert await client.overlap(prompt(3)) == 2


@pytest.mark.parametrize("replay_topics", [False, True], ids=["without topic", "with topic"])
async def test_first_contact_in_mid_stream_replays_from_the_beginning(
    client: IndexerClient, *, replay_topics: bool
) -> None:
    async with recorded_engine(replay_topics=replay_topics) as engine:
        engine.lose(*chain(7))
        await client.register(engine)
        # Without a live batch: the connection alone is reason enough to ask.
        status = await client.until_applied(6)
        assert engine.replays_asked == [0]
        assert (status.state, status.applied) == (LIVE, 7)
        assert await client.overlap(prompt(7)) == 7


async def test_first_contact_by_a_batch_that_is_not_the_first(client: IndexerClient, engine: RecordedEngine) -> None:
    await connect(client, engine)
    batches = chain(8)
    engine.lose(*batches[:7])
    await engine.publish(batches[7])
    await client.until_applied(7)
    assert set(engine.replays_asked) == {0}
    assert await client.overlap(prompt(8)) == 8


async def test_a_sequence_that_begins_again_is_a_restarted_engine(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await connect(client, engine)
    await engine.publish(*chain(9))
    await client.until_applied(8)
    engine.forget()
    other = prompt(1, first=1000)
    engine.lose(batch(stored([77], other)), batch(removed([77])))
    await engine.publish(batch(stored([78], other)))
    status = await client.until_applied(2)
    assert (status.resets, status.blocks, status.state) == (1, 1, LIVE)
    assert await client.overlap(prompt(9)) == 0
    assert await client.overlap(other) == 1


async def test_an_engine_that_restarts_and_overtakes_behind_a_reconnect_is_found_out(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await connect(client, engine)
    await engine.publish(*chain(6))
    await client.until_applied(5)
    await engine.stop()
    engine.forget()
    others = [batch(stored([number], prompt(1, first=1000 * number))) for number in range(1, 10)]
    engine.lose(*others[:6])
    await engine.start()
    await engine.subscribed()
    # 6 follows the last batch of the former life: only the digest of 5 tells that they are not the same.
    await engine.publish(others[6])
    engine.lose(others[7])
    await engine.publish(others[8])
    status = await client.until_applied(8)
    assert status.resets == 1
    assert status.blocks == 9
    assert await client.overlap(prompt(6)) == 0
    for number in range(1, 10):
        assert await client.overlap(prompt(1, first=1000 * number)) == 1


async def test_batches_lost_while_the_connection_was_down_are_replayed(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await connect(client, engine)
    batches = chain(6)
    await engine.publish(*batches[:3])
    await client.until_applied(2)
    await engine.stop()
    engine.lose(*batches[3:])
    await engine.start()
    status = await client.until_applied(5)
    assert engine.replays_asked[-1] == 2
    assert (status.resets, status.state) == (0, LIVE)
    assert await client.overlap(prompt(6)) == 6


async def test_without_a_replay_socket_old_blocks_become_predictions_and_the_answer_a_lower_bound(
    client: IndexerClient, mute: RecordedEngine
) -> None:
    await connect(client, mute)
    batches = chain(6)
    await mute.publish(*batches[:3])
    await client.until_applied(2)
    exact = await client.matches(prompt(6))
    assert not exact.lower_bound
    assert not exact.incomplete_rows
    mute.lose(batches[3])
    await mute.publish(batches[4])
    status = await client.until_applied(4)
    assert (status.state, status.reason) == (INCOMPLETE, "events are missing: 3..3")
    assert (status.demotions, status.gaps) == (1, 1)
    found = await client.matches(prompt(6))
    assert found.lower_bound
    assert list(found.incomplete_rows) == [0]
    assert list(found.overlaps.device_blocks) == [0]
    assert list(found.overlaps.predicted_blocks) == [3]


async def test_a_lower_bound_is_reported_for_a_worker_without_a_row_too(
    client: IndexerClient, mute: RecordedEngine
) -> None:
    await connect(client, mute)
    mute.lose(batch(stored([1], prompt(1))))
    await mute.publish(batch(stored([9], prompt(1, first=500))))
    await client.until_applied(1)
    found = await client.matches(prompt(1))
    assert not found.overlaps.worker_ids
    assert found.lower_bound


async def test_a_block_stored_below_a_prediction_is_found_again(client: IndexerClient, mute: RecordedEngine) -> None:
    await connect(client, mute)
    batches = chain(4)
    await mute.publish(*batches[:2])
    await client.until_applied(1)
    mute.lose(batch(removed([99])))
    await mute.publish(batches[2])
    await client.until_applied(3)
    assert list((await client.matches(prompt(4))).overlaps.predicted_blocks) == [3]
    assert list((await client.matches(prompt(4))).overlaps.device_blocks) == [0]


async def test_blocks_that_a_limit_kept_out_make_the_answer_a_lower_bound_until_the_cache_is_cleared(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await connect(client, engine)
    await engine.publish(*(batch(stored([name], prompt(1))) for name in range(1, TWIN_LIMIT + 1)))
    await client.until_applied(TWIN_LIMIT - 1)
    assert not (await client.matches(prompt(1))).lower_bound
    await engine.publish(batch(stored([99], prompt(1))))
    status = await client.until_applied(TWIN_LIMIT)
    assert (status.state, status.reason) == (INCOMPLETE, "a limit of the index left blocks out: twin_limit 1")
    found = await client.matches(prompt(1))
    assert (list(found.overlaps.device_blocks), found.lower_bound, list(found.incomplete_rows)) == ([1], True, [0])
    await engine.publish(batch(CLEARED), batch(stored([8], prompt(1))))
    status = await client.until_applied(TWIN_LIMIT + 2)
    found = await client.matches(prompt(1))
    assert (status.state, found.lower_bound, list(found.incomplete_rows)) == (LIVE, False, [])


async def test_a_cleared_cache_ends_incomplete_history(client: IndexerClient, mute: RecordedEngine) -> None:
    await connect(client, mute)
    mute.lose(*chain(3))
    await mute.publish(batch(stored([8], prompt(1))))
    assert (await client.until_applied(3)).state == INCOMPLETE
    await mute.publish(batch(CLEARED, stored([9], prompt(1, first=500))))
    status = await client.until_applied(4)
    assert (status.state, status.blocks) == (LIVE, 1)
    found = await client.matches(prompt(1, first=500))
    assert (list(found.overlaps.device_blocks), found.lower_bound) == ([1], False)


async def test_a_reconnect_without_a_replay_socket_is_incomplete_history(
    client: IndexerClient, mute: RecordedEngine
) -> None:
    await connect(client, mute)
    await mute.publish(*chain(2))
    await client.until_applied(1)
    await mute.stop()
    await mute.start()
    status = await client.until(lambda s: s.state == INCOMPLETE)
    assert status.reason.startswith("events are missing: whatever came after 1")
    assert list((await client.matches(prompt(2))).overlaps.predicted_blocks) == [2]


async def test_history_older_than_the_replay_buffer_is_lost_and_what_is_left_is_applied(
    client: IndexerClient,
) -> None:
    async with recorded_engine(buffer_steps=3) as engine:
        await connect(client, engine)
        batches = chain(10)
        await engine.publish(*batches[:2])
        await client.until_applied(1)
        engine.lose(*batches[2:9])
        await engine.publish(batch(stored([50, 51], prompt(2, first=1000))))
        status = await client.until_applied(9)
        assert (status.state, status.reason) == (INCOMPLETE, "events are missing: 2..6")
        assert await client.overlap(prompt(2, first=1000)) == 2
        assert list((await client.matches(prompt(2))).overlaps.predicted_blocks) == [2]


async def test_an_engine_whose_socket_drops_replies_is_asked_until_all_that_it_has_is_here(
    client: IndexerClient,
) -> None:
    count = 6_000
    async with vllm_publisher(payload_bytes=8_192) as engine:
        await engine.publish(count)
        await client.register(engine)
        status = await client.until_applied(count - 1)
        assert (status.state, status.applied, status.blocks, status.demotions) == (LIVE, count, count, 0)
        # A native thread reads as fast as an engine sends.
        assert status.replays > 1 or native_available(), "nothing was dropped"
        await engine.publish(1)
        assert (await client.until_applied(count)).state == LIVE


async def test_a_replay_socket_that_stays_silent_is_given_up_after_retries(
    client: IndexerClient, engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "REPLAY_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(subscriber, "REPLAY_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("kvscout_blocks.source.replay.FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("kvscout_blocks.source.replay.MAX_ATTEMPTS", 3)
    await connect(client, engine)
    await engine.publish(*chain(1))
    before = (await client.until_applied(0)).replays
    engine.answering.clear()
    engine.lose(batch())
    await engine.publish(batch(stored([9], prompt(1, first=500))))
    status = await client.until(lambda s: s.state == INCOMPLETE)
    assert (status.replays - before, status.reason) == (3, "events are missing: 1..1")
    assert await client.overlap(prompt(1, first=500)) == 1


async def test_a_replay_socket_that_stays_silent_does_not_matter_where_nothing_is_missing(
    client: IndexerClient, engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "REPLAY_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(subscriber, "REPLAY_PAUSE_SECONDS", 0.01)
    engine.answering.clear()
    await client.register(engine)
    await engine.subscribed()
    await engine.publish(*chain(2))
    assert (await client.until_applied(1)).state == LIVE


async def test_a_replay_without_its_end_is_over_when_it_reaches_what_came_live(
    client: IndexerClient, engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The long wait is for engines that do not answer at all.
    monkeypatch.setattr(subscriber, "REPLAY_IDLE_SECONDS", 600.0)
    monkeypatch.setattr(subscriber, "REPLAY_PAUSE_SECONDS", 0.05)
    await connect(client, engine)
    batches = chain(5)
    await engine.publish(*batches[:2])
    await client.until_applied(1)
    engine.lose(batches[2])
    engine.lost_replies.append(range(2, 5))
    engine.answering.clear()
    await engine.publish(*batches[3:])
    await client.until(lambda s: s.lag_batches == 2)
    engine.answering.set()
    status = await client.until_applied(4)
    assert (status.state, status.demotions, status.replays) == (LIVE, 0, 2)


@pytest.mark.parametrize(
    "frames",
    [
        [b"kv-events"],
        [b"kv-events", b"\0" * 7, b"payload"],
        [b"kv-events", b"\0" * 8, b"payload", b"more"],
        [b"kv-events", b"", b""],
    ],
    ids=["one frame", "short seq", "four frames", "empty"],
)
async def test_malformed_frames_between_good_batches_cost_nothing(
    client: IndexerClient, engine: RecordedEngine, frames: list[bytes]
) -> None:
    await connect(client, engine)
    batches = chain(2)
    await engine.publish(batches[0])
    await engine.send(frames)
    await engine.publish(batches[1])
    status = await client.until_applied(1)
    assert (status.malformed, status.applied, status.gaps, status.state) == (1, 2, 0, LIVE)
    assert await client.overlap(prompt(2)) == 2


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"not msgpack", b"\x93\x00\x00\x00", b"\xdd\xff\xff\xff\xff"])
async def test_a_malformed_batch_costs_itself_and_its_number(
    client: IndexerClient, engine: RecordedEngine, payload: bytes
) -> None:
    await connect(client, engine)
    batches = chain(2)
    await engine.publish(batches[0], payload, batches[1])
    status = await client.until_applied(2)
    assert (status.malformed, status.applied, status.gaps, status.replays, status.state) == (1, 3, 0, 1, LIVE)
    assert await client.overlap(prompt(2)) == 2


async def test_an_event_that_cannot_be_read_costs_itself_alone(client: IndexerClient, engine: RecordedEngine) -> None:
    await connect(client, engine)
    await engine.publish(
        batch(
            stored([1], prompt(1)),
            {"type": "BlockStored", "block_hashes": [2]},
            {"type": "SomethingNew"},
            stored([3], prompt(1, first=5), parent=1),
        )
    )
    status = await client.until_applied(0)
    assert (status.malformed, status.applied) == (2, 1)
    assert await client.overlap(prompt(2)) == 2


async def test_a_hundred_malformed_batches_in_a_row_quarantine_a_worker_and_leave_others_alone(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    async with recorded_engine() as healthy:
        await connect(client, engine)
        await client.register(healthy, worker_id="healthy")
        await healthy.subscribed()
        await engine.publish(*[b"\xc1"] * 120)
        status = await client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_QUARANTINED)
        assert status.reason == "too many malformed batches in a row"
        await client.until(lambda s: s.dropped == 20)
        await healthy.publish(*chain(2))
        assert (await client.until_applied(1, "healthy")).state == LIVE


async def test_batches_of_another_rank_are_refused_until_they_name_the_registered_one(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await connect(client, engine)
    await engine.publish(batch(stored([1], prompt(1)), rank=3))
    status = await client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_MISCONFIGURED)
    assert status.reason == "batches name rank 3, the registration 0"
    assert status.dropped == 1
    assert await client.overlap(prompt(1)) == 0
    engine.forget()
    await engine.publish(batch(stored([1], prompt(1)), rank=0))
    assert (await client.until_applied(0)).state == LIVE
    assert await client.overlap(prompt(1)) == 1


async def test_what_another_rank_replays_is_not_indexed(client: IndexerClient, engine: RecordedEngine) -> None:
    engine.lose(*(batch(stored([number], prompt(1, first=number)), rank=3) for number in range(1, 4)))
    await client.register(engine)
    status = await client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_MISCONFIGURED)
    assert (status.reason, status.applied, status.blocks) == ("batches name rank 3, the registration 0", 0, 0)
    assert await client.overlap(prompt(1)) == 0


async def test_what_was_known_of_a_source_is_dropped_when_its_batches_name_another_rank(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await connect(client, engine)
    await engine.publish(*chain(2))
    await client.until_applied(1)
    await engine.publish(batch(stored([9], prompt(1, first=99)), rank=3))
    status = await client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_MISCONFIGURED)
    assert (status.blocks, status.resets, status.HasField("last_event_id")) == (0, 1, False)
    assert await client.overlap(prompt(2)) == 0


async def test_an_engine_of_another_block_size_is_incompatible_and_not_indexed(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await connect(client, engine)
    await engine.publish(batch(stored([1], prompt(2), block_size=2 * BLOCK_SIZE)))
    status = await client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_INCOMPATIBLE)
    assert "8" in status.reason
    assert "4" in status.reason
    await engine.publish(batch(stored([2], prompt(1))))
    assert (await client.until(lambda s: s.ignored["incompatible"] == 1)).blocks == 0


async def test_an_engine_may_connect_to_us(client: IndexerClient) -> None:
    async with recorded_engine() as reserved:
        address = reserved.endpoint
    async with recorded_engine(connect_to=address) as engine:
        await client.register(engine, bind=True)
        await engine.subscribed()
        await engine.publish(*chain(3))
        await client.until_applied(2)
        assert await client.overlap(prompt(3)) == 3


async def test_an_address_that_is_in_use_is_shown_and_tried_again(
    client: IndexerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscout_blocks.source.zmq_feed.REOPEN_SECONDS", 0.05)
    occupant = socket.create_server(("127.0.0.1", 0))
    async with recorded_engine(connect_to=f"tcp://127.0.0.1:{occupant.getsockname()[1]}") as connecting:
        with occupant:
            await client.register(connecting, bind=True)
            status = await client.status()
            assert status.state == indexer_pb2.SOURCE_STATE_MISCONFIGURED
            assert "Address already in use" in status.reason
        await connecting.subscribed()
        await connecting.publish(*chain(1))
        assert (await client.until_applied(0)).state == LIVE


async def test_an_engine_that_dies_behind_its_socket_is_disconnected_until_it_is_back(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await connect(client, engine)
    await engine.publish(*chain(2))
    assert (await client.until_applied(1)).state == LIVE
    await engine.stop()
    status = await client.until(lambda s: s.state == DISCONNECTED)
    assert status.reason == f"nothing answers at {engine.endpoint}"
    assert await client.overlap(prompt(2)) == 2
    await engine.start()
    await client.until(lambda s: s.state == LIVE)


async def test_an_engine_that_was_never_there_is_disconnected_with_its_address(client: IndexerClient) -> None:
    async with recorded_engine() as engine:
        pass
    await client.register(engine)
    status = await client.until(lambda s: s.state == DISCONNECTED)
    assert status.reason == f"nothing answers at {engine.endpoint}"


async def test_what_accepts_and_hangs_up_is_disconnected(client: IndexerClient) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with tcp_server(hang_up) as port, recorded_engine() as engine:
        engine.endpoint = f"tcp://127.0.0.1:{port}"
        await client.register(engine)
        await client.until(lambda s: s.state == DISCONNECTED)


async def test_an_engine_that_connected_to_us_and_is_gone_is_disconnected(client: IndexerClient) -> None:
    async with recorded_engine() as reserved:
        address = reserved.endpoint
    async with recorded_engine(connect_to=address) as engine:
        await client.register(engine, bind=True)
        await engine.subscribed()
        await client.until(lambda s: s.reason == f"no event has arrived yet at {address}")
    status = await client.until(lambda s: s.state == DISCONNECTED)
    assert status.reason == f"nothing is connected to {address}, which is bound here for the engine to connect to"


async def test_a_frame_above_the_limit_costs_itself_and_the_connection_is_made_again(
    client: IndexerClient, engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "MAX_FRAME_BYTES", 4096)
    monkeypatch.setattr("kvscout_blocks.source.zmq_feed.REOPEN_SECONDS", 0.05)
    await connect(client, engine)
    batches = chain(4)
    await engine.publish(*batches[:2])
    await client.until_applied(1)
    await engine.send([b"kv-events", (99).to_bytes(8, "big"), b"x" * 5000])
    status = await client.until(lambda s: s.state == DISCONNECTED and "above 4096 bytes" in s.reason)
    assert status.malformed == 1
    # Lost while there was no connection: the replay has them.
    engine.lose(*batches[2:])
    status = await client.until_applied(3)
    assert (status.state, status.demotions, status.resets) == (LIVE, 0, 0)
    assert await client.overlap(prompt(4)) == 4


async def test_a_batch_above_the_limit_is_lost_history_and_what_follows_is_applied(
    client: IndexerClient, engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "MAX_FRAME_BYTES", 4096)
    monkeypatch.setattr(subscriber, "REPLAY_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(subscriber, "REPLAY_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr("kvscout_blocks.source.zmq_feed.REOPEN_SECONDS", 0.05)
    monkeypatch.setattr("kvscout_blocks.source.replay.FIRST_RETRY_SECONDS", 0.01)
    await connect(client, engine)
    await engine.publish(*chain(2))
    await client.until_applied(1)
    engine.forget_subscribers()
    await engine.publish(batch(stored([7], prompt(1, first=70), padding="x" * 5000)))
    await engine.subscribed()
    await engine.publish(batch(stored([8], prompt(1, first=80))))
    status = await client.until(lambda s: s.state == INCOMPLETE)
    assert (status.reason, status.malformed) == ("events are missing: 2..2", 1)
    assert await client.overlap(prompt(1, first=80)) == 1


async def test_a_name_that_cannot_be_resolved_is_the_sources_trouble_until_it_can(
    client: IndexerClient, engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscout_blocks.source.zmq_feed.LOOK_UP_SECONDS", 0.05)
    known: dict[str, str] = {}

    async def look_up(loop: object, host: str, *_: object, **__: object) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], 0))]

    monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", look_up)
    async with recorded_engine() as there:
        port = there.endpoint.rpartition(":")[2]
        replay_port = there.replay_endpoint.rpartition(":")[2]
        named = SimpleNamespace(
            endpoint=f"tcp://engine-0.ns:{port}", replay_endpoint=f"tcp://engine-0.ns:{replay_port}"
        )
        await client.register(named)
        status = await client.until(lambda s: s.state == DISCONNECTED)
        assert "host name 'engine-0.ns' cannot be resolved" in status.reason
        # A host that refuses: the pod has moved before its name did.
        known["engine-0.ns"] = "127.0.0.9"
        await client.until(lambda s: s.reason == f"nothing answers at {named.endpoint}")
        known["engine-0.ns"] = "127.0.0.1"
        there.lose(*chain(2))
        assert (await client.until_applied(1)).state == LIVE


async def test_an_engine_that_counts_from_1_is_whole_once_two_replays_begin_with_1(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    engine.next_seq = 1
    await connect(client, engine)
    batches = chain(4)
    await engine.publish(*batches[:3])
    status = await client.until_applied(3)
    assert (status.state, status.reason) == (INCOMPLETE, "events are missing: 0..0")
    await engine.publish(batches[3])
    status = await client.until(lambda s: s.state == LIVE)
    assert (status.last_event_id, status.blocks, status.applied) == (4, 4, 4)


async def test_an_engine_without_replay_that_comes_and_counts_from_1_is_whole_until_its_events_refer_to_others(
    client: IndexerClient, mute: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscout_blocks.source.zmq_feed.NEW_AFTER_SECONDS", 0.01)
    await mute.stop()
    await client.register(mute)
    await client.until(lambda s: s.state == DISCONNECTED)
    await mute.start()
    mute.next_seq = 1
    await mute.subscribed()
    await client.until(lambda s: s.reason == f"no event has arrived yet at {mute.endpoint}")
    await mute.publish(*chain(3))
    assert (await client.until_applied(3)).state == LIVE
    await mute.publish(batch(removed([77])))
    status = await client.until(lambda s: s.state == INCOMPLETE)
    assert (status.reason, status.blocks) == ("events are missing: 0..0", 3)


def _has_had(count: int, status: indexer_pb2.SourceStatus) -> bool:
    return status.applied + status.dropped == count


async def test_two_engines_at_one_endpoint_are_named(client: IndexerClient, caplog: pytest.LogCaptureFixture) -> None:
    async with recorded_engine() as reserved:
        address = reserved.endpoint
    async with recorded_engine(connect_to=address, has_replay=False) as one:
        async with recorded_engine(connect_to=address, has_replay=False) as other:
            await client.register(one, bind=True)
            await one.subscribed()
            await other.subscribed()
            for number in range(40):
                for sent, engine in enumerate((one, other), 2 * number + 1):
                    await engine.publish(batch(stored([number], prompt(1, first=sent))))
                    status = await client.until(partial(_has_had, sent))
            assert status.state == indexer_pb2.SOURCE_STATE_MISCONFIGURED
            assert status.reason.startswith("two publishers")
            assert status.resets <= 10
            assert len([record for record in caplog.records if "forgotten" in record.getMessage()]) <= 1


async def test_only_the_topic_requested_is_read(client: IndexerClient) -> None:
    async with recorded_engine(topic=b"kv@10.0.0.1:8000@tiny") as wanted:
        await connect(client, wanted, topic="kv@10.0.0.1")
        await wanted.send([b"kv@10.0.0.2:8000@tiny", b"\0" * 8, b"of another engine"])
        await wanted.publish(*chain(2))
        status = await client.until_applied(1)
        assert (status.applied, status.malformed) == (2, 0)


async def test_reset_worker_fetches_everything_again(client: IndexerClient, engine: RecordedEngine) -> None:
    await connect(client, engine)
    await engine.publish(*chain(4))
    await client.until_applied(3)
    answer = await client.rpc("ResetWorker", indexer_pb2.ResetWorkerRequest(worker_id="w"))
    assert answer.ranks == 1
    status = await client.until_applied(3)
    assert (status.resets, status.blocks, status.state) == (1, 4, LIVE)
    assert engine.replays_asked[-1] == 0
    assert await client.overlap(prompt(4)) == 4
    await engine.publish(batch(removed([4])))
    assert (await client.until_applied(4)).blocks == 3


async def test_reset_worker_without_a_replay_socket_leaves_a_lower_bound(
    client: IndexerClient, mute: RecordedEngine
) -> None:
    await connect(client, mute)
    await mute.publish(*chain(2))
    await client.until_applied(1)
    await client.rpc("ResetWorker", indexer_pb2.ResetWorkerRequest(worker_id="w", dp_rank=0))
    status = await client.status()
    assert (status.state, status.blocks, status.resets) == (INCOMPLETE, 0, 1)
    found = await client.matches(prompt(2))
    assert (list(found.overlaps.worker_ids), found.lower_bound) == ([], True)
    await mute.publish(batch(stored([9], prompt(1, first=500))))
    await client.until_applied(2)
    assert await client.overlap(prompt(1, first=500)) == 1


async def test_more_blocks_than_a_worker_has_prove_lost_removals_and_are_recovered_once(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await connect(client, engine, total_kv_blocks=3)
    # The engine's own history is sound: what reached us was not.
    sound = chain(2)
    await engine.publish(*chain(3))
    await client.until_applied(2)
    engine.buffer.update({0: sound[0], 1: sound[1], 2: batch(), 3: batch(CLEARED, stored([7], prompt(1)))})
    engine.next_seq = 3
    await engine.send([b"kv-events", (3).to_bytes(8, "big"), batch(stored([4], prompt(1, first=100)))])
    status = await client.until(lambda s: s.resets > 0 and s.blocks == 1)
    assert not status.over_capacity
    assert await client.overlap(prompt(1)) == 1


async def test_a_replay_that_ends_with_too_many_blocks_is_a_reason_to_recover_too(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    engine.lose(*chain(4))
    await client.register(engine, total_kv_blocks=3)
    await client.until_applied(3)
    status = await client.until(lambda s: s.resets == 1 and s.last_event_id == 3 and s.applied == 8)
    # The engine says so itself: it is tried once, and then shown.
    assert (status.over_capacity, status.state) == (True, LIVE)
    assert engine.replays_asked == [0, 0]


async def test_recovery_amidst_held_batches_applies_none_of_them_twice(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await connect(client, engine, total_kv_blocks=2)
    batches = [batch(stored([number], prompt(1, first=100 * number))) for number in range(1, 5)]
    await engine.publish(batches[0])
    await client.until_applied(0)
    engine.answering.clear()
    engine.lose(batches[1])
    # Published after the replay was answered, both are applied in one run of decisions when it ends: the third block
    # is one too many, the fourth comes after it.
    for seq in (2, 3):
        await engine.send([b"kv-events", seq.to_bytes(8, "big"), batches[seq]])
    await client.until(lambda s: s.lag_batches == 2)
    engine.answering.set()
    await client.until(lambda s: s.resets == 1)
    await client.until_applied(1)
    engine.lose(*batches[2:])
    await engine.publish(batch(removed([1, 2, 3, 4])))
    status = await client.until_applied(4)
    assert (status.blocks, status.ignored["unknown_removed"]) == (0, 0)


class Panic(BaseException):
    """What a panic of native code is to Python."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
@pytest.mark.parametrize("reader", ["intake", "loop"])
async def test_a_defect_while_ingesting_ends_the_indexer(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], reader: str
) -> None:
    if reader == "loop":
        monkeypatch.setattr("kvscout_blocks.source.zmq_reader.make_intake", lambda **_: None)
    with pytest.raises(BaseExceptionGroup) as crash:
        async with local_indexer() as (client, _), recorded_engine() as engine:
            await connect(client, engine)
            break_index(monkeypatch, kind)
            await engine.publish(batch(stored([1], prompt(1))))
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
    assert [str(error) for error in crash.value.exceptions] == ["the index is broken"]


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
async def test_a_defect_while_replaying_ends_the_indexer(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    with pytest.raises(BaseExceptionGroup) as crash:
        async with local_indexer() as (client, _), recorded_engine() as engine:
            engine.lose(*chain(3))
            engine.answering.clear()
            await client.register(engine)
            break_index(monkeypatch, kind)
            engine.answering.set()
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
    assert [str(error) for error in crash.value.exceptions] == ["the index is broken"]


def break_index(monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]) -> None:
    def apply(*_: object, **__: object) -> None:
        raise kind("the index is broken")

    monkeypatch.setattr(type(make_index(1)), "apply", apply)


async def test_predictions_of_lost_history_end_after_their_time(mute: RecordedEngine) -> None:
    async with local_indexer(IndexerConfig(router_ttl_seconds=0.05)) as (client, _):
        await connect(client, mute)
        batches = chain(3)
        await mute.publish(batches[0])
        await client.until_applied(0)
        mute.lose(batches[1])
        await mute.publish(batch(stored([40], prompt(1, first=500))))
        await client.until_applied(2)
        async with asyncio.timeout(30):
            while (await client.matches(prompt(1))).overlaps.worker_ids:
                await asyncio.sleep(0.01)
        assert (await client.matches(prompt(1))).lower_bound


async def test_five_hundred_and_twelve_engines_on_one_indexer(client: IndexerClient) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 1024)
    publishers = []
    try:
        for number in range(512):
            publisher = context.socket(zmq.XPUB)
            publisher.bind("tcp://127.0.0.1:*")
            endpoint = EventEndpoint(endpoint=publisher.get_string(zmq.LAST_ENDPOINT))
            worker = Worker(
                worker_id=f"w{number}", model=MODEL, block_size=BLOCK_SIZE, dp_size=1, event_endpoints=[endpoint]
            )
            await client.rpc("RegisterWorker", RegisterWorkerRequest(worker=worker))
            publishers.append(publisher)
        for publisher in publishers:
            assert await asyncio.to_thread(publisher.poll, 10_000)
        batches = chain(3)
        for seq, payload in enumerate(batches):
            for publisher in publishers:
                publisher.send_multipart([b"", seq.to_bytes(8, "big"), payload])
        async with asyncio.timeout(30):
            while set((found := await client.overlaps(prompt(3))).values()) != {3} or len(found) < 512:
                await asyncio.sleep(0.02)
        status = await client.rpc("GetStatus", GetStatusRequest())
        assert {(source.state, source.applied) for source in status.sources} == {(LIVE, 3)}
    finally:
        context.destroy(linger=0)


async def test_what_an_indexer_is_too_slow_to_read_is_dropped_by_zmq_and_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvscout_blocks.source.zmq_reader.make_intake", lambda **_: None)
    monkeypatch.setattr(subscriber, "RECEIVE_LIMIT", 5)
    engine = RecordedEngine(send_hwm=5)
    await engine.start()
    try:
        async with local_indexer() as (client, _):
            await connect(client, engine)
            # Publishing a megabyte at a time never yields to the loop that is to read it.
            batches = [batch(stored([number], prompt(1, first=number), padding="x" * 2**20)) for number in range(1, 61)]
            await engine.publish(*batches)
            status = await client.status()
            async with asyncio.timeout(30):
                # That the last ones are lost shows when something follows: engines go on.
                while status.last_event_id + 1 < engine.next_seq or status.state != LIVE:
                    await engine.publish(batch(removed([10_000])))
                    await asyncio.sleep(0.01)
                    status = await client.status()
            assert (status.applied, status.blocks) == (engine.next_seq, 60)
            assert status.gaps > 0
    finally:
        await engine.close()


async def test_at_most_sixteen_sources_are_recovered_at_once(client: IndexerClient) -> None:
    engines = [RecordedEngine() for _ in range(20)]
    try:
        for number, engine in enumerate(engines):
            await engine.start()
            engine.lose(*chain(2))
            engine.answering.clear()
            await client.register(engine, worker_id=f"w{number}")
            await engine.subscribed()
        for number in range(20):
            await client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_REPLAYING, f"w{number}")

        def asked() -> int:
            return sum(bool(engine.replays_asked) for engine in engines)

        async with asyncio.timeout(30):
            while asked() < MAX_RECOVERIES:
                await asyncio.sleep(0.01)
        # The others, whose turn it is not, are asked once one of these is done.
        for number in range(20):
            assert (await client.status(f"w{number}")).state == indexer_pb2.SOURCE_STATE_REPLAYING
        assert asked() == MAX_RECOVERIES
        for engine in engines:
            engine.answering.set()
        for number in range(20):
            assert (await client.until_applied(1, f"w{number}")).state == LIVE
    finally:
        for engine in engines:
            await engine.close()
