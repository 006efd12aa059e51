"""Engine bytes → events: the msgpack batches of vLLM, SGLang and TensorRT-LLM, decoded in plain Python.

::

    payload [timestamp, [event ...], rank?]  or a map of the same
    event   [tag, field ...] (vLLM ≤ 0.23, SGLang ≤ 0.5.19)  or {"type": tag, field: value ...} (later, TensorRT-LLM)

Unknown fields are ignored, in either form, so that newer engines stay readable. An event that cannot be
read costs itself; only a payload that is no batch, or has more than `FAULT_LIMIT` such events, costs the batch. All
functions are pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgpack

from kvscout_blocks.bytes.events import (
    FAULT_LIMIT,
    MEDIA,
    STATE_WINDOW,
    Cleared,
    Event,
    EventBatch,
    Fault,
    FaultKind,
    Removed,
    Stored,
    Tier,
)
from kvscout_blocks.bytes.frames import MalformedBatch
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import engine_hash

MAX_PAYLOAD_BYTES: Final = 64 * 1024 * 1024
"""Larger payloads are refused before they are read."""

MAX_GROUP: Final = 65_535

_MAX_ARRAY = 4 * 1024 * 1024
"""Elements of one array: four times the tokens of the longest prompts engines take."""

_MAX_MAP = 256
"""Entries of one map: engines send at most 17."""

_REASON_CHARS = 200

_EXTENSION: Final = object()
"""A value of an extension type, which no known field has."""

SLIDING_WINDOW_KINDS: Final = frozenset({"sliding_window", "sliding_window_mla"})
STATE_KINDS: Final = frozenset({"mamba"})
"""State-space and linear-attention layers: vLLM names them all alike."""
FULL_ATTENTION_KINDS: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

_BATCH_FIELDS = ("ts", "events", "data_parallel_rank")
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_STORED_REQUIRED = _STORED_FIELDS[:4]
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_REMOVED_REQUIRED = _REMOVED_FIELDS[:1]


_LOCALITIES = frozenset({"", "LOCAL", "REMOTE"})
"""Where a tier is, as its publisher sees it; "": not said."""


class _BadEvent(Exception):
    """Why one event cannot be read."""


def is_full_attention(kind: str | None, group: int) -> bool:
    """Return whether a cache group decides prefix hits; engines that send no kind have only group 0."""
    return kind in FULL_ATTENTION_KINDS if kind else group == 0


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one payload, whatever the engine's release.

    Args:
        payload: msgpack, at most `MAX_PAYLOAD_BYTES`.

    Returns:
        The events that could be read, in order, and one fault for each other one.

    Raises:
        MalformedBatch: The payload is no batch.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MalformedBatch(f"{len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}", field="payload")
    try:
        raw = msgpack.unpackb(
            payload,
            raw=False,
            # A bad string then costs its event, where it is found again, and not the batch.
            unicode_errors="surrogateescape",
            strict_map_key=False,
            max_array_len=min(len(payload), _MAX_ARRAY),
            max_map_len=_MAX_MAP,
            object_pairs_hook=_map,
            ext_hook=lambda _type, _data: _EXTENSION,
        )
    except (ValueError, TypeError, RecursionError) as error:
        # TypeError: a map key that cannot be hashed. ValueError covers all of msgpack's own errors.
        raise MalformedBatch(f"no msgpack: {type(error).__name__}: {error}", field="payload") from error
    fields = _fields(raw, _BATCH_FIELDS)
    if fields is None or not isinstance(fields.get("events"), list):
        raise MalformedBatch("neither [timestamp, events, rank?] nor a map of it", field="payload")
    timestamp, rank = fields.get("ts"), fields.get("data_parallel_rank")
    if rank is not None and not _is_int(rank, 0, 2**31 - 1):
        raise MalformedBatch("not a rank", field="data_parallel_rank")
    events: list[Event] = []
    faults: list[Fault] = []
    for event in fields["events"]:
        read = _decode_event(event)
        if isinstance(read, Fault):
            faults.append(read)
            if len(faults) > FAULT_LIMIT:
                raise MalformedBatch(f"more than {FAULT_LIMIT} of them cannot be read", field="events")
        else:
            events.append(read)
    seconds = float(timestamp) if isinstance(timestamp, (int, float)) else 0.0
    return EventBatch(tuple(events), seconds, rank, tuple(faults))


def _map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a map; of a field that it names twice the last counts, but the first `type` if it stands in front."""
    fields = dict(pairs)
    if pairs and pairs[0][0] == "type" and isinstance(pairs[0][1], str):
        fields["type"] = pairs[0][1]
    return fields


def _decode_event(raw: Any) -> Event | Fault:
    tag = raw[0] if isinstance(raw, list) and raw else raw.get("type") if isinstance(raw, dict) else None
    values = raw[1:] if isinstance(raw, list) else raw
    try:
        if tag == "BlockStored":
            return _stored(_required(values, _STORED_FIELDS, _STORED_REQUIRED))
        if tag == "BlockRemoved":
            fields = _required(values, _REMOVED_FIELDS, _REMOVED_REQUIRED)
            return Removed(_hashes(fields["block_hashes"]), _tier(fields), _group(fields))
        if tag == "AllBlocksCleared":
            return Cleared()
    except (_BadEvent, InvalidArgument) as error:
        return Fault(FaultKind.BAD_EVENT, f"{tag}: {error}"[:_REASON_CHARS])
    return Fault(FaultKind.UNKNOWN_TAG, repr(tag)[:_REASON_CHARS] if isinstance(tag, str) else "no tag")


def _stored(fields: Mapping[str, Any]) -> Stored:
    hashes = _hashes(fields["block_hashes"])
    parent = fields["parent_block_hash"]
    block_size = fields["block_size"]
    if not _is_int(block_size, 0, 2**31 - 1):
        raise _BadEvent("block_size is not a valid size")
    tokens, pairs, lookahead = _tokens(fields["token_ids"])
    group = _group(fields)
    kind = fields.get("kv_cache_spec_kind")
    lora_id = fields.get("lora_id")
    if lora_id is not None and not _is_int(lora_id, -(2**63), 2**64 - 1):
        raise _BadEvent("lora_id is not a number")
    lora_name = _text(fields, "lora_name")
    salt, mm_items = _extra_keys(fields.get("extra_keys"), lora_name, first=parent is None)
    return Stored(
        engine_hashes=hashes,
        parent=None if parent is None else _hash(parent),
        tokens=tokens,
        block_size=block_size,
        tier=_tier(fields),
        group=group,
        full_attention=is_full_attention(kind if isinstance(kind, str) else None, group),
        window=_window(fields, kind if isinstance(kind, str) else ""),
        lora_id=lora_id or 0,
        lora_name=lora_name,
        cache_salt=salt or (_text(fields, "cache_salt") if parent is None else ""),
        mm_items=mm_items or _mm_keys(fields.get("mm_keys")),
        pairs=pairs,
        lookahead=(
            lookahead if pairs else _lookahead(fields.get("lookahead_token_ids"), tokens, block_size, len(hashes))
        ),
    )


def _fields(raw: Any, names: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the named fields of an array or map; None if it is neither."""
    if isinstance(raw, list):
        return dict(zip(names, raw, strict=False))
    return raw if isinstance(raw, dict) else None


def _required(raw: Any, names: Sequence[str], required: Sequence[str]) -> Mapping[str, Any]:
    fields = _fields(raw, names) or {}
    for name in required:
        if name not in fields:
            raise _BadEvent(f"{name} is missing")
    return fields


def _is_int(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _hash(value: Any) -> int:
    if type(value) not in (int, bytes):
        raise _BadEvent(f"a block hash is {type(value).__name__}")
    return engine_hash(value)


def _hashes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise _BadEvent("block_hashes is not an array")
    return tuple(_hash(value) for value in values)


def _u32s(values: list[Any]) -> tuple[int, ...]:
    try:
        packed = array("I", values)
    except (TypeError, OverflowError):
        raise _BadEvent("token_ids are not all 32-bit integers") from None
    return tuple(packed)


def _tokens(values: Any) -> tuple[tuple[int, ...], bool, int | None]:
    """Return the token ids, whether they came as EAGLE pairs, and then the last pair's second.

    Pairs are read as one run of tokens: the first of each, and the second of the last.
    """
    if not isinstance(values, list):
        raise _BadEvent("token_ids is not an array")
    if not values or not isinstance(values[0], list):
        return _u32s(values), False, None
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in values):
        raise _BadEvent("token_ids mixes pairs and others")
    firsts, seconds = (_u32s([pair[side] for pair in values]) for side in (0, 1))
    if seconds[:-1] != firsts[1:]:
        raise _BadEvent("token_ids are pairs that do not overlap")
    return (*firsts, seconds[-1]), True, seconds[-1]


def _lookahead(values: Any, tokens: tuple[int, ...], block_size: int, blocks: int) -> int | None:
    """Return the token after the last block, if an engine with speculative decoding sends it."""
    if values is None:
        return None
    if not isinstance(values, list):
        raise _BadEvent("lookahead_token_ids is not an array")
    following = _u32s([value for value in values if value is not None])
    if not following:
        return None
    # One token a block, or the tokens after the last block: the blocks' own tokens show which.
    starts = tokens[block_size::block_size] if block_size else ()
    one_a_block = len(following) == blocks and following[:-1] == starts[: blocks - 1]
    return following[-1] if one_a_block else following[0]


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    return _clean(value, name)


def _clean(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _BadEvent(f"{name} is not a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _BadEvent(f"{name} is not UTF-8") from None
    return value


def _tier(fields: Mapping[str, Any]) -> Tier:
    medium = _text(fields, "medium")
    tier = MEDIA.get(medium.upper(), None) if medium else Tier.DEVICE
    if tier is None:
        raise _BadEvent(f"medium {medium!r} is unknown")
    locality = _text(fields, "locality")
    if locality.upper() not in _LOCALITIES:
        raise _BadEvent(f"locality {locality!r} is unknown")
    # Whatever it is there, it is not the publisher's own.
    return Tier.EXTERNAL if locality.upper() == "REMOTE" else tier


def _group(fields: Mapping[str, Any]) -> int:
    group = fields.get("group_idx")
    if group is None:
        return 0
    if not _is_int(group, 0, MAX_GROUP):
        raise _BadEvent("group_idx is not a valid group")
    return int(group)


def _window(fields: Mapping[str, Any], kind: str) -> int:
    if kind in STATE_KINDS:
        return STATE_WINDOW
    if kind not in SLIDING_WINDOW_KINDS:
        return 0
    tokens = fields.get("kv_cache_spec_sliding_window")
    return tokens if isinstance(tokens, int) and _is_int(tokens, 0, 2**32 - 1) else 0


def _extra_keys(raw: Any, lora_name: str, *, first: bool) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """Return the salt and each block's multimodal ids, from the extra keys of the engine's block hashes.

    A key that we cannot express would give the blocks another identity than the engine's: it costs the event.
    """
    if raw is None:
        return "", ()
    if not isinstance(raw, list):
        raise _BadEvent("extra_keys is not an array")
    salts: list[str] = []
    items: list[tuple[str, ...]] = []
    for position, keys in enumerate(raw):
        ids: list[str] = []
        for key in keys if isinstance(keys, list) else [] if keys is None else [keys]:
            if isinstance(key, list) and len(key) == 2:
                ids.append(_clean(key[0], "the id of a multimodal item"))
            elif isinstance(key, str) and key == lora_name:
                continue
            elif isinstance(key, str) and first and position == 0 and not salts:
                salts.append(_clean(key, "the salt"))
            else:
                raise _BadEvent(f"extra_keys of block {position} has {type(key).__name__} out of place")
        items.append(tuple(ids))
    return "".join(salts), tuple(items) if any(items) else ()


def _mm_keys(raw: Any) -> tuple[tuple[str, ...], ...]:
    """Return each block's multimodal hashes, as TensorRT-LLM sends them; a block without any has tokens only."""
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise _BadEvent("mm_keys is not an array")
    items: list[tuple[str, ...]] = []
    for position, keys in enumerate(raw):
        if not isinstance(keys, list) or not all(isinstance(key, dict) and "hash" in key for key in keys):
            raise _BadEvent(f"mm_keys of block {position} are not maps with a hash")
        items.append(tuple(_clean(key["hash"], "the hash of a multimodal item") for key in keys))
    return tuple(items) if any(items) else ()
