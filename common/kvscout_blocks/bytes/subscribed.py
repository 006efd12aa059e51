"""The messages of an engine's `SubscribeKvEvents` → batches as `wire` decodes them.

::

    KvEventBatch {sequence_number, dp_rank, events, snapshot?}
        └▶ rank 0: (7, msgpack of [timestamp, [{"type": "BlockStored", ...}], 0])

Events keep what the engine said, as far as the server passes it on. A message without events that repeats a number, to
report the engine's load, is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import msgpack
from google.protobuf.message import DecodeError

from kvscout.smg import kv_events_pb2
from kvscout_blocks.bytes.events import MEDIA, Tier
from kvscout_blocks.bytes.frames import MalformedBatch
from kvscout_common.worker import MAX_RANKS

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
MAX_EVENTS: Final = 65_536
"""In one message, as are the next two. Engines send at most some hundred, and chunks of a state 2,048 blocks."""
MAX_BLOCKS: Final = 262_144
MAX_TOKENS: Final = 2_097_152
"""Extra keys count as tokens."""

_TIERS: Final = {
    kv_events_pb2.KV_CACHE_TIER_DEVICE: Tier.DEVICE,
    kv_events_pb2.KV_CACHE_TIER_HOST: Tier.HOST,
    kv_events_pb2.KV_CACHE_TIER_DISK: Tier.DISK,
    kv_events_pb2.KV_CACHE_TIER_EXTERNAL: Tier.EXTERNAL,
}
_LEVELS: Final = dict(enumerate(_TIERS.values()))
_MEDIUM: Final = {tier: next(medium for medium, named in MEDIA.items() if named is tier) for tier in Tier}
_LOCALITIES: Final = {
    kv_events_pb2.KV_CACHE_LOCALITY_LOCAL: "LOCAL",
    kv_events_pb2.KV_CACHE_LOCALITY_REMOTE: "REMOTE",
}
_UNREADABLE: Final = {"type": "unreadable"}


class StreamBroken(MalformedBatch):
    """Something is missing in a stream, and nothing in it says of which rank."""


class SubscribedBatch(NamedTuple):
    """One batch of a rank."""

    dp_rank: int
    event_id: int
    payload: bytes
    """As engines publish it."""
    malformed: bool
    """It is too large to be read, and `payload` has no events."""
    missing: str | None
    """See `decisions.SequencedBatch.missing`."""


class SubscribedMessage(NamedTuple):
    """One message."""

    batch: SubscribedBatch | None
    """None = it has only the load."""
    has_load: bool


@dataclass(slots=True)
class _State:
    """The state of a rank that is being sent."""

    next_index: int
    next_id: int


class SubscribedReader:
    """Reads the messages of one engine, in the order in which they came.

    Args:
        block_size: Tokens of a block, as registered.
        first_rank: Rank of batches that name none.
        trtllm: It is TensorRT-LLM's server: it announces parts of blocks, which are left out, and numbers what it sends
            for all ranks together, which says nothing of what it sent before to others. Its batches get numbers of
            their own here.
    """

    def __init__(self, block_size: int, first_rank: int, *, trtllm: bool) -> None:
        self._block_size = block_size
        self._first_rank = first_rank
        self._trtllm = trtllm
        self._states: dict[int, _State] = {}
        self._last_number: int | None = None
        """Of the stream, if it is TensorRT-LLM's; None = nothing came."""
        self._begun: set[int] = set()
        """Ranks of which the stream had a batch."""
        self._counts: dict[int, int] = {}
        """Numbers given to the batches of ranks, over all streams."""

    def begin(self) -> None:
        """Begin to read another stream."""
        self._states.clear()
        self._begun.clear()
        self._last_number = None

    def read(self, message: bytes) -> SubscribedMessage:
        """Read one message.

        Raises:
            StreamBroken: Nothing that follows it can be used.
            MalformedBatch: It is no message, and has no place in a sequence.
        """
        try:
            batch = kv_events_pb2.KvEventBatch.FromString(message)
        except DecodeError as error:
            raise MalformedBatch(str(error), field="message") from error
        if batch.load.load_only:
            return SubscribedMessage(None, has_load=True)
        number = batch.sequence_number
        rank = batch.dp_rank if batch.HasField("dp_rank") else self._first_rank
        if number >= 2**63:
            raise MalformedBatch("not a number of a batch", field="sequence_number")
        if not 0 <= rank < MAX_RANKS:
            raise MalformedBatch("not a rank", field="dp_rank")
        fits = _fits(batch)
        missing = self._missing(rank, batch, fits=fits)
        if self._trtllm:
            number, missing = self._renumbered(rank, number)
        events = [self._event(event) for event in batch.events] if fits else []
        payload: bytes = msgpack.packb([batch.timestamp, [each for each in events if each is not None], rank])
        return SubscribedMessage(SubscribedBatch(rank, number, payload, not fits, missing), batch.HasField("load"))

    def _renumbered(self, rank: int, number: int) -> tuple[int, str | None]:
        """Return the rank's own number of a batch, and what is missing before it."""
        if self._last_number is not None and number != self._last_number + 1:
            raise StreamBroken(f"number {number} follows {self._last_number}", field="sequence_number")
        self._last_number = number
        own = self._counts[rank] = self._counts.get(rank, -1) + 1
        if rank in self._begun:
            return own, None
        self._begun.add(rank)
        return own, "what the engine announced before this stream began"

    def _missing(self, rank: int, batch: kv_events_pb2.KvEventBatch, *, fits: bool) -> str | None:
        """Return what a chunk of a state says about the rank's history; None = it is no such chunk."""
        before = self._states.pop(rank, None)
        if not batch.HasField("snapshot"):
            return None
        chunk, number = batch.snapshot, batch.sequence_number
        begins = bool(batch.events) and batch.events[0].HasField("cleared")
        follows = before is not None and (chunk.index, number) == (before.next_index, before.next_id)
        if not (fits and (begins or follows)):
            return "parts of the state that the engine sent"
        if chunk.index + 1 < chunk.count:
            self._states[rank] = _State(chunk.index + 1, number + 1)
            return "the rest of the state that the engine sends"
        if chunk.unknown_before:
            return f"{chunk.unknown_before:,} batches that the engine's gRPC server never saw"
        return ""

    def _event(self, event: kv_events_pb2.KvCacheEvent) -> dict[str, Any] | None:
        match event.WhichOneof("data"):
            case "stored":
                return self._stored(event.stored)
            case "removed":
                gone = event.removed
                level = gone.cache_level if gone.HasField("cache_level") else 0
                return {
                    "type": "BlockRemoved",
                    "block_hashes": list(gone.block_hashes),
                    "medium": _medium(gone, level),
                    **_said(gone, "group_idx", "ownership"),
                    **_locality(gone),
                }
            case "cleared":
                return {"type": "AllBlocksCleared"}
            case _:
                return _UNREADABLE

    def _stored(self, stored: kv_events_pb2.KvBlocksStored) -> dict[str, Any] | None:
        if not stored.blocks:
            return None
        first = stored.blocks[0]
        size = first.block_size
        if self._trtllm and size < self._block_size:
            return None
        blocks = list(_full(stored, size) if self._trtllm else stored.blocks)
        event = {
            "type": "BlockStored",
            "block_hashes": [block.block_hash for block in blocks],
            "parent_block_hash": stored.parent_block_hash if stored.HasField("parent_block_hash") else None,
            "token_ids": list(chain.from_iterable(block.token_ids for block in blocks)),
            "block_size": size,
            "medium": _medium(stored, first.cache_level),
            **_said(
                stored,
                "group_idx",
                "kv_cache_spec_kind",
                "kv_cache_spec_sliding_window",
                "ownership",
                "lora_name",
                "cache_salt",
            ),
            **_locality(stored),
        }
        if first.HasField("lora_id"):
            event["lora_id"] = first.lora_id
        if any(block.extra_keys for block in blocks):
            event["extra_keys"] = [[_extra_key(key) for key in block.extra_keys] or None for block in blocks]
        return event


def _fits(batch: kv_events_pb2.KvEventBatch) -> bool:
    """Return whether a batch is within the limits."""
    if len(batch.events) > MAX_EVENTS:
        return False
    if sum(len(event.stored.blocks) + len(event.removed.block_hashes) for event in batch.events) > MAX_BLOCKS:
        return False
    blocks = (block for event in batch.events for block in event.stored.blocks)
    return sum(len(block.token_ids) + len(block.extra_keys) for block in blocks) <= MAX_TOKENS


def _full(stored: kv_events_pb2.KvBlocksStored, size: int) -> Iterator[kv_events_pb2.KvBlock]:
    """Yield the blocks before the first that is a part of one."""
    for block in stored.blocks:
        if block.block_size != size:
            return
        yield block


def _medium(event: kv_events_pb2.KvBlocksStored | kv_events_pb2.KvBlocksRemoved, level: int) -> str:
    """Return where its blocks are, as engines name it."""
    if event.HasField("medium"):
        return event.medium
    tier = _TIERS.get(event.tier) if event.tier else _LEVELS.get(level)
    return _MEDIUM[tier] if tier is not None else f"level {level}"


def _locality(event: kv_events_pb2.KvBlocksStored | kv_events_pb2.KvBlocksRemoved) -> dict[str, str]:
    said = _LOCALITIES.get(event.locality)
    return {} if said is None else {"locality": said}


def _said(event: kv_events_pb2.KvBlocksStored | kv_events_pb2.KvBlocksRemoved, *names: str) -> dict[str, Any]:
    """Return those of some fields that are set."""
    return {name: getattr(event, name) for name in names if event.HasField(name)}  # type: ignore[arg-type]


def _extra_key(key: kv_events_pb2.KvBlockExtraKey) -> Any:
    """Return one extra key of a block's hash as engines send it."""
    match key.WhichOneof("key"):
        case "multimodal":
            return [key.multimodal.identifier, key.multimodal.offset]
        case "text":
            return key.text
        case "blob":
            return key.blob
        case _:
            return key.number
