"""The prefix cache of a hybrid model: a group of full attention and one with a sliding window share the blocks.

::

    positions of a prompt    0   1   2   3   4        window of 2 blocks, prompt of 4.5
    window (group 0)         ·   ·   9   8   6        what fell out of the window is freed; 9 and 8 are cached
    full attention (group 1) 7   12  5   4   3        all full ones are cached

It behaves as vLLM's (0.32, `prefix_cache_retention_interval` 0):

1. A prefix is hit only if full attention has all of it and the window group the last ⌈(window - 1) / block⌉ blocks
   before its end, or all there are.
2. Of a prompt the window group caches the blocks before the place where the same prompt would be resumed, and those
   before the end of a longer prefix that full attention had. It announces each run with all its tokens and the hashes
   of what is cached, which may be none.
3. Blocks that fell out of the window are freed before the next step takes some. Those without a hash are taken first.

Not thread-safe. Costs are O(blocks touched).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import takewhile

from kvscout_mocker.engine.block_manager import BlockManager, stored_event
from kvscout_mocker.events import SLIDING_WINDOW_KIND, BlockRemoved, BlockStored
from kvscout_mocker.tokens.sequence import BlockTable, Sequence

WINDOW_GROUP = 0
_NULL = 0
"""Stands where a block is not needed any more."""


class HybridBlockManager(BlockManager):
    """All physical blocks of one rank of a hybrid model, whose first layer has the window."""

    _group = 1

    def __init__(self, num_blocks: int, block_size: int, sliding_window: int) -> None:
        """Start with every block free and nothing cached.

        Args:
            num_blocks: Physical blocks of both groups, including the null block.
            block_size: Tokens a block.
            sliding_window: Tokens that a token sees in every other layer, at least 2.
        """
        super().__init__(num_blocks, block_size)
        self._window = sliding_window
        self._needed = -(-(sliding_window - 1) // block_size)
        self._window_hashes: dict[int, int] = {}
        """Block → hash, of cached blocks of the window group."""
        self._window_copies: dict[int, list[int]] = {}

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """See `BlockManager.cached_prefix`."""
        full = super().cached_prefix(sequence)
        return full[: self._served(sequence, len(full))]

    def _served(self, sequence: Sequence, most: int) -> int:
        """Return the longest prefix of at most `most` blocks that the window group serves."""
        ends = range(most, 0, -1)
        missing = takewhile(lambda end: not self._serves(sequence, end), ends)
        return most - sum(1 for _ in missing)

    def _serves(self, sequence: Sequence, end: int) -> bool:
        before = sequence.block_hashes[max(0, end - self._needed) : end]
        return all(block_hash in self._window_copies for block_hash in before)

    def fits(self, table: BlockTable, tokens: int, prefix: Seq[int] = ()) -> bool:
        """See `BlockManager.fits`; of a prefix the window group may revive as many blocks as it needs."""
        revived = sum(1 for block in prefix if self._references[block] == 0) + min(len(prefix), self._needed)
        missing = self._missing(table, tokens, prefix) + self._window_missing(table, tokens, len(prefix))
        fallen = sum(1 for block in self._fallen(table) if self._references[block] == 1)
        return missing + revived <= len(self._free) + fallen

    def allocate(
        self,
        sequence: Sequence,
        table: BlockTable,
        tokens: int,
        prefix: Seq[int] = (),
        *,
        filled_tokens: int | None = None,
    ) -> bool:
        """See `BlockManager.allocate`."""
        if not self.fits(table, tokens, prefix):
            return False
        if not table.block_ids:
            self._reference(prefix)
            self._admit(sequence, table, len(prefix))
        else:
            fallen = self._fallen(table)
            table.window_ids[: self._skipped(table.tokens)] = [_NULL] * self._skipped(table.tokens)
            self._free_window_blocks(reversed(fallen))
        self._extend_window(table, tokens)
        self._extend(table, tokens, prefix)
        table.tokens = tokens
        self.register(sequence, table, tokens if filled_tokens is None else filled_tokens)
        return True

    def _extend_window(self, table: BlockTable, tokens: int) -> None:
        table.window_ids.extend(self._take() for _ in range(self._window_missing(table, tokens, 0)))

    def _admit(self, sequence: Sequence, table: BlockTable, hit: int) -> None:
        """Assign the blocks of the window group that a request hits."""
        skipped = min(self._skipped(hit * self.block_size), hit)
        blocks = [self._window_copies[block_hash][0] for block_hash in sequence.block_hashes[skipped:hit]]
        self._reference(blocks)
        table.window_ids = [_NULL] * skipped + blocks
        table.window_registered = hit
        table.window_ends = self._ends(sequence)

    def _ends(self, sequence: Sequence) -> tuple[int, int]:
        """Return the ends of the prefixes before which a request caches the window.

        One is where the same prompt would be resumed, the other the end of what full attention has.
        """
        return (len(sequence) - 1) // self.block_size, len(super().cached_prefix(sequence))

    def register(self, sequence: Sequence, table: BlockTable, tokens: int) -> None:
        """See `BlockManager.register`."""
        first, full_blocks = table.window_registered, tokens // self.block_size
        if full_blocks > first:
            self._register_window(sequence, table, first, full_blocks)
        super().register(sequence, table, tokens)

    def _register_window(self, sequence: Sequence, table: BlockTable, first: int, full_blocks: int) -> None:
        kept = [index for index in range(first, full_blocks) if self._is_kept(table, index)]
        for index in kept:
            block, block_hash = table.window_ids[index], sequence.block_hashes[index]
            self._window_hashes[block] = block_hash
            self._window_copies.setdefault(block_hash, []).append(block)
        table.window_registered = full_blocks
        event = stored_event(sequence, first, full_blocks, WINDOW_GROUP)._replace(
            block_hashes=[sequence.block_hashes[index] for index in kept],
            extra_keys=[sequence.scope.extra_keys(index) for index in kept] or None,
        )
        self._events.append(self._of_kind(event))

    def _of_kind(self, event: BlockStored) -> BlockStored:
        return event._replace(kind=SLIDING_WINDOW_KIND, sliding_window=self._window)

    def _is_kept(self, table: BlockTable, index: int) -> bool:
        is_before = any(end - self._needed <= index < end for end in table.window_ends)
        return is_before and table.window_ids[index] != _NULL

    def release(self, table: BlockTable) -> None:
        """See `BlockManager.release`."""
        self._free_window_blocks(block for block in reversed(table.window_ids) if block != _NULL)
        super().release(table)
        table.window_ids = []
        table.window_registered = table.tokens = 0

    def reset(self, *, announced: bool = True) -> bool:
        """See `BlockManager.reset`."""
        if not super().reset(announced=announced):
            return False
        self._window_hashes.clear()
        self._window_copies.clear()
        return True

    def _skipped(self, tokens: int) -> int:
        """Return the number of blocks that no token after `tokens` sees."""
        return max(0, tokens - self._window + 1) // self.block_size

    def _fallen(self, table: BlockTable) -> list[int]:
        """Return blocks that a running request holds and does not see any more."""
        return [block for block in table.window_ids[: self._skipped(table.tokens)] if block != _NULL]

    def _window_missing(self, table: BlockTable, tokens: int, hit: int) -> int:
        return -(-tokens // self.block_size) - max(len(table.window_ids), hit)

    def _free_window_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._window_hashes)

    def _take(self) -> int:
        block = super()._take()
        evicted = self._window_hashes.pop(block, None)
        if evicted is not None:
            holders = self._window_copies[evicted]
            holders.remove(block)
            if not holders:
                del self._window_copies[evicted]
            self._events.append(BlockRemoved(evicted, WINDOW_GROUP))
        return block
