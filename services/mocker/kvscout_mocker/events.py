"""vLLM's KV cache events and their msgpack form.

Two encodings, byte for byte in vLLM's structure: `map` as vLLM 0.32 emits (fields at their default are left
out), `array` as vLLM 0.23 does (tag first, every field present).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgpack

MEDIUM = "GPU"
FULL_ATTENTION_KIND = "full_attention"
SLIDING_WINDOW_KIND = "sliding_window"
STATE_KIND = "mamba"


class EventFormat(StrEnum):
    """Layout of an event."""

    MAP = "map"
    """vLLM ≥ 0.24; replay answers carry the topic."""
    ARRAY = "array"
    """vLLM ≤ 0.23; replay answers carry no topic."""


class BlockHashFormat(StrEnum):
    """Encoding of a block hash."""

    INT = "int"
    """u64, vLLM's default."""
    BYTES = "bytes"
    """32 bytes, `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`; the last 8, big-endian, are the u64."""


class BlockStored(NamedTuple):
    """Consecutive full blocks of one sequence entered the cache."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None
    session_id: str | None = None
    group: int = 0
    kind: str = FULL_ATTENTION_KIND
    """Kind of its group."""
    sliding_window: int | None = None
    """Tokens that a token sees, in a group with a sliding window."""


class BlockRemoved(NamedTuple):
    """One physical copy of a block was evicted."""

    block_hash: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole prefix cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def _int_hash(block_hash: int) -> int:
    return block_hash


def _bytes_hash(block_hash: int) -> bytes:
    return block_hash.to_bytes(32, "big")


class EventEncoder:
    """Turns the events of one engine step into the payload of one message."""

    def __init__(self, event_format: EventFormat, hash_format: BlockHashFormat, dp_rank: int) -> None:
        self._event = self._map_event if event_format is EventFormat.MAP else self._array_event
        self._hash: Callable[[int], int | bytes] = _int_hash if hash_format is BlockHashFormat.INT else _bytes_hash
        self._dp_rank = dp_rank

    def encode(self, events: Sequence[Event], timestamp: float) -> bytes:
        """Return the batch `[timestamp, events, rank]`.

        Args:
            events: Events, in order.
            timestamp: Seconds since the epoch.
        """
        payload: bytes = msgpack.packb([timestamp, [self._event(event) for event in events], self._dp_rank])
        return payload

    def _map_event(self, event: Event) -> dict[str, object]:
        match event:
            case BlockStored():
                fields: dict[str, object] = {
                    "type": "BlockStored",
                    "block_hashes": [self._hash(h) for h in event.block_hashes],
                    "parent_block_hash": self._parent(event),
                    "token_ids": event.token_ids,
                    "block_size": event.block_size,
                    "lora_id": event.lora_id,
                    "medium": MEDIUM,
                    "lora_name": event.lora_name,
                }
                if event.extra_keys is not None:
                    fields["extra_keys"] = event.extra_keys
                fields["group_idx"] = event.group
                fields["kv_cache_spec_kind"] = event.kind
                if event.sliding_window is not None:
                    fields["kv_cache_spec_sliding_window"] = event.sliding_window
                if event.session_id is not None:
                    fields["session_id"] = event.session_id
                return fields
            case BlockRemoved():
                return {
                    "type": "BlockRemoved",
                    "block_hashes": [self._hash(event.block_hash)],
                    "medium": MEDIUM,
                    "group_idx": event.group,
                }
            case AllBlocksCleared():
                return {"type": "AllBlocksCleared"}

    def _array_event(self, event: Event) -> list[object]:
        match event:
            case BlockStored():
                return [
                    "BlockStored",
                    [self._hash(h) for h in event.block_hashes],
                    self._parent(event),
                    event.token_ids,
                    event.block_size,
                    event.lora_id,
                    MEDIUM,
                    event.lora_name,
                    event.extra_keys,
                    event.group,
                    event.kind,
                    event.sliding_window,
                ]
            case BlockRemoved():
                return ["BlockRemoved", [self._hash(event.block_hash)], MEDIUM, event.group]
            case AllBlocksCleared():
                return ["AllBlocksCleared"]

    def _parent(self, event: BlockStored) -> int | bytes | None:
        return None if event.parent_block_hash is None else self._hash(event.parent_block_hash)
