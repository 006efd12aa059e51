"""The prefix cache of a hybrid model with states: a group of full attention and one of state-space layers.

::

    positions of a prompt    0   1   2   3   4        prompt of 4.5, computed in steps of 2, 2 and 0.5 blocks
    states (group 0)         ·   ·   ·   8   6        where a step ends there is a state; 8 is cached
    full attention (group 1) 7   12  5   4   3        all full ones are cached

It behaves as vLLM's (0.32, `mamba_cache_mode` align, `prefix_cache_retention_interval` 0), which treats states as
blocks of a window of which only the last one is needed:

1. A prefix is hit only if full attention has all of it and there is a state at its end.
2. A step of the prefill ends at the end of a block, and where the same prompt would be resumed, and at the end of a
   longer prefix that full attention had. The states at the last two are cached.
3. A request has one block for its running state, and for one step the one before it.
4. A request that would hit a state of the step that is being scheduled waits for the next step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvscout_mocker.engine.hybrid_blocks import HybridBlockManager
from kvscout_mocker.events import STATE_KIND, BlockStored
from kvscout_mocker.tokens.sequence import BlockTable, Sequence

_NULL = 0


class StateBlockManager(HybridBlockManager):
    """All physical blocks of one rank of a hybrid model, whose first layer has states."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Start with every block free and nothing cached; see `HybridBlockManager`."""
        super().__init__(num_blocks, block_size, sliding_window=2)
        self._cached_in_step: set[int] = set()

    def begin_step(self) -> None:
        """See `BlockManager.begin_step`."""
        self._cached_in_step.clear()

    def chunk(self, sequence: Sequence, table: BlockTable, prompt_tokens: int, start: int, tokens: int) -> int:
        """See `BlockManager.chunk`."""
        size, end = self.block_size, start + tokens
        prefill_end = max(prompt_tokens, len(sequence) - 1)
        if start >= prefill_end:
            return tokens
        if end < prefill_end:
            end -= end % size
        resumed, shared = table.window_ends if table.block_ids else self._ends(sequence)
        stops = [resumed * size, shared * size] + [start - start % size + size] * (start % size > 0)
        return max(min((stop for stop in stops if start < stop < end), default=end) - start, 0)

    def fits(self, table: BlockTable, tokens: int, prefix: Seq[int] = ()) -> bool:
        """See `BlockManager.fits`."""
        state = self._window_copies[self._hash_of(prefix[-1])][0] if prefix else _NULL
        if prefix and self._hash_of(prefix[-1]) in self._cached_in_step:
            return False
        revived = sum(1 for block in (*prefix, state) if block != _NULL and self._references[block] == 0)
        missing = self._missing(table, tokens, prefix) + self._window_missing(table, tokens, len(prefix))
        fallen = sum(1 for block in self._fallen(table) if self._references[block] == 1)
        return missing + revived <= len(self._free) + fallen

    def _hash_of(self, block: int) -> int:
        block_hash = self._hashes[block]
        assert block_hash is not None, "blocks that are hit are cached"
        return block_hash

    def _window_missing(self, table: BlockTable, tokens: int, hit: int) -> int:
        return int(super()._window_missing(table, tokens, hit) > 0)

    def _extend_window(self, table: BlockTable, tokens: int) -> None:
        if self._window_missing(table, tokens, 0):
            last = -(-tokens // self.block_size) - 1
            table.window_ids += [_NULL] * (last - len(table.window_ids)) + [self._take()]

    def _of_kind(self, event: BlockStored) -> BlockStored:
        self._cached_in_step.update(event.block_hashes)
        return event._replace(kind=STATE_KIND)
