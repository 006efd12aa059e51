"""The tokens of chunks of text that were tokenized before, each tenant's for itself.

What one of them asks is no other's to learn from how long it takes, nor to displace.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

MAX_TENANTS = 256
"""Tenants whose chunks are cached; the least recently used tenant is evicted first."""
ENTRY_BYTES = 150
"""Bytes of an entry beside its text and its tokens."""


class _Chunks:
    __slots__ = ("by_text", "size")

    def __init__(self) -> None:
        self.by_text: OrderedDict[str, bytes] = OrderedDict()
        self.size = 0


class ChunkCache:
    """Least recently used chunks go when a tenant's have `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        """Begin with an empty cache.

        Args:
            max_bytes: Of one tenant and tokenizer.
        """
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[str, _Chunks] = OrderedDict()
        self.hits = 0
        """Characters that were found."""
        self.misses = 0
        """Characters that were not."""

    @property
    def size(self) -> int:
        """Bytes kept, of all tenants."""
        return sum(chunks.size for chunks in self._tenants.values())

    def get(self, tenant: str, text: str) -> bytes | None:
        """Return the tokens of a chunk, u32 each; None = not kept."""
        chunks = self._tenants.get(tenant)
        tokens = chunks.by_text.get(text) if chunks is not None else None
        if chunks is None or tokens is None:
            self.misses += len(text)
            return None
        chunks.by_text.move_to_end(text)
        self.hits += len(text)
        return tokens

    def put(self, tenant: str, text: str, tokens: bytes) -> None:
        """Keep a chunk, unless it alone is too large."""
        size = _size(text, tokens)
        if size > self._max_bytes:
            return
        chunks = self._tenants.get(tenant)
        if chunks is None:
            chunks = self._tenants[tenant] = _Chunks()
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        replaced = chunks.by_text.pop(text, None)
        if replaced is not None:
            chunks.size -= _size(text, replaced)
        chunks.by_text[text] = tokens
        chunks.size += size
        while chunks.size > self._max_bytes:
            oldest, dropped = chunks.by_text.popitem(last=False)
            chunks.size -= _size(oldest, dropped)


def _size(text: str, tokens: bytes) -> int:
    return sys.getsizeof(text) + len(tokens) + ENTRY_BYTES
