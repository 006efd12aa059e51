"""Engine payloads → events."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscout_blocks.bytes.events import FAULT_LIMIT, STATE_WINDOW, Cleared, EventBatch, FaultKind, Removed, Stored, Tier
from kvscout_blocks.bytes.frames import MalformedBatch, Message, parse_message, parse_replay_reply, replay_request
from kvscout_blocks.bytes.wire import MAX_PAYLOAD_BYTES, decode_batch

GOLDEN: dict[str, str] = json.loads((Path(__file__).parents[1] / "data" / "golden_payloads.json").read_text())


def batch(*events: Any, rank: Any = None) -> EventBatch:
    return decode_batch(msgpack.packb([1.5, list(events), rank]))


def stored_map(**fields: Any) -> dict[str, Any]:
    event = {"block_hashes": [11], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 4}
    return {"type": "BlockStored", **event, **fields}


def stored(**fields: Any) -> Stored:
    """The one event of a batch that has a map with these fields."""
    decoded = batch(stored_map(**fields))
    assert decoded.faults == ()
    (event,) = decoded.events
    assert isinstance(event, Stored)
    return event


def fault(event: Any) -> str:
    """The reason why an event is not read, between two good ones that are."""
    decoded = batch(["AllBlocksCleared"], event, ["AllBlocksCleared"])
    assert decoded.events == (Cleared(), Cleared())
    (only,) = decoded.faults
    assert only.kind is FaultKind.BAD_EVENT
    return only.reason


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_golden_payloads_of_all_releases_decode_to_the_same_events(engine: str) -> None:
    payloads = {name: bytes.fromhex(p) for name, p in GOLDEN.items() if name.startswith(engine)}
    assert len(payloads) == {"vllm": 29, "sglang": 17, "trtllm": 1}[engine]
    first, second = {
        "vllm": (1882140585328457242, 15284023028817948126),
        "sglang": (-3488128144981237669 + 2**64, 5674439469042975057),
        "trtllm": (0x5E0F3D2C1B4A7988, 0xDEADBEEF41215241),
    }[engine]
    tokens = tuple(range(1, 9))
    events = (Stored((first, second), None, tokens, 4), Removed((second,)), Cleared())
    for name, payload in payloads.items():
        rank = None if name == "vllm-0.9.0" else 1
        assert decode_batch(payload) == EventBatch(events, 1700000000.5, rank), name


def test_a_batch_can_be_a_map() -> None:
    raw = {"ts": 2.0, "events": [["AllBlocksCleared"]], "data_parallel_rank": 3, "new_field": [1]}
    decoded = decode_batch(msgpack.packb(raw))
    assert decoded == EventBatch((Cleared(),), 2.0, 3)
    assert decoded.cleared


def test_engine_hashes_are_unsigned_signed_or_bytes() -> None:
    event = stored(block_hashes=[2**64 - 1, -1, bytes(range(32))], parent_block_hash=b"\0" * 24 + b"\xff" * 8)
    assert event.engine_hashes == (2**64 - 1, 2**64 - 1, 0x18191A1B1C1D1E1F)
    assert event.parent == 2**64 - 1


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.DEVICE),
        ("gpu", Tier.DEVICE),
        ("CPU_PINNED", Tier.HOST),
        ("cpu_tier2", Tier.DISK),
        ("FS", Tier.DISK),
        ("Shared", Tier.EXTERNAL),
    ],
)
def test_media_become_tiers(medium: str | None, tier: Tier) -> None:
    assert stored(medium=medium).tier is tier
    (event,) = batch({"type": "BlockRemoved", "block_hashes": [1], "medium": medium}).events
    assert event == Removed((1,), tier)


def test_extra_keys_are_adapter_salt_and_multimodal_items() -> None:
    event = stored(
        block_hashes=[1, 2, 3],
        lora_id=1,
        lora_name="A",
        extra_keys=[["A", "salt"], ["A", ["img", 5], ["img2", 9]], None],
    )
    assert (event.lora_name, event.lora_id, event.cache_salt) == ("A", 1, "salt")
    assert event.mm_items == ((), ("img", "img2"), ())
    assert stored(extra_keys=["salt"]).cache_salt == "salt"
    assert stored(extra_keys=[None]).mm_items == ()
    # A salt that is not on the first block of a prompt would be another identity than the engine's.
    assert "extra_keys" in fault(stored_map(parent_block_hash=9, extra_keys=[["salt"]]))
    assert "extra_keys" in fault(stored_map(block_hashes=[1, 2], extra_keys=[None, ["salt"]]))
    assert "extra_keys" in fault(stored_map(extra_keys=[[b"embeds"]]))


def test_multimodal_hashes_of_tensorrt_llm_are_items_of_their_blocks() -> None:
    key = {"type": "mm_key", "hash": "ab" * 32, "start_offset": 1}
    event = stored(block_hashes=[1, 2], token_ids=list(range(8)), mm_keys=[[], [key, {**key, "hash": "cd" * 32}]])
    assert event.mm_items == ((), ("ab" * 32, "cd" * 32))
    assert stored(mm_keys=[[]]).mm_items == stored(mm_keys=None).mm_items == ()
    strange: list[Any] = [{}, [{}], [[1]], [[{"start_offset": 1}]]]
    for keys in strange:
        assert "mm_keys" in fault(stored_map(mm_keys=keys))
    for name in (None, 7, "\ud800".encode("utf-8", "surrogatepass")):
        assert "the hash of a multimodal item" in fault(stored_map(mm_keys=[[{"hash": name}]]))


def test_the_salt_field_counts_on_the_first_block_only() -> None:
    assert stored(cache_salt="S").cache_salt == "S"
    assert stored(cache_salt="S", parent_block_hash=9).cache_salt == ""


def test_groups_and_kinds() -> None:
    other = replace(stored(), group=2, full_attention=False)
    assert stored(group_idx=2, kv_cache_spec_kind="chunked_local_attention") == other
    assert stored(group_idx=2, kv_cache_spec_kind="mamba") == replace(other, window=STATE_WINDOW)
    assert stored(group_idx=2, kv_cache_spec_kind="mla_attention").full_attention
    assert not stored(group_idx=0, kv_cache_spec_kind="sliding_window").full_attention
    assert not stored(group_idx=1).full_attention


def test_unknown_fields_and_further_elements_are_ignored() -> None:
    plain = stored()
    assert stored(locality="local", ownership=1, session_id="s", future={"a": 1}) == plain
    array = ["BlockStored", [11], None, [1, 2, 3, 4], 4, None, "GPU", None, None, 0, None, None, "new", 7]
    assert batch(array).events == (plain,)
    assert batch(["BlockStored", [11], None, [1, 2, 3, 4], 4]).events == (plain,)


def test_extensions_are_ignored_where_no_field_has_them_and_cost_their_event_elsewhere() -> None:
    for value in (msgpack.ExtType(3, b""), msgpack.ExtType(3, b"x" * 300), msgpack.Timestamp(1_700_000_000, 5)):
        assert stored(future=value) == stored(**{"kv_cache_spec_kind": value}) == stored()
        assert batch(["BlockStored", [11], None, [1, 2, 3, 4], 4, *[None] * 7, value]).events == (stored(),)
        assert "lora_id" in fault(stored_map(lora_id=value))


def test_of_a_field_that_is_named_twice_the_last_counts() -> None:
    payload = msgpack.packb([1.5, [stored_map(lora_id="x", lora_jd=3)], None]).replace(b"lora_jd", b"lora_id")
    (event,) = decode_batch(payload).events
    assert event == stored(lora_id=3)
    payload = msgpack.packb([1.5, [{"type": "AllBlocksCleared", "typf": "Unknown"}]]).replace(b"typf", b"type")
    assert decode_batch(payload).events == (Cleared(),)


def test_an_event_that_is_nested_as_deep_as_msgpack_reads_costs_itself() -> None:
    assert decode_batch(b"\x92\xc0\x91" + b"\x91" * 1022 + b"\xc0").faults[0].kind is FaultKind.UNKNOWN_TAG


def test_eagle_pairs_are_one_run_of_tokens() -> None:
    event = stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]])
    assert (event.tokens, event.pairs, event.lookahead) == ((1, 2, 3, 4, 5), True, 5)
    assert "overlap" in fault(stored_map(token_ids=[[1, 2], [3, 4]]))
    assert "integers" in fault(stored_map(token_ids=[[1, 2.0], [2, 3]]))
    assert "pairs" in fault(stored_map(token_ids=[[1, 2], 3]))


def test_lookahead_tokens_end_the_last_window() -> None:
    assert stored(lookahead_token_ids=[9]).lookahead == 9
    assert stored(lookahead_token_ids=[9, 8]).lookahead == 9
    assert stored(lookahead_token_ids=None).lookahead is None
    two = {"block_hashes": [1, 2], "token_ids": list(range(8))}
    assert stored(**two, lookahead_token_ids=[4, 9]).lookahead == 9
    assert stored(**two, lookahead_token_ids=[9, 8]).lookahead == 9


@pytest.mark.parametrize(
    ("event", "named"),
    [
        (["BlockStored", [1], None, [1, 2]], "block_size"),
        (["BlockRemoved"], "block_hashes"),
        (stored_map(block_hashes="x"), "block_hashes"),
        (stored_map(block_hashes=[1.5]), "block hash"),
        (stored_map(block_hashes=[True]), "block hash"),
        (stored_map(block_hashes=[b""]), "block_hashes"),
        (stored_map(token_ids=[2**32]), "token_ids"),
        (stored_map(token_ids=[-1]), "token_ids"),
        (stored_map(token_ids=["a"]), "token_ids"),
        (stored_map(token_ids=None), "token_ids"),
        (stored_map(block_size=-1), "block_size"),
        (stored_map(block_size=None), "block_size"),
        (stored_map(lora_id="x"), "lora_id"),
        (stored_map(lora_name=3), "lora_name"),
        (stored_map(medium="MOON"), "medium"),
        (stored_map(group_idx=-1), "group_idx"),
        (stored_map(group_idx=2**32), "group_idx"),
        (stored_map(extra_keys=3), "extra_keys"),
        (stored_map(lookahead_token_ids=3), "lookahead_token_ids"),
    ],
)
def test_a_bad_event_costs_itself_and_is_named(event: Any, named: str) -> None:
    assert named in fault(event)


def test_a_string_that_is_no_utf8_costs_its_event() -> None:
    payload = msgpack.packb([0.0, [["AllBlocksCleared"], stored_map(lora_name="XX")], None])
    decoded = decode_batch(payload.replace(b"XX", b"\xff\xfe"))
    assert decoded.events == (Cleared(),)
    assert "lora_name" in decoded.faults[0].reason


@pytest.mark.parametrize(
    "event",
    [["Grown", 1], {"type": "Grown"}, {}, [], 3, None, "x", [["x"]], msgpack.ExtType(3, b"x"), msgpack.Timestamp(1)],
)
def test_an_unknown_tag_costs_its_event(event: Any) -> None:
    decoded = batch(event, ["AllBlocksCleared"])
    assert decoded.events == (Cleared(),)
    assert [f.kind for f in decoded.faults] == [FaultKind.UNKNOWN_TAG]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        msgpack.packb(3),
        msgpack.packb([1.0]),
        msgpack.packb([1.0, None]),
        msgpack.packb({"ts": 1}),
        msgpack.packb([1.0, [], "rank"]),
        msgpack.packb([1.0, [], -1]),
        msgpack.packb([1.0, []]) + b"\0",
        # An extension of the type of timestamps that is none.
        b"\x92\xc0\x91\xd4\xff\x00",
        b"\xdd\xff\xff\xff\xff" + b"\xc0" * 100,
        b"\xdd\x00\x00\xff\xff" * 20_000,
        b"\x91" * 100_000,
        b"\x82\x81\xc0\xc0\xc0\xc0\xc0",
    ],
)
def test_a_payload_that_is_no_batch_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedBatch):
        decode_batch(payload)


def test_a_payload_above_the_limit_is_refused_unread() -> None:
    with pytest.raises(MalformedBatch, match="more than"):
        decode_batch(bytes(MAX_PAYLOAD_BYTES + 1))


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(payload: bytes) -> None:
    try:
        decode_batch(payload)
    except MalformedBatch:
        pass


@given(st.sampled_from(sorted(GOLDEN)), st.integers(min_value=0))
def test_a_damaged_payload_is_decoded_or_refused(name: str, seed: int) -> None:
    rng = random.Random(seed)
    payload = bytearray.fromhex(GOLDEN[name])
    for _ in range(rng.randint(1, 4)):
        payload[rng.randrange(len(payload))] = rng.randrange(256)
    try:
        decode_batch(bytes(payload))
    except MalformedBatch:
        pass


def test_frames_of_live_and_replayed_messages() -> None:
    assert parse_message([b"topic", b"\0" * 7 + b"\x05", b"p"]) == Message(5, b"p")
    assert replay_request(258) == [b"", b"\0" * 6 + b"\x01\x02"]
    assert parse_replay_reply([b"", b"\0" * 8, b"p"]) == Message(0, b"p")
    assert parse_replay_reply([b"", b"topic", b"\0" * 8, b"p"]) == Message(0, b"p")
    assert parse_replay_reply([b"", b"\xff" * 8, b""]) is None
    assert parse_replay_reply([b"", b"", b"\xff" * 8, b""]) is None


@pytest.mark.parametrize("frames", [[], [b"p"], [b"t", b"\0" * 7, b"p"], [b"t", b"\0" * 8, b"p", b"x"]])
def test_frames_of_another_shape_are_malformed(frames: list[bytes]) -> None:
    with pytest.raises(MalformedBatch):
        parse_message(frames)
    with pytest.raises(MalformedBatch):
        parse_replay_reply([b"t", b"\0" * 7, b"p"] if len(frames) > 2 else frames)


def test_a_batch_of_nothing_but_noise_is_given_up_after_so_many_events() -> None:
    some = batch(*[None] * FAULT_LIMIT, ["AllBlocksCleared"])
    assert (len(some.faults), some.events) == (FAULT_LIMIT, (Cleared(),))
    with pytest.raises(MalformedBatch, match="events"):
        batch(*[None] * (FAULT_LIMIT + 1), ["AllBlocksCleared"])
