"""Block hashes in plain Python: what `kvscout_common.hashing` uses where the extension is not built.

Written to be read beside the formulas; `native/src/hashing.rs` computes the same faster.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import SEED, MmItem

_MASK = 2**64 - 1
_TOKEN_BYTES = 4
_HEX_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


def block_seed(lora_name: str, cache_salt: str, first: bool) -> int:
    """Return the seed of a block; see `kvscout_common.hashing.block_seed`."""
    seed = SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), seed=0)
    if first and cache_salt:
        seed += xxh3_64_intdigest(cache_salt.encode(), seed=1)
    return seed & _MASK


def mm_hash(item_id: str) -> int:
    """Return the number of a multimodal item; see `kvscout_common.hashing.mm_hash`."""
    if _HEX_DIGEST.fullmatch(item_id):
        return int(item_id[:16], 16)
    return xxh3_64_intdigest(item_id.encode(), seed=0)


def engine_hash(value: int | bytes) -> int:
    """Return an engine's block hash as u64; see `kvscout_common.hashing.engine_hash`."""
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return value & _MASK
    raise InvalidArgument("an engine hash is neither 64-bit integer nor bytes", field="block_hashes")


def extend_sequence(parent_sequence_hash: int | None, local: int) -> int:
    """Return the sequence hash of a block after its parent; see `kvscout_common.hashing.extend_sequence`."""
    if parent_sequence_hash is None:
        return local
    return xxh3_64_intdigest(struct.pack("<QQ", parent_sequence_hash, local), seed=SEED)


def sequence_hashes(local: Sequence[int] | bytes) -> list[int]:
    """Return the sequence hashes of a chain; see `kvscout_common.hashing.sequence_hashes`."""
    parent: int | None = None
    chain = []
    for hash_ in _unpacked(local):
        parent = extend_sequence(parent, hash_)
        chain.append(parent)
    return chain


def keyed_sequence_hashes(local: Sequence[int] | bytes, stride: int, key: bytes) -> bytes:
    """Return keyed hashes of prefixes; see `kvscout_common.hashing.keyed_sequence_hashes`."""
    if stride < 1:
        raise InvalidArgument("must be at least 1 block", field="stride")
    prefixes = sequence_hashes(local)[stride - 1 :: stride]
    return b"".join(struct.pack("<Q", _siphash(key, prefix)) for prefix in prefixes)


def _siphash(key: bytes, message: int) -> int:
    """Return SipHash-2-4 of the eight little-endian bytes of a number."""
    low, high = (int.from_bytes(half, "little") for half in (key[:8], key[8:]))
    state = [low ^ 0x736F6D6570736575, high ^ 0x646F72616E646F6D, low ^ 0x6C7967656E657261, high ^ 0x7465646279746573]
    # The bytes are one word; behind them comes one with their number in its highest byte.
    for word in (message, 8 << 56):
        state[3] ^= word
        _sip_rounds(state, 2)
        state[0] ^= word
    state[2] ^= 0xFF
    _sip_rounds(state, 4)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


def _sip_rounds(state: list[int], rounds: int) -> None:
    v0, v1, v2, v3 = state
    for _ in range(rounds):
        v0, v2 = (v0 + v1) & _MASK, (v2 + v3) & _MASK
        v1, v3 = _rotated(v1, 13) ^ v0, _rotated(v3, 16) ^ v2
        v0, v2 = (_rotated(v0, 32) + v3) & _MASK, (v2 + v1) & _MASK
        v1, v3 = _rotated(v1, 17) ^ v2, _rotated(v3, 21) ^ v0
        v2 = _rotated(v2, 32)
    state[:] = v0, v1, v2, v3


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & _MASK


def block_hashes(
    token_ids: Sequence[int] | bytes | bytearray | memoryview,
    block_size: int,
    *,
    lora_name: str = "",
    cache_salt: str = "",
    mm_items: Sequence[tuple[str, int, int]] = (),
    eagle: bool = False,
) -> list[int]:
    """Return the local hashes of a prompt's complete blocks; see `kvscout_common.hashing.block_hashes`."""
    if block_size < 1:
        raise InvalidArgument("must be at least 1 token", field="block_size")
    items = [MmItem(*item) for item in mm_items]
    if any(item.offset < 0 or item.length < 1 for item in items):
        raise InvalidArgument("an item needs an offset of at least 0 and a length of at least 1", field="mm_items")
    tokens = _token_bytes(token_ids)
    count = max(0, len(tokens) // _TOKEN_BYTES - int(eagle)) // block_size
    first_seed, seed = (block_seed(lora_name, cache_salt, first) for first in (True, False))
    local = []
    for start in range(0, count * block_size, block_size):
        end = start + block_size
        window = tokens[start * _TOKEN_BYTES : (end + int(eagle)) * _TOKEN_BYTES]
        touching = sorted(mm_hash(item.id) for item in items if item.offset < end and item.offset + item.length > start)
        data = window + struct.pack(f"<{len(touching)}Q", *touching)
        local.append(xxh3_64_intdigest(data, seed=seed if start else first_seed))
    return local


def block_hashes_packed(
    token_ids: Sequence[int] | bytes | bytearray | memoryview,
    block_size: int,
    *,
    lora_name: str = "",
    cache_salt: str = "",
    mm_items: Sequence[tuple[str, int, int]] = (),
    eagle: bool = False,
) -> bytes:
    """Return the same as little-endian u64s; see `kvscout_common.hashing.block_hashes_packed`."""
    local = block_hashes(
        token_ids,
        block_size,
        lora_name=lora_name,
        cache_salt=cache_salt,
        mm_items=mm_items,
        eagle=eagle,
    )
    return struct.pack(f"<{len(local)}Q", *local)


def _token_bytes(token_ids: Sequence[int] | bytes | bytearray | memoryview) -> bytes:
    if isinstance(token_ids, (bytes, bytearray, memoryview)):
        tokens = bytes(token_ids)
        if len(tokens) % _TOKEN_BYTES:
            raise InvalidArgument("the bytes are not whole u32s", field="token_ids")
        return tokens
    try:
        # operator.index: struct's own errors do not distinguish a float from a number out of range.
        ids = [operator.index(token) for token in token_ids]
    except TypeError:
        raise InvalidArgument("must be integers or the bytes of u32s", field="token_ids") from None
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        raise InvalidArgument("a token id is not in 0 .. 2^32-1", field="token_ids") from None


def _unpacked(local: Sequence[int] | bytes | bytearray | memoryview) -> Sequence[int]:
    if isinstance(local, (bytes, bytearray, memoryview)):
        data = bytes(local)
        if len(data) % 8:
            raise InvalidArgument("the bytes are not whole u64s", field="block_hashes")
        return struct.unpack(f"<{len(data) // 8}Q", data)
    try:
        struct.pack(f"<{len(local)}Q", *local)
    except struct.error:
        raise InvalidArgument("a block hash is not an integer in 0 .. 2^64-1", field="block_hashes") from None
    return local
