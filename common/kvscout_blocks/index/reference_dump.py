"""Rules of a dump, in plain Python: what a worker's state must be for an index to take it over."""

from __future__ import annotations

from collections.abc import Sequence

from kvscout_blocks.bytes.dump import DumpedBlock, DumpedOrphan, DumpedWindowBlock, WorkerDump
from kvscout_blocks.index.block_index import GROUP_LIMIT, MAX_COPIES, ORPHAN_LIMIT
from kvscout_common.errors import InvalidArgument


def check_dump(dump: WorkerDump, block_size: int) -> None:  # noqa: C901, PLR0912  # one rule after the other
    """Verify that a dump does not contradict itself, for an index with blocks of `block_size` tokens.

    Raises:
        InvalidArgument: Naming the first entry that contradicts another.
    """
    _check_ascending("groups", [group for group, _ in dump.groups])
    if len(dump.groups) > GROUP_LIMIT:
        raise InvalidArgument(f"more than {GROUP_LIMIT}", field="groups")
    full = {group for group, is_full in dump.groups if is_full}
    hashes: set[int] = set()
    for position, block in enumerate(dump.blocks):
        field = f"blocks.{position}"
        if not -1 <= block.parent < position:
            raise InvalidArgument("its parent does not come before it", field=field)
        if (block.engine_hash is None) != (not block.copies):
            raise InvalidArgument("a hole has copies, or a block has none", field=field)
        _check_entry(block, field, full, "is not full attention", hashes)
    bound = frozenset(hashes)
    for position, orphan in enumerate(dump.orphans):
        field = f"orphans.{position}"
        _check_entry(orphan, field, full, "is not full attention", hashes)
        if not orphan.copies:
            raise InvalidArgument("an orphan has no copies", field=field)
        if orphan.parent_engine_hash in bound:
            raise InvalidArgument("its parent is known", field=field)
    if len(dump.orphans) > ORPHAN_LIMIT:
        raise InvalidArgument(f"more than {ORPHAN_LIMIT}", field="orphans")
    _check_ascending("windows", [group.number for group in dump.windows])
    for position, group in enumerate(dump.windows):
        field = f"windows.{position}"
        if (group.number, False) not in dump.groups:
            raise InvalidArgument("is no group that is not full attention", field=field)
        if not group.window or not group.block_size:
            raise InvalidArgument("has no tokens", field=field)
        if group.block_size % block_size:
            raise InvalidArgument(f"its blocks are no multiple of {block_size} tokens", field=field)
    hashes = set()
    for position, window_block in enumerate(dump.window_blocks):
        field = f"window_blocks.{position}"
        if not window_block.copies:
            raise InvalidArgument("has no copies", field=field)
        _check_entry(window_block, field, {group.number for group in dump.windows}, "has no window", hashes)
    if dump.incompatible and (dump.blocks or dump.orphans or dump.window_blocks):
        raise InvalidArgument("a worker that is not indexed has blocks", field="incompatible")


def _check_ascending(field: str, numbers: Sequence[int]) -> None:
    for position in range(1, len(numbers)):
        if numbers[position - 1] >= numbers[position]:
            raise InvalidArgument("does not come after the one before it", field=f"{field}.{position}")


def _check_entry(
    entry: DumpedBlock | DumpedOrphan | DumpedWindowBlock, field: str, groups: set[int], otherwise: str, seen: set[int]
) -> None:
    if entry.engine_hash is not None:
        if entry.engine_hash in seen:
            raise InvalidArgument("its engine hash comes twice", field=field)
        seen.add(entry.engine_hash)
    for group, _, number in entry.copies:
        if group not in groups:
            raise InvalidArgument(f"group {group} {otherwise}", field=field)
        if not 1 <= number <= MAX_COPIES:
            raise InvalidArgument(f"{number} copies", field=field)
