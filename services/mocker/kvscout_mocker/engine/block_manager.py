"""The prefix cache of one rank: physical blocks, their reference counts and who is evicted next, pure.

::

    free queue (evicted first ──▶ last)        cached blocks
    ┌────┬────┬────┬────┬────┐                 hash a ─▶ [block 3]
    │ 7  │ 12 │ 5  │ 4  │ 3  │ …               hash b ─▶ [block 4, block 9]   two physical copies
    └────┴────┴────┴────┴────┘                 hash c ─▶ [block 5]

It behaves as vLLM's block pool does:

1. A block is in the free queue exactly when no request references it. It keeps its hash there and can be
   hit until it is taken for something else: that is the eviction, one `BlockRemoved` a physical copy.
2. A request's blocks are freed last one first, so that leaves are evicted before what leads to them; those
   without a hash (the partial tail) can never be hit and go to the front of the queue (vLLM ≥ 0.24).
3. Blocks are registered under their hash when the step that fills them is *scheduled*: a request scheduled
   later in the same step hits them.
4. A hash may have several physical copies: two requests computed it side by side, or a block-aligned prompt
   recomputed its last block (at most `(tokens − 1) // block_size` blocks are ever hit). The oldest is hit.
5. Block 0 is vLLM's null block: it counts in the total and never holds anything.

Not thread-safe. Costs are O(blocks touched).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

from kvscout_mocker.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvscout_mocker.tokens.sequence import BlockTable, Sequence


class BlockManager:
    """All physical blocks of one rank and the events that their life causes."""

    _group = 0
    """Number of the group of full attention."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Start with every block free and nothing cached.

        Args:
            num_blocks: Physical blocks including the null block, at least 2.
            block_size: Tokens a block.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._hashes: list[int | None] = [None] * num_blocks
        self._copies: dict[int, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._events: list[Event] = []

    @property
    def capacity(self) -> int:
        """Return blocks that can hold tokens: all but the null block."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Return the share of the capacity that requests reference, 0 to 1."""
        return 1.0 - len(self._free) / self.capacity

    def begin_step(self) -> None:
        """Note that another step is scheduled from here on."""

    def chunk(self, sequence: Sequence, table: BlockTable, prompt_tokens: int, start: int, tokens: int) -> int:
        """Return how many tokens of a request a step may compute.

        Args:
            sequence: The request's tokens and hashes.
            table: Blocks that it references.
            prompt_tokens: Those of its tokens that are its prompt.
            start: Tokens that are computed or hit already.
            tokens: What the step has room for.

        Returns:
            At most `tokens`; 0: the request waits for a step with more room.
        """
        return tokens

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """Return the blocks a sequence would hit now, without its last token's block; changes nothing."""
        found: list[int] = []
        copies = self._copies
        for block_hash in sequence.block_hashes[: (len(sequence) - 1) // self.block_size]:
            holders = copies.get(block_hash)
            if holders is None:
                break
            found.append(holders[0])
        return found

    def fits(self, table: BlockTable, tokens: int, prefix: Seq[int] = ()) -> bool:
        """Return whether `tokens` tokens of a request could have slots now.

        Args:
            table: Blocks that the request already references.
            tokens: Its tokens counted from the first one.
            prefix: Cached blocks that it would reference in addition.
        """
        revived = sum(1 for block in prefix if self._references[block] == 0)
        return self._missing(table, tokens, prefix) + revived <= len(self._free)

    def allocate(
        self,
        sequence: Sequence,
        table: BlockTable,
        tokens: int,
        prefix: Seq[int] = (),
        *,
        filled_tokens: int | None = None,
    ) -> bool:
        """Give a request slots for its first `tokens` tokens and register the blocks this fills.

        Args:
            sequence: The request's tokens and hashes; at least `tokens` tokens long.
            table: Blocks that it references; extended in place.
            tokens: Its tokens counted from the first one that have a slot afterwards.
            prefix: Result of `cached_prefix` when the request is admitted, else nothing.
            filled_tokens: Those that will be there after this step; None: all. The others are registered later.

        Returns:
            False, with nothing changed, if there are not enough free blocks.
        """
        if not self.fits(table, tokens, prefix):
            return False
        self._reference(prefix)
        self._extend(table, tokens, prefix)
        self.register(sequence, table, tokens if filled_tokens is None else filled_tokens)
        return True

    def register(self, sequence: Sequence, table: BlockTable, tokens: int) -> None:
        """Make the full blocks of a request's first `tokens` tokens known under their hashes."""
        first, full_blocks = table.registered, tokens // self.block_size
        if full_blocks <= first:
            return
        for index in range(first, full_blocks):
            block, block_hash = table.block_ids[index], sequence.block_hashes[index]
            self._hashes[block] = block_hash
            self._copies.setdefault(block_hash, []).append(block)
        table.registered = full_blocks
        self._events.append(stored_event(sequence, first, full_blocks, self._group))

    def release(self, table: BlockTable) -> None:
        """Drop all references of a request and empty its table; the blocks stay cached until needed."""
        for block in reversed(table.block_ids):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
        for block in table.block_ids[table.registered :]:
            self._free.move_to_end(block, last=False)
        table.block_ids = []
        table.registered = 0

    def report_prefix(self, sequence: Sequence, blocks: int) -> None:
        """Emit a Stored event for blocks that were hit (`kv_cache_report_mode: full`); no copy is made."""
        if blocks:
            self._events.append(stored_event(sequence, 0, blocks, self._group))

    def reset(self, *, announced: bool = True) -> bool:
        """Forget every cached block; refused (False) while a request references one.

        Args:
            announced: An event says so; else nobody learns of it, as from an engine that empties its memory.
        """
        if len(self._free) != self.capacity:
            return False
        self._copies.clear()
        self._hashes = [None] * self.num_blocks
        if announced:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    @property
    def pending_events(self) -> int:
        """Return the number of events that were not taken yet."""
        return len(self._events)

    def cached_copies(self) -> dict[int, int]:
        """Return the number of physical copies by hash."""
        return {block_hash: len(blocks) for block_hash, blocks in self._copies.items()}

    def _reference(self, blocks: Seq[int]) -> None:
        """Add a request's reference to blocks that it hits."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def _extend(self, table: BlockTable, tokens: int, prefix: Seq[int]) -> None:
        """Assign the blocks that a request hits, and free blocks for the rest."""
        missing = self._missing(table, tokens, prefix)
        table.block_ids.extend(prefix)
        table.registered += len(prefix)
        for _ in range(missing):
            table.block_ids.append(self._take())

    def _missing(self, table: BlockTable, tokens: int, prefix: Seq[int]) -> int:
        return -(-tokens // self.block_size) - len(table.block_ids) - len(prefix)

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._references[block] = 1
        evicted = self._hashes[block]
        if evicted is not None:
            self._hashes[block] = None
            holders = self._copies[evicted]
            holders.remove(block)
            if not holders:
                del self._copies[evicted]
            self._events.append(BlockRemoved(evicted, self._group))
        return block


def stored_event(sequence: Sequence, first: int, end: int, group: int) -> BlockStored:
    """Return the event that blocks first..end-1 of a sequence are cached in a group."""
    scope = sequence.scope
    return BlockStored(
        block_hashes=sequence.block_hashes[first:end],
        parent_block_hash=sequence.block_hashes[first - 1] if first else None,
        token_ids=sequence.block_tokens(first, end),
        block_size=sequence.block_size,
        lora_id=scope.lora_id or None,
        lora_name=scope.lora_name or None,
        extra_keys=[scope.extra_keys(index) for index in range(first, end)],
        session_id=scope.session_id or None,
        group=group,
    )
