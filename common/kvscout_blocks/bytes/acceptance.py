"""Acceptance of a Stored event: the reasons for which its content cannot be indexed, and its local hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from kvscout_blocks.bytes.events import Stored
from kvscout_common.hashing import MmItem, block_hashes


class Ignored(StrEnum):
    """Reason for which an engine's event was not indexed; each is counted for its worker.

    In the order in which a Stored event is judged; counts are in events where not said otherwise.
    """

    INCOMPATIBLE = "incompatible"
    """The worker was found incompatible before."""
    SKIPPED_GROUP = "skipped_group"
    """A group that is neither full attention nor states and has no sliding window, or one above `GROUP_LIMIT`; stores
    and removes."""
    UNKNOWN_MOVED = "unknown_moved"
    """Tier change of an engine hash that is neither known nor a ghost, or a block of a group with a sliding window or
    states that no full-attention group has when the batch is applied; in blocks."""
    BAD_LENGTH = "bad_length"
    """Shorter than one block, or tokens ≠ blocks · block size; legal, adds nothing."""
    BLOCK_SIZE = "block_size"
    """Full blocks of another block size: the worker is incompatible from here on."""
    EAGLE_MISMATCH = "eagle_mismatch"
    """Token pairs on a worker without EAGLE, or an EAGLE window without its last token."""
    UNNAMED_LORA = "unnamed_lora"
    """An adapter number that the registration does not name."""
    HASH_CONFLICT = "hash_conflict"
    """An engine hash that is bound to another prefix; in blocks."""
    ORPHAN_LIMIT = "orphan_limit"
    """An orphan above `ORPHAN_LIMIT`; in blocks."""
    TWIN_LIMIT = "twin_limit"
    """One more engine hash of a block that has `TWIN_LIMIT` with copies; in blocks."""
    INDEX_FULL = "index_full"
    """A Stored for whose blocks the index may have no numbers left, of 67 million for prompts that begin alike; in
    blocks. The reference has no such limit."""
    WINDOW_LIMIT = "window_limit"
    """A block of a group with a sliding window above `max_blocks`, or `WINDOW_LIMIT` if there is no bound; in
    blocks."""
    BATCH_LIMIT = "batch_limit"
    """An event with which a batch would have more than `BATCH_LIMIT` blocks, stored and removed; in blocks. Where it is
    one that removes, all that is known of the worker goes."""
    UNKNOWN_REMOVED = "unknown_removed"
    """Removal of a copy that is not known; in blocks."""

    @property
    def is_limit(self) -> bool:
        """Return whether a limit of the index kept blocks out: the worker may have more than is found."""
        return self in _LIMITS


_LIMITS = frozenset(
    (Ignored.ORPHAN_LIMIT, Ignored.TWIN_LIMIT, Ignored.INDEX_FULL, Ignored.WINDOW_LIMIT, Ignored.BATCH_LIMIT)
)


def judge_content(event: Stored, block_size: int, eagle: bool, adapters: Mapping[int, str]) -> Ignored | None:
    """Judge whether an event that has tokens or local hashes can be indexed, in the order of `Ignored`.

    Args:
        event: The event; its group is full attention.
        block_size: Tokens of a block, as registered.
        eagle: Whether blocks are EAGLE windows, as registered.
        adapters: LoRA number → name, as registered.

    Returns:
        The first reason that applies; None if it can be indexed.
    """
    if event.foreign:
        return Ignored.BLOCK_SIZE
    if event.local_hashes:
        return None if len(event.local_hashes) == len(event.engine_hashes) else Ignored.BAD_LENGTH
    tokens = len(event.tokens) - event.pairs
    # Masked, partial and last short pages; the last ones name their own length as block size.
    if tokens < block_size or tokens != len(event.engine_hashes) * event.block_size:
        return Ignored.BAD_LENGTH
    if event.block_size != block_size:
        return Ignored.BLOCK_SIZE
    if (event.lookahead is None) if eagle else event.pairs:
        return Ignored.EAGLE_MISMATCH
    if event.lora_id and not event.lora_name and event.lora_id not in adapters:
        return Ignored.UNNAMED_LORA
    return None


def local_hashes_of(event: Stored, block_size: int, eagle: bool, adapters: Mapping[int, str]) -> Sequence[int]:
    """Return the local hashes of an event that `judge_content` accepted, one a block."""
    if event.local_hashes:
        return event.local_hashes
    tokens = event.tokens
    if eagle and not event.pairs and event.lookahead is not None:
        tokens = (*tokens, event.lookahead)
    return block_hashes(
        tokens,
        block_size,
        lora_name=event.lora_name or (adapters[event.lora_id] if event.lora_id else ""),
        # Block 0 alone has the salt; without it, any block hashes as one that is not the first.
        cache_salt=event.cache_salt if event.parent is None else "",
        mm_items=[
            MmItem(item, block * block_size, 1)
            for block, items in enumerate(event.mm_items[: len(event.engine_hashes)])
            for item in items
        ],
        eagle=eagle,
    )
