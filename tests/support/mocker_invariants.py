"""Invariants of the mock engine's block managers, and views of them that only tests need."""

from __future__ import annotations

from kvscout_mocker.engine.block_manager import BlockManager
from kvscout_mocker.engine.hybrid_blocks import HybridBlockManager


def free_blocks(manager: BlockManager) -> int:
    """Return the number of blocks that no request references, cached or not."""
    return len(manager._free)


def check_blocks(manager: BlockManager) -> None:
    """Raise AssertionError if a block manager contradicts itself; O(blocks)."""
    assert 0 not in manager._free
    assert manager._references[0] == 0
    for block in range(1, manager.num_blocks):
        assert (block in manager._free) == (manager._references[block] == 0), f"block {block}"
    held = _holders(manager._copies)
    assert held == {block: h for block, h in enumerate(manager._hashes) if h is not None}
    if isinstance(manager, HybridBlockManager):
        held = _holders(manager._window_copies)
        assert held == manager._window_hashes
        assert all(manager._hashes[block] is None for block in held), "a block is of one group"


def _holders(copies: dict[int, list[int]]) -> dict[int, int]:
    held = {block: block_hash for block_hash, blocks in copies.items() for block in blocks}
    assert sum(map(len, copies.values())) == len(held), "a block is listed twice"
    assert all(copies.values()), "a hash without a copy"
    return held
