"""Rules of a dump, in plain Python: what a worker's state must be for an index to take it over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvscout_blocks.bytes.dump import DumpedBlock, DumpedOrphan, DumpedWindowBlock, WorkerDump
from kvscout_blocks.index.block_index import GROUP_LIMIT, MAX_COPIES, ORPHAN_LIMIT
from kvscout_common.errors import InvalidArgument

Rules = Iterator[tuple[bool, str, str]]
"""Rules: True = it holds; the field it is about; the message if it does not."""


def check_dump(dump: WorkerDump, block_size: int) -> None:
    """Verify that a dump does not contradict itself, for an index with blocks of `block_size` tokens.

    Raises:
        InvalidArgument: Naming the first entry that contradicts another.
    """
    for holds, field, message in _rules(dump, block_size):
        if not holds:
            raise InvalidArgument(message, field=field)


def _rules(dump: WorkerDump, block_size: int) -> Rules:
    yield from _ascending("groups", [group for group, _ in dump.groups])
    yield len(dump.groups) <= GROUP_LIMIT, "groups", f"more than {GROUP_LIMIT}"
    full = {group for group, is_full in dump.groups if is_full}
    hashes: set[int] = set()
    for position, block in enumerate(dump.blocks):
        field = f"blocks.{position}"
        yield -1 <= block.parent < position, field, "its parent does not come before it"
        yield (block.engine_hash is None) == (not block.copies), field, "a hole has copies, or a block has none"
        yield from _entry(block, field, full, "is not full attention", hashes)
    bound = frozenset(hashes)
    for position, orphan in enumerate(dump.orphans):
        field = f"orphans.{position}"
        yield from _entry(orphan, field, full, "is not full attention", hashes)
        yield bool(orphan.copies), field, "an orphan has no copies"
        yield orphan.parent_engine_hash not in bound, field, "its parent is known"
    yield len(dump.orphans) <= ORPHAN_LIMIT, "orphans", f"more than {ORPHAN_LIMIT}"
    yield from _ascending("windows", [group.number for group in dump.windows])
    for position, group in enumerate(dump.windows):
        field = f"windows.{position}"
        yield (group.number, False) in dump.groups, field, "is no group that is not full attention"
        yield group.window > 0 and group.block_size > 0, field, "has no tokens"
        whole = group.block_size % block_size == 0
        yield whole, field, f"its blocks are no multiple of {block_size} tokens"
    hashes = set()
    windows = {group.number for group in dump.windows}
    for position, window_block in enumerate(dump.window_blocks):
        field = f"window_blocks.{position}"
        yield bool(window_block.copies), field, "has no copies"
        yield from _entry(window_block, field, windows, "has no window", hashes)
    has_blocks = dump.blocks or dump.orphans or dump.window_blocks
    yield not (dump.incompatible and has_blocks), "incompatible", "a worker that is not indexed has blocks"


def _ascending(field: str, numbers: Sequence[int]) -> Rules:
    for position in range(1, len(numbers)):
        rises = numbers[position - 1] < numbers[position]
        yield rises, f"{field}.{position}", "does not come after the one before it"


def _entry(
    entry: DumpedBlock | DumpedOrphan | DumpedWindowBlock, field: str, groups: set[int], otherwise: str, seen: set[int]
) -> Rules:
    if entry.engine_hash is not None:
        yield entry.engine_hash not in seen, field, "its engine hash comes twice"
        seen.add(entry.engine_hash)
    for group, _, number in entry.copies:
        yield group in groups, field, f"group {group} {otherwise}"
        yield 1 <= number <= MAX_COPIES, field, f"{number} copies"
