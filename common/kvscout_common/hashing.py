"""Block hashes: the identity of a block of tokens, and of the prefix that it ends.

::

    local hash     XXH3_64(u32 LE token ids ‖ sorted u64 LE mm hashes, seed)
    seed           1337 + XXH3_64(lora_name, 0), the first block + XXH3_64(cache_salt, 1); wrapping
    sequence hash  s[0] = local[0];  s[i] = XXH3_64(LE64(s[i-1]) ‖ LE64(local[i]), 1337)

Without adapter and salt these are the hashes of Dynamo, SMG and the Mooncake indexer, so they can be
exchanged. This module is the interface; the work is done by the extension `kvscout_native` or, where
that is not built, by `hashing_reference`, with equal results. `KVSCOUT_NATIVE=0` forces the reference,
`KVSCOUT_REQUIRE_NATIVE=1` turns a missing extension into an error.

All functions are pure, thread-safe and do not block; the extension releases the GIL above 1 MiB of
token ids.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

from kvscout_common.errors import ConfigError
from kvscout_common.variables import NATIVE, REQUIRE_NATIVE, value_of

__all__ = [
    "SEED",
    "MmItem",
    "backend_name",
    "block_hashes",
    "block_hashes_packed",
    "block_seed",
    "engine_hash",
    "extend_sequence",
    "keyed_sequence_hashes",
    "log_backend",
    "mm_hash",
    "native_available",
    "native_module",
    "sequence_hashes",
]

SEED: Final = 1337
"""Seed of every chain, and of every block of a prompt without adapter and salt."""

_log = logging.getLogger(__name__)


class MmItem(NamedTuple):
    """A multimodal item of a prompt: its id and the placeholder tokens that stand for it."""

    id: str
    offset: int
    """First placeholder token, counted from the start of the prompt."""
    length: int
    """Number of placeholder tokens, at least 1."""


def _native_wanted() -> bool:
    """Decide whether to use the extension; raise if it is required and cannot be imported."""
    if value_of(NATIVE) == "0":
        return False
    try:
        import kvscout_native  # noqa: F401
    except ImportError as error:
        if value_of(REQUIRE_NATIVE) == "1":
            raise ConfigError(
                f"the extension kvscout_native cannot be imported: {error}", field=REQUIRE_NATIVE
            ) from error
        return False
    return True


_NATIVE = _native_wanted()

if TYPE_CHECKING or not _NATIVE:
    from kvscout_common import hashing_reference as _backend
else:
    import kvscout_native as _backend


def native_available() -> bool:
    """Return whether this process uses the extension: it is built, and not switched off."""
    return _NATIVE


def native_module() -> ModuleType | None:
    """Return the extension, where this process uses it; None: the reference backend is used."""
    return sys.modules["kvscout_native"] if _NATIVE else None


def backend_name() -> str:
    """Return the backend's name for status output: "native" or "reference"."""
    return "native" if _NATIVE else "reference"


def log_backend() -> None:
    """Write the one log line, at start, that says which backend this process uses."""
    if _NATIVE:
        _log.info("hashing backend: native")
    else:
        _log.warning("hashing backend: reference (plain Python); the extension kvscout_native is faster")


def block_hashes(
    token_ids: Sequence[int] | bytes | bytearray | memoryview,
    block_size: int,
    *,
    lora_name: str = "",
    cache_salt: str = "",
    mm_items: Sequence[tuple[str, int, int]] = (),
    eagle: bool = False,
) -> list[int]:
    """Return the local hashes of a prompt's complete blocks, in order; a trailing partial block has none.

    Args:
        token_ids: The prompt, as integers of 32 bits or as their little-endian bytes, four a token.
        block_size: Tokens of a block.
        lora_name: Adapter of the request; "" is none.
        cache_salt: Salt of the request; it enters the first block alone, the chain carries it on.
        mm_items: Multimodal items, as `MmItem` or tuples like it. An item enters each block that its
            placeholder tokens touch, as engines do it, and its offset is not hashed. An item that an
            engine's event names for block i is `MmItem(id, i * block_size, 1)`.
        eagle: Windows of block_size + 1 tokens at stride block_size: n tokens have
            (n - 1) // block_size blocks. Items enter by the first block_size tokens of a window.

    Raises:
        InvalidArgument: block_size, token_ids or mm_items is out of range; the field is named.
    """
    return _backend.block_hashes(
        token_ids, block_size, lora_name=lora_name, cache_salt=cache_salt, mm_items=mm_items, eagle=eagle
    )


def block_hashes_packed(
    token_ids: Sequence[int] | bytes | bytearray | memoryview,
    block_size: int,
    *,
    lora_name: str = "",
    cache_salt: str = "",
    mm_items: Sequence[tuple[str, int, int]] = (),
    eagle: bool = False,
) -> bytes:
    """Return the same hashes as little-endian u64s, eight bytes a block: the form they have on the wire."""
    return _backend.block_hashes_packed(
        token_ids, block_size, lora_name=lora_name, cache_salt=cache_salt, mm_items=mm_items, eagle=eagle
    )


def sequence_hashes(local: Sequence[int] | bytes | bytearray | memoryview) -> list[int]:
    """Return the sequence hashes of a chain of local hashes that begins at the prompt's first block.

    Args:
        local: Local hashes, as integers or as little-endian u64s.

    Raises:
        InvalidArgument: A hash is not in 0 .. 2^64-1, or the bytes are not whole u64s.
    """
    return _backend.sequence_hashes(local)


def keyed_sequence_hashes(local: Sequence[int] | bytes | bytearray | memoryview, stride: int, key: bytes) -> bytes:
    """Return hashes of the prefixes of a prompt that show which prompts share one, and nothing else.

    SipHash-2-4 (Aumasson, Bernstein: "SipHash: a fast short-input PRF", 2012) of the sequence hash of every `stride`-th
    block, which is hashed as eight little-endian bytes.

    Args:
        local: Local hashes, as integers or as little-endian u64s.
        stride: Blocks a hash; those behind the last whole `stride` have none.
        key: Sixteen secret bytes.

    Returns:
        Little-endian u64s, eight bytes a hash.

    Raises:
        InvalidArgument: A hash is not in 0 .. 2^64-1, the bytes are not whole u64s, or `stride` is below 1.
    """
    return _backend.keyed_sequence_hashes(local, stride, key)


def extend_sequence(parent_sequence_hash: int | None, local: int) -> int:
    """Return the sequence hash of a block from its parent's (None: it is a prompt's first) and its local hash."""
    return _backend.extend_sequence(parent_sequence_hash, local)


def mm_hash(item_id: str) -> int:
    """Return the number of a multimodal item: the first 16 of 64 hex digits, else XXH3_64 of the id."""
    return _backend.mm_hash(item_id)


def engine_hash(value: int | bytes) -> int:
    """Return an engine's block hash as u64: unsigned, signed (bit for bit) or the last 8 bytes, big-endian.

    Raises:
        InvalidArgument: The value fits in neither u64 nor i64, or has no bytes.
    """
    return _backend.engine_hash(value)


def block_seed(lora_name: str, cache_salt: str, first: bool) -> int:
    """Return the seed of a prompt's first block, or of every other one."""
    return _backend.block_seed(lora_name, cache_salt, first)
