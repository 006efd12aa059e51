"""The msgpack form of events, byte for byte what vLLM's own releases encode."""

from __future__ import annotations

import msgpack
import pytest

from kvscout_mocker.events import (
    AllBlocksCleared,
    BlockHashFormat,
    BlockRemoved,
    BlockStored,
    EventEncoder,
    EventFormat,
)

FIRST, SECOND = 0x1A1EB4E3EDD9361A, 0xD41BC1F76B956DDE
"""Hashes of the two blocks in the batches below, which vLLM's encoder produced."""
VLLM_0_32_MAP = (
    "93cb41d954fc40200000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf1a1eb4e3edd936"
    "1acfd41bc1f76b956ddeb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c"
    "6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b657973"
    "92c0c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474"
    "797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cfd41bc1f76b956ddea66d656469756da3475055a9"
    "67726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656401"
)
VLLM_0_23_ARRAY = (
    "93cb41d954fc40200000939cab426c6f636b53746f72656492cf1a1eb4e3edd9361acfd41bc1f76b956ddec098010203040506"
    "070804c0a3475055c092c0c000ae66756c6c5f617474656e74696f6ec094ac426c6f636b52656d6f76656491cfd41bc1f76b95"
    "6ddea34750550091b0416c6c426c6f636b73436c656172656401"
)
STORED = BlockStored([FIRST, SECOND], None, list(range(1, 9)), 4, None, None, [None, None])


@pytest.mark.parametrize(
    ("event_format", "golden"), [(EventFormat.MAP, VLLM_0_32_MAP), (EventFormat.ARRAY, VLLM_0_23_ARRAY)]
)
def test_a_batch_is_byte_for_byte_vllms(event_format: EventFormat, golden: str) -> None:
    encoder = EventEncoder(event_format, BlockHashFormat.INT, dp_rank=1)
    timestamp = msgpack.unpackb(bytes.fromhex(golden))[0]
    assert encoder.encode([STORED, BlockRemoved(SECOND), AllBlocksCleared()], timestamp).hex() == golden


@pytest.mark.parametrize("event_format", EventFormat)
def test_hashes_as_bytes_end_in_the_integer(event_format: EventFormat) -> None:
    encoder = EventEncoder(event_format, BlockHashFormat.BYTES, dp_rank=0)
    child = STORED._replace(parent_block_hash=FIRST)
    _, (stored, removed), _ = msgpack.unpackb(encoder.encode([child, BlockRemoved(FIRST)], 0.0))
    if isinstance(stored, dict):
        stored = ["", stored["block_hashes"], stored["parent_block_hash"]]
        removed = ["", removed["block_hashes"]]
    hashes = [*stored[1], stored[2], *removed[1]]
    assert [len(h) for h in hashes] == [32] * 4
    assert [int.from_bytes(h[-8:], "big") for h in hashes] == [FIRST, SECOND, FIRST, FIRST]


def test_a_session_is_reported_by_the_map_form_only_when_given() -> None:
    encoder = EventEncoder(EventFormat.MAP, BlockHashFormat.INT, dp_rank=0)
    _, events, _ = msgpack.unpackb(encoder.encode([STORED, STORED._replace(session_id="s")], 0.0))
    assert "session_id" not in events[0]
    assert events[1]["session_id"] == "s"
