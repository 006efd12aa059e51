"""Rules of a dump, in plain Python: what a worker's state must be for an index to take it over."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvscout_blocks.bytes.dump import DumpedBlock, DumpedOrphan, DumpedWindowBlock, WorkerDump
from kvscout_blocks.index.block_index import GROUP_LIMIT, MAX_COPIES, ORPHAN_LIMIT
from kvscout_common.errors import InvalidArgument


def check_dump(dump: WorkerDump, block_size: int) -> None:
    """Verify that a dump does not contradict itself, for an index with blocks of `block_size` tokens.

    Raises:
        InvalidArgument: Naming the first entry that contradicts another.
    """
    _require_ascending("groups", [group for group, _ in dump.groups])
    _require(len(dump.groups) <= GROUP_LIMIT, "groups", f"more than {GROUP_LIMIT}")
    full, hashes = {group for group, is_full in dump.groups if is_full}, set[int]()
    for position, block in enumerate(dump.blocks):
        field = f"blocks.{position}"
        _require(-1 <= block.parent < position, field, "its parent does not come before it")
        _require((block.engine_hash is None) == (not block.copies), field, "a hole has copies, or a block has none")
        _require_entry(block, field, full, "is not full attention", hashes)
    bound = frozenset(hashes)
    for position, orphan in enumerate(dump.orphans):
        field = f"orphans.{position}"
        _require_entry(orphan, field, full, "is not full attention", hashes)
        _require(bool(orphan.copies), field, "an orphan has no copies")
        _require(orphan.parent_engine_hash not in bound, field, "its parent is known")
    _require(len(dump.orphans) <= ORPHAN_LIMIT, "orphans", f"more than {ORPHAN_LIMIT}")
    _require_ascending("windows", [group.number for group in dump.windows])
    for position, group in enumerate(dump.windows):
        field = f"windows.{position}"
        _require((group.number, False) in dump.groups, field, "must be a known group other than full attention")
        _require(group.window > 0 and group.block_size > 0, field, "has no tokens")
        _require(group.block_size % block_size == 0, field, f"its blocks are not multiples of {block_size} tokens")
    windows, hashes = {group.number for group in dump.windows}, set[int]()
    for position, window_block in enumerate(dump.window_blocks):
        field = f"window_blocks.{position}"
        _require(bool(window_block.copies), field, "has no copies")
        _require_entry(window_block, field, windows, "has no window", hashes)
    has_blocks = dump.blocks or dump.orphans or dump.window_blocks
    _require(not (dump.incompatible and has_blocks), "incompatible", "a worker that is not indexed has blocks")


def _require_ascending(field: str, numbers: Sequence[int]) -> None:
    for position in range(1, len(numbers)):
        rises = numbers[position - 1] < numbers[position]
        _require(rises, f"{field}.{position}", "does not come after the one before it")


def _require_entry(
    entry: DumpedBlock | DumpedOrphan | DumpedWindowBlock,
    field: str,
    groups: Collection[int],
    otherwise: str,
    seen: set[int],
) -> None:
    if entry.engine_hash is not None:
        _require(entry.engine_hash not in seen, field, "its engine hash comes twice")
        seen.add(entry.engine_hash)
    for group, _, number in entry.copies:
        _require(group in groups, field, f"group {group} {otherwise}")
        _require(1 <= number <= MAX_COPIES, field, f"{number} copies")


def _require(holds: bool, field: str, message: str) -> None:
    if not holds:
        raise InvalidArgument(message, field=field)
