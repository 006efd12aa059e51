"""The tokens of one request and the chain of block hashes over them, pure.

A block hash is `XXH3_64(parent hash ‖ u32 little-endian tokens ‖ extra keys of the block, hash seed)`. It
is opaque to everyone else, as vLLM's are: it never equals the hashes that kvscout computes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import msgpack
import xxhash


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Keys that separate the blocks of a request from those of others with the same tokens."""

    lora_name: str = ""
    lora_id: int = 0
    """Number of the adapter, from 1; 0 without one."""
    cache_salt: str = ""
    session_id: str = ""
    """Only reported in events; does not separate blocks."""
    extra_key: str = ""
    """SGLang's: separates blocks, but no event reports it."""

    def extra_keys(self, block_index: int) -> list[str] | None:
        """Return the extra keys of one block, or None: the adapter on each, the salt on the first only."""
        keys = [self.lora_name] if self.lora_name else []
        if self.cache_salt and block_index == 0:
            keys.append(self.cache_salt)
        return keys or None


class Sequence:
    """Prompt and generated tokens of one request; a block is hashed as soon as its last token is known."""

    __slots__ = (
        "_first_extra",
        "_hash_seed",
        "_later_extra",
        "block_hashes",
        "block_size",
        "scope",
        "tokens",
    )

    def __init__(self, tokens: array[int], *, block_size: int, hash_seed: int, scope: CacheScope | None = None) -> None:
        """Take over the prompt tokens and hash their full blocks.

        Args:
            tokens: u32 token ids (`array("I")`), owned by the sequence from now on.
            block_size: Tokens a block.
            hash_seed: Seed that separates the hashes of one engine from those of another.
            scope: Adapter and salt; None for neither.
        """
        self.tokens = tokens
        self.block_size = block_size
        self.scope = scope if scope is not None else CacheScope()
        self._hash_seed = hash_seed
        hidden = self.scope.extra_key.encode()
        self._first_extra = msgpack.packb(self.scope.extra_keys(0)) + hidden
        self._later_extra = msgpack.packb(self.scope.extra_keys(1)) + hidden
        self.block_hashes: list[int] = []
        self._hash_full_blocks()

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Add one generated token."""
        self.tokens.append(token)
        if len(self.tokens) % self.block_size == 0:
            self._hash_full_blocks()

    def block_tokens(self, first_block: int, end_block: int) -> list[int]:
        """Return the token ids of the blocks first_block..end_block-1."""
        return self.tokens[first_block * self.block_size : end_block * self.block_size].tolist()

    def _hash_full_blocks(self) -> None:
        hashes = self.block_hashes
        done = len(hashes)
        block_bytes = self.block_size * self.tokens.itemsize
        raw = self.tokens[done * self.block_size :].tobytes()
        parent = hashes[-1] if hashes else 0
        extra = self._later_extra if hashes else self._first_extra
        digest, seed = xxhash.xxh3_64_intdigest, self._hash_seed
        for start in range(0, len(raw) - block_bytes + 1, block_bytes):
            parent = digest(parent.to_bytes(8, "little") + raw[start : start + block_bytes] + extra, seed)
            hashes.append(parent)
            extra = self._later_extra


class BlockTable:
    """The blocks that one running request references, in the order of its tokens."""

    __slots__ = ("block_ids", "registered", "tokens", "window_ends", "window_ids", "window_registered")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.registered = 0
        """Leading blocks that are registered under their hash."""
        self.tokens = 0
        """Tokens that have slots; only hybrid models set it and the fields below."""
        self.window_ids: list[int] = []
        """Blocks of the window group; 0 = no longer needed."""
        self.window_registered = 0
        self.window_ends = (0, 0)
        """Ends of the prefixes before which the window is cached, in blocks."""
