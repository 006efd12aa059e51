"""What a Stored event adds to the index: whether its content can be indexed, and its local hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvscout_blocks.events import Stored
from kvscout_blocks.index import Ignored
from kvscout_common.hashing import MmItem, block_hashes


def judge_content(event: Stored, block_size: int, eagle: bool, adapters: Mapping[int, str]) -> Ignored | None:
    """Why an event that has tokens or local hashes cannot be indexed, in the order of `Ignored`.

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
    """Local hashes of the blocks of an event that `judge_content` accepted, one a block."""
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
