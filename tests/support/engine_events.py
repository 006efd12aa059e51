"""Events and batches in the bytes of vLLM's map form, for tests; blocks have 4 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

BLOCK_SIZE = 4


def prompt(blocks: int, *, first: int = 1) -> list[int]:
    """Token ids of a prompt of whole blocks: consecutive numbers."""
    return list(range(first, first + blocks * BLOCK_SIZE))


def stored(hashes: Sequence[int], tokens: Sequence[int], *, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    """A BlockStored event."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        **fields,
    }


def removed(hashes: Sequence[int], **fields: Any) -> dict[str, Any]:
    """A BlockRemoved event."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **fields}


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: dict[str, Any], rank: int | None = 0) -> bytes:
    """A batch as an engine's payload."""
    packed: bytes = msgpack.packb([0.0, list(events), rank])
    return packed


def chain(blocks: int) -> list[bytes]:
    """One batch a block: hash n holds block n of `prompt`, below hash n-1; hashes count from 1."""
    return [
        batch(
            stored([number], prompt(1, first=1 + (number - 1) * BLOCK_SIZE), parent=number - 1 if number > 1 else None)
        )
        for number in range(1, blocks + 1)
    ]
