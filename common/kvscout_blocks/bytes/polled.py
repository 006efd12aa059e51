"""The JSON of TensorRT-LLM's `/kv_cache_events` → batches as `wire` decodes them, one an event.

::

    [{"event_id": 7, "window_size": 4096, "attention_dp_rank": 0, "data": {"type": "stored", ...}}, ...]
        └▶ rank 0: (7, msgpack of [0.0, [{"type": "BlockStored", ...}], 0]), in the order of the numbers

Windows become groups, cache levels tiers; a block that is not full is left out. What cannot be read is passed on as it
is: the decoder counts it, and it keeps its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgpack

from kvscout_blocks.bytes.frames import MalformedBatch
from kvscout_common.http.json_scan import load_json
from kvscout_common.worker import MAX_RANKS

MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
"""Largest answer that is read: a million tokens, at 60 bytes each."""
MAX_VALUES: Final = 8_000_000
"""In one answer, at any depth."""
MAX_WINDOWS: Final = 64
MAX_OFFLOADED: Final = 4_000_000
"""Blocks whose level is remembered while it is not the device's; of later ones it is not."""

_UNREADABLE: Final = {"type": "unreadable"}


class PolledEvent(NamedTuple):
    """One event of the engine, with its number."""

    event_id: int
    payload: bytes


@dataclass(slots=True)
class _Rank:
    """What earlier events of a rank say about later ones."""

    last_id: int = -1
    groups: dict[int, int] = field(default_factory=dict)
    """Window in tokens → group, by the order of their first appearance."""
    full: set[int] = field(default_factory=set)
    """Windows that were the largest when they appeared."""
    offloaded: dict[tuple[int, Any], str] = field(default_factory=dict)
    """(group, block hash) → medium, of blocks that are not on the device."""


class PolledReader:
    """Reads the answers of one engine, in the order in which they came.

    Args:
        block_size: Tokens of a block, as registered.
        first_rank: Rank of events that name none.
    """

    def __init__(self, block_size: int, first_rank: int) -> None:
        self._block_size = block_size
        self._first_rank = first_rank
        self._ranks: dict[int, _Rank] = {}

    def read(self, body: bytes) -> dict[int, list[PolledEvent]]:
        """Read one answer; return the events of each rank, lowest number first.

        Raises:
            MalformedBatch: It is no list of numbered events; nothing of it was used.
        """
        try:
            answer = load_json(body, max_values=MAX_VALUES)
        except ValueError as error:
            raise MalformedBatch(f"the answer {error}", field="events") from error
        if not isinstance(answer, list):
            raise MalformedBatch("the answer is no list", field="events")
        by_rank: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for entry in answer:
            event_id: Any = entry.get("event_id") if isinstance(entry, dict) else None
            if not _is_number(event_id):
                raise MalformedBatch("an event has no number", field="event_id")
            rank = entry.get("attention_dp_rank")
            rank = self._first_rank if rank is None else rank
            if not _is_number(rank) or rank >= MAX_RANKS:
                raise MalformedBatch("an event has no valid rank", field="attention_dp_rank")
            by_rank.setdefault(rank, []).append((event_id, entry))
        return {rank: self._read_rank(rank, entries) for rank, entries in by_rank.items()}

    def _read_rank(self, rank: int, entries: list[tuple[int, dict[str, Any]]]) -> list[PolledEvent]:
        # One answer is of one life of the engine, whatever the order in which it collected its events.
        entries.sort(key=lambda numbered: numbered[0])
        known = self._ranks.get(rank)
        if known is None or entries[0][0] <= known.last_id:
            known = self._ranks[rank] = _Rank()
        _learn_windows(known, (entry.get("window_size") for _, entry in entries))
        known.last_id = entries[-1][0]
        return [PolledEvent(event_id, self._payload(known, rank, entry)) for event_id, entry in entries]

    def _payload(self, known: _Rank, rank: int, entry: dict[str, Any]) -> bytes:
        window, data = entry.get("window_size"), entry.get("data")
        group = known.groups.get(window, 0) if isinstance(window, int) else 0
        kind: dict[str, Any] = {}
        if len(known.groups) > 1 and isinstance(window, int):
            kind = {"group_idx": group, "kv_cache_spec_kind": "full_attention"}
            if window not in known.full:
                kind |= {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": window}
        try:
            events = list(self._events(known, group, kind, data)) if isinstance(data, dict) else [_UNREADABLE]
            return _pack(events, rank)
        except (OverflowError, ValueError, TypeError, KeyError, AttributeError):
            return _pack([_UNREADABLE], rank)

    def _events(self, known: _Rank, group: int, kind: dict[str, Any], data: dict[str, Any]) -> Iterator[dict[str, Any]]:
        match data.get("type"):
            case "stored":
                yield from self._stored(known, group, kind, data)
            case "removed":
                hashes = [_hash(value) for value in data["block_hashes"]]
                media = [known.offloaded.pop((group, value), "GPU") for value in hashes]
                for medium, run in groupby(zip(media, hashes, strict=True), key=lambda pair: pair[0]):
                    yield _removed([value for _, value in run], medium, kind)
            case "updated":
                moved, value = data.get("cache_level"), _hash(data["block_hash"])
                if moved is not None:
                    # Whichever level it says the block was on, it was where the last event put it.
                    before = known.offloaded.pop((group, value), "GPU")
                    after = _place(known, group, value, moved["new_value"])
                    if after != before:
                        yield _block_stored([value], None, [], 0, after, kind)
                        yield _removed([value], before, kind)
            case "created":
                pass
            case other:
                yield {"type": str(other)}

    def _stored(self, known: _Rank, group: int, kind: dict[str, Any], data: dict[str, Any]) -> Iterator[dict[str, Any]]:
        parent = None if data.get("parent_hash") is None else _hash(data["parent_hash"])
        first = data["blocks"][0]
        size = len(first["tokens"])
        # The last block of a prompt may be a part of one; before others there are whole ones only.
        if len(data["blocks"]) == 1 and size < self._block_size:
            return
        full: list[dict[str, Any]] = []
        for block in data["blocks"]:
            if len(block["tokens"]) != size:
                break
            full.append(block)
        hashes = [_hash(block["block_hash"]) for block in full]
        returned = [value for value in hashes if (group, value) in known.offloaded]
        if returned:
            # It is where it is stored now; the engine has it once.
            yield _removed(returned, "CPU", kind)
        media = [
            _place(known, group, value, block.get("cache_level", 0)) for value, block in zip(hashes, full, strict=True)
        ]
        at = 0
        for medium, run in groupby(media):
            end = at + len(list(run))
            tokens = [token["token_id"] for block in full[at:end] for token in block["tokens"]]
            event = _block_stored(hashes[at:end], parent, tokens, size, medium, kind)
            event |= {"cache_salt": full[at].get("cache_salt"), "lora_id": full[at].get("lora_id")}
            event["mm_keys"] = [_mm_keys(block) for block in full[at:end]]
            yield event
            parent, at = hashes[end - 1], end


def _learn_windows(known: _Rank, windows: Iterator[Any]) -> None:
    new = {window for window in windows if _is_number(window)} - known.groups.keys()
    if len(known.groups) + len(new) > MAX_WINDOWS:
        raise MalformedBatch(f"more than {MAX_WINDOWS} windows", field="window_size")
    for window in sorted(new, reverse=True):
        if window >= max(known.groups, default=0):
            known.full.add(window)
        known.groups[window] = len(known.groups)


def _place(known: _Rank, group: int, value: int | bytes, level: int) -> str:
    """Return the medium of a level, and remember where the block is."""
    known.offloaded.pop((group, value), None)
    if level == 0:
        return "GPU"
    if len(known.offloaded) < MAX_OFFLOADED:
        known.offloaded[group, value] = "CPU"
    return "CPU"


def _mm_keys(block: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what beside its tokens makes a block what it is."""
    extra = {token.get("token_extra_id") or 0 for token in block["tokens"]} - {0}
    return [*(block.get("mm_keys") or ()), *({"hash": f"token_extra_id {number}"} for number in sorted(extra))]


def _block_stored(
    hashes: list[int | bytes],
    parent: int | bytes | None,
    tokens: list[Any],
    size: int,
    medium: str,
    kind: dict[str, Any],
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "medium": medium,
        **kind,
    }


def _removed(hashes: list[int | bytes], medium: str, kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": kind.get("group_idx")}


def _hash(value: Any) -> int | bytes:
    """Return a block hash as engines push it: a number, or the bytes of a digest."""
    if isinstance(value, str):
        return bytes.fromhex(value)
    if type(value) is not int:
        raise ValueError("a block hash is neither a number nor a digest")
    return value


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _pack(events: list[dict[str, Any]], rank: int) -> bytes:
    packed: bytes = msgpack.packb([0.0, events, rank], unicode_errors="surrogateescape")
    return packed
