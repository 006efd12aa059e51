"""Messages of `SubscribeKvEvents` as batches of events."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgpack
import pytest
from support.engine_events import BLOCK_SIZE, CLEARED, batch, prompt, removed, stored
from support.seeds import test_seed

from kvscout.smg import kv_events_pb2
from kvscout_blocks.bytes import subscribed
from kvscout_blocks.bytes.events import Cleared, FaultKind, Removed, Stored, Tier
from kvscout_blocks.bytes.frames import MalformedBatch
from kvscout_blocks.bytes.subscribed import StreamBroken, SubscribedBatch, SubscribedReader
from kvscout_blocks.bytes.wire import decode_batch
from kvscout_mocker.engine.kv_stream import Relay

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "golden_payloads.json").read_text())


def reader(*, trtllm: bool = False) -> SubscribedReader:
    return SubscribedReader(BLOCK_SIZE, 0, trtllm=trtllm)


def read(message: kv_events_pb2.KvEventBatch, by: SubscribedReader | None = None) -> SubscribedBatch:
    found = (by or reader()).read(message.SerializeToString()).batch
    assert found is not None
    return found


def message(*events: kv_events_pb2.KvCacheEvent, number: int = 0, rank: int | None = 0) -> kv_events_pb2.KvEventBatch:
    return kv_events_pb2.KvEventBatch(sequence_number=number, dp_rank=rank, events=events)


def blocks(count: int, *, size: int = BLOCK_SIZE, **fields: Any) -> kv_events_pb2.KvCacheEvent:
    return kv_events_pb2.KvCacheEvent(
        stored=kv_events_pb2.KvBlocksStored(
            blocks=[
                kv_events_pb2.KvBlock(block_hash=number, token_ids=range(size), block_size=size)
                for number in range(1, count + 1)
            ],
            **fields,
        )
    )


def cleared() -> kv_events_pb2.KvCacheEvent:
    return kv_events_pb2.KvCacheEvent(cleared=kv_events_pb2.KvCacheCleared())


def chunk(index: int, count: int, *events: kv_events_pb2.KvCacheEvent, number: int) -> kv_events_pb2.KvEventBatch:
    made = message(*events, number=number)
    made.snapshot.index, made.snapshot.count = index, count
    return made


@pytest.mark.parametrize("release", [name for name in GOLDEN if not name.startswith("trtllm")])
def test_what_every_release_publishes_reads_the_same_after_a_server_passed_it_on(release: str) -> None:
    payload = bytes.fromhex(GOLDEN[release])
    direct = decode_batch(payload)
    passed_on = decode_batch(read(Relay(1).message(5, payload)).payload)
    assert passed_on.events == direct.events
    assert not passed_on.faults
    assert passed_on.dp_rank == 1


def test_adapters_salts_and_images_are_those_of_the_engine() -> None:
    extra_keys = [["salt", "adapter"], ["adapter", ["a" * 64, 7]]]
    event = stored([1, 2], prompt(2), lora_id=3, lora_name="adapter", extra_keys=extra_keys)
    child = stored([3], prompt(1), parent=2, lora_id=3, lora_name="adapter", extra_keys=[["adapter"]])
    payload = batch(event, child)
    sent = Relay(0).message(0, payload)
    # The server says the salt of a block's parent too, which the chain of hashes carries already.
    assert sent.events[1].stored.cache_salt == "salt"
    assert decode_batch(read(sent).payload).events == decode_batch(payload).events


@pytest.mark.parametrize(
    ("fields", "tier"),
    [
        ({}, Tier.DEVICE),
        ({"tier": kv_events_pb2.KV_CACHE_TIER_HOST}, Tier.HOST),
        ({"tier": kv_events_pb2.KV_CACHE_TIER_DISK}, Tier.DISK),
        ({"tier": kv_events_pb2.KV_CACHE_TIER_EXTERNAL}, Tier.EXTERNAL),
        ({"tier": kv_events_pb2.KV_CACHE_TIER_DEVICE, "medium": "CPU_PINNED"}, Tier.HOST),
    ],
)
def test_the_engines_own_word_for_a_tier_counts_and_else_the_servers(fields: dict[str, Any], tier: Tier) -> None:
    gone = kv_events_pb2.KvCacheEvent(removed=kv_events_pb2.KvBlocksRemoved(block_hashes=[1], **fields))
    first, second = decode_batch(read(message(blocks(1, **fields), gone)).payload).events
    assert isinstance(first, Stored)
    assert isinstance(second, Removed)
    assert (first.tier, second.tier) == (tier, tier)


def test_older_servers_name_the_tier_by_its_level() -> None:
    event = blocks(1)
    event.stored.blocks[0].cache_level = 2
    (found,) = decode_batch(read(message(event)).payload).events
    assert isinstance(found, Stored)
    assert found.tier is Tier.DISK


def test_what_cannot_be_read_costs_its_event() -> None:
    unknown = kv_events_pb2.KvCacheEvent(event_id=1)
    nowhere = blocks(1, tier=kv_events_pb2.KV_CACHE_TIER_UNSPECIFIED, medium="MOON")
    found = decode_batch(read(message(unknown, nowhere, cleared())).payload)
    assert found.events == (Cleared(),)
    assert [kind for kind, _ in found.faults] == [FaultKind.UNKNOWN_TAG, FaultKind.BAD_EVENT]


def test_a_message_that_only_reports_the_load_has_no_batch() -> None:
    heartbeat = message(number=7)
    heartbeat.load.load_only = True
    found = reader().read(heartbeat.SerializeToString())
    assert (found.batch, found.has_load) == (None, True)
    loaded = message(cleared(), number=8)
    loaded.load.SetInParent()
    found = reader().read(loaded.SerializeToString())
    assert found.batch is not None
    assert (found.batch.event_id, found.has_load) == (8, True)


def test_the_chunks_of_a_state_say_what_is_missing_until_the_last() -> None:
    by = reader()
    said = [
        read(made, by).missing
        for made in (
            chunk(0, 3, cleared(), blocks(1), number=10),
            chunk(1, 3, blocks(1), number=11),
            chunk(2, 3, blocks(1), number=12),
            message(blocks(1), number=13),
        )
    ]
    rest = "the rest of the state that the engine sends"
    assert said == [rest, rest, "", None]


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([chunk(0, 2, blocks(1), number=1), chunk(1, 2, blocks(1), number=2)], id="without a beginning"),
        pytest.param([chunk(0, 3, cleared(), number=1), chunk(2, 3, blocks(1), number=3)], id="one is left out"),
        pytest.param([chunk(0, 2, cleared(), number=1), chunk(1, 2, blocks(1), number=5)], id="numbers that jump"),
        pytest.param(
            [chunk(0, 2, cleared(), number=1), message(number=2), chunk(1, 2, number=3)], id="a batch in between"
        ),
    ],
)
def test_a_state_that_is_not_whole_is_none(chunks: list[kv_events_pb2.KvEventBatch]) -> None:
    by = reader()
    assert [read(made, by).missing for made in chunks][-1] == "parts of the state that the engine sent"


def test_a_server_that_came_late_says_so() -> None:
    made = chunk(0, 1, cleared(), number=9)
    made.snapshot.unknown_before = 1234
    assert read(made).missing == "1,234 batches that the engine's gRPC server never saw"


def test_a_new_stream_does_not_go_on_with_the_state_of_the_last() -> None:
    by = reader()
    read(chunk(0, 2, cleared(), number=1), by)
    by.begin()
    assert read(chunk(1, 2, blocks(1), number=2), by).missing


@pytest.mark.parametrize(
    "limits",
    [{"MAX_EVENTS": 1}, {"MAX_BLOCKS": 3}, {"MAX_TOKENS": 15}],
    ids=lambda limits: next(iter(limits)),
)
def test_a_batch_beyond_a_limit_keeps_its_number_and_nothing_else(
    limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, most in limits.items():
        monkeypatch.setattr(subscribed, name, most)
    found = read(message(blocks(2), blocks(2), number=6))
    assert (found.event_id, found.malformed) == (6, True)
    assert decode_batch(found.payload).events == ()
    state = chunk(0, 1, cleared(), blocks(2), blocks(2), number=6)
    assert read(state).missing == "parts of the state that the engine sent"


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (b"\x1a\xff", "message"),
        (message(number=2**63).SerializeToString(), "sequence_number"),
        (message(rank=-1).SerializeToString(), "dp_rank"),
        (message(rank=1024).SerializeToString(), "dp_rank"),
    ],
)
def test_what_is_no_batch_has_no_place_in_the_sequence(made: bytes, field: str) -> None:
    with pytest.raises(MalformedBatch) as caught:
        reader().read(made)
    assert caught.value.field == field


def test_a_batch_without_a_rank_is_the_first_ones() -> None:
    assert read(message(rank=None), SubscribedReader(BLOCK_SIZE, 3, trtllm=False)).dp_rank == 3


def test_parts_of_blocks_are_left_out_for_tensorrt_llm() -> None:
    whole = blocks(3)
    whole.stored.blocks[2].block_size = 2
    del whole.stored.blocks[2].token_ids[2:]
    (found,) = decode_batch(read(message(whole, blocks(1, size=3)), reader(trtllm=True)).payload).events
    assert isinstance(found, Stored)
    assert (found.engine_hashes, len(found.tokens)) == ((1, 2), 2 * BLOCK_SIZE)


def test_tensorrt_llm_counts_for_all_ranks_and_what_came_before_is_not_known() -> None:
    by = reader(trtllm=True)
    found = [read(message(number=number, rank=rank), by) for number, rank in ((7, 0), (8, 1), (9, 0))]
    assert [(each.dp_rank, each.event_id, bool(each.missing)) for each in found] == [
        (0, 0, True),
        (1, 0, True),
        (0, 1, False),
    ]
    with pytest.raises(StreamBroken):
        read(message(number=11), by)
    by.begin()
    again = read(message(number=0), by)
    assert (again.event_id, bool(again.missing)) == (2, True)


def test_whatever_comes_is_read_or_refused() -> None:
    rng = random.Random(test_seed())
    payload = msgpack.packb([1.5, [stored([1, 2], prompt(2)), removed([1]), CLEARED], 0])
    good = Relay(0).message(3, payload).SerializeToString()
    by = reader()
    for _ in range(2_000):
        made = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            made[rng.randrange(len(made))] = rng.randrange(256)
        try:
            found = by.read(bytes(made)).batch
            if found is not None:
                decode_batch(found.payload)
        except MalformedBatch:
            pass
