"""Content of the reference index → dump → content, and the check of its invariants.

Works on `Holdings` only; cursors and groups belong to the index.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TypeVar

from kvscout_blocks.bytes.dump import DumpedBlock, DumpedOrphan, DumpedWindowBlock, WorkerDump
from kvscout_blocks.bytes.events import Tier
from kvscout_blocks.index.block_index import GHOST_LIMIT, GROUP_LIMIT, MAX_COPIES, ORPHAN_LIMIT, SLICE, TWIN_LIMIT
from kvscout_blocks.index.copies import copies_of, counts_of
from kvscout_blocks.index.holdings import Holdings, Orphan, level_of, twins
from kvscout_blocks.index.prefix_tree import NOT_HELD, Node, PrefixTree
from kvscout_blocks.index.windows import WindowGroups
from kvscout_common.errors import InvalidArgument

V = TypeVar("V")

_NOT_FULL = "is not full attention"


Slices = Generator[None, None, V]
"""Yields after each slice; nothing of the holdings may change before the end."""


def dump_holdings(holdings: Holdings, head: WorkerDump) -> Slices[WorkerDump]:
    """A dump with blocks, orphans and window groups in the order that `WorkerDump` promises."""
    below: dict[Node, list[Node]] = {}
    listed: set[Node] = set()
    for number, node in enumerate(holdings.nodes):
        if number % SLICE == SLICE - 1:
            yield
        step = node
        while step.parent is not None and step not in listed:
            listed.add(step)
            below.setdefault(step.parent, []).append(step)
            step = step.parent
    blocks: list[DumpedBlock] = []
    stack = [(holdings.tree.root, -1)]
    done = 0
    while stack:
        done += 1
        if done % SLICE == 0:
            yield
        node, parent = stack.pop()
        position = -1
        if node.parent is not None:
            position = len(blocks)
            bound = sorted(twins(holdings.nodes.get(node)), key=lambda block: block.engine_hash)
            blocks.extend(
                DumpedBlock(block.engine_hash, parent, node.local, copies_of(block.counts)) for block in bound
            )
            if not bound:
                blocks.append(DumpedBlock(None, parent, node.local, ()))
        children = sorted(below.get(node, ()), key=lambda child: child.local, reverse=True)
        stack.extend((child, position) for child in children)
    orphans = tuple(
        DumpedOrphan(engine_hash, orphan.parent, orphan.local, copies_of(orphan.counts))
        for engine_hash, orphan in sorted(holdings.orphans.items())
    )
    windows = holdings.windows
    return replace(
        head,
        blocks=tuple(blocks),
        orphans=orphans,
        windows=tuple(sorted(windows.groups.values())) if windows is not None else (),
        window_blocks=windows.dump() if windows is not None else (),
    )


def check(dump: WorkerDump, block_size: int) -> Slices[None]:
    """Verifies that a dump can be loaded into an index with blocks of so many tokens.

    Raises:
        InvalidArgument: Naming the first entry that contradicts another.
    """
    numbers = [group for group, _ in dump.groups]
    for position in range(1, len(numbers)):
        if numbers[position - 1] >= numbers[position]:
            raise InvalidArgument("does not come after the one before it", field=f"groups.{position}")
    if len(numbers) > GROUP_LIMIT:
        raise InvalidArgument(f"more than {GROUP_LIMIT}", field="groups")
    full = {group for group, is_full in dump.groups if is_full}
    hashes: set[int] = set()
    for position, block in enumerate(dump.blocks):
        if position % SLICE == SLICE - 1:
            yield
        field = f"blocks.{position}"
        if not -1 <= block.parent < position:
            raise InvalidArgument("its parent does not come before it", field=field)
        if (block.engine_hash is None) != (not block.copies):
            raise InvalidArgument("a hole has copies, or a block has none", field=field)
        _check_entry(block, field, full, _NOT_FULL, hashes)
    for position, orphan in enumerate(dump.orphans):
        _check_entry(orphan, f"orphans.{position}", full, _NOT_FULL, hashes)
        if not orphan.copies:
            raise InvalidArgument("an orphan has no copies", field=f"orphans.{position}")
    bound = {block.engine_hash for block in dump.blocks}
    for position, orphan in enumerate(dump.orphans):
        if orphan.parent_engine_hash in bound:
            raise InvalidArgument("its parent is known", field=f"orphans.{position}")
    if len(dump.orphans) > ORPHAN_LIMIT:
        raise InvalidArgument(f"more than {ORPHAN_LIMIT}", field="orphans")
    yield from _check_windows(dump, block_size)
    if dump.incompatible and (dump.blocks or dump.orphans or dump.window_blocks):
        raise InvalidArgument("a worker that is not indexed has blocks", field="incompatible")


def _check_windows(dump: WorkerDump, block_size: int) -> Slices[None]:
    numbers = [group.number for group in dump.windows]
    for position in range(1, len(numbers)):
        if numbers[position - 1] >= numbers[position]:
            raise InvalidArgument("does not come after the one before it", field=f"windows.{position}")
    for position, group in enumerate(dump.windows):
        field = f"windows.{position}"
        if (group.number, False) not in dump.groups:
            raise InvalidArgument("is no group that is not full attention", field=field)
        if not group.window or not group.block_size:
            raise InvalidArgument("has no tokens", field=field)
    hashes: set[int] = set()
    for position, block in enumerate(dump.window_blocks):
        if position % SLICE == SLICE - 1:
            yield
        field = f"window_blocks.{position}"
        if not block.copies:
            raise InvalidArgument("has no copies", field=field)
        _check_entry(block, field, set(numbers), "has no window", hashes)
    windows = WindowGroups(block_size)
    for position, group in enumerate(dump.windows):
        if not windows.is_whole(group.block_size):
            raise InvalidArgument(f"its blocks are no multiple of {block_size} tokens", field=f"windows.{position}")


def _check_entry(
    entry: DumpedBlock | DumpedOrphan | DumpedWindowBlock, field: str, groups: set[int], otherwise: str, seen: set[int]
) -> None:
    engine_hash = entry.engine_hash
    if engine_hash is not None:
        if engine_hash in seen:
            raise InvalidArgument("its engine hash comes twice", field=field)
        seen.add(engine_hash)
    for group, _, number in entry.copies:
        if group not in groups:
            raise InvalidArgument(f"group {group} {otherwise}", field=field)
        if not 1 <= number <= MAX_COPIES:
            raise InvalidArgument(f"{number} copies", field=field)


def load_holdings(holdings: Holdings, dump: WorkerDump) -> Slices[None]:
    """Fills empty holdings from a dump that `check` accepted."""
    if holdings.windows is not None:
        for position, window_block in enumerate(reversed(dump.window_blocks)):
            if position % SLICE == SLICE - 1:
                yield
            holdings.windows.place(window_block.engine_hash, window_block.sequence_hash, counts_of(window_block.copies))
    nodes: list[Node] = []
    for position, block in enumerate(dump.blocks):
        if position % SLICE == SLICE - 1:
            yield
        parent = nodes[block.parent] if block.parent >= 0 else holdings.tree.root
        node = holdings.tree.child(parent, block.local_hash)
        nodes.append(node)
        # Until all is there: a hole is nobody's before something is below it.
        holdings.tree.acquire(node)
        if block.engine_hash is not None:
            holdings.restore(block.engine_hash, node, counts_of(block.copies))
            holdings.tree.touch(node)
    for position, node in enumerate(reversed(nodes)):
        if position % SLICE == SLICE - 1:
            yield
        holdings.tree.release(node)
    for position, orphan in enumerate(dump.orphans):
        if position % SLICE == SLICE - 1:
            yield
        holdings.restore_orphan(
            orphan.engine_hash,
            Orphan(orphan.parent_engine_hash, orphan.local_hash, counts_of(orphan.copies)),
        )


def check_holdings(tree: PrefixTree, visible: Sequence[Holdings], dropped: Sequence[Holdings]) -> None:
    """Verifies the invariants of `index` over the content of all workers.

    Raises:
        AssertionError: Naming the first violation.
    """
    refs: dict[Node, int] = {}
    for holdings in [*visible, *dropped]:
        for node in (
            *(block.node for block in holdings.blocks.values()),
            *holdings.demoted.values(),
            *holdings.predictions,
        ):
            refs[node] = refs.get(node, 0) + 1
    attached = set(tree.walk())
    assert len(attached) == tree.nodes, "nodes are counted"
    assert tree.held == sum(1 for node in attached if node.masks[3]), "held nodes are counted"
    assert refs.keys() <= attached, "every node in use is in the tree"
    for node in attached:
        assert node.refs == refs.get(node, 0), "references are counted"
        assert node.refs or node.children, "no node outlives its use"
        assert node.parent is not None
        assert node.used <= node.parent.used, "whoever uses a block uses its prefix"
    for holdings in visible:
        _check_worker(holdings, attached)
        if holdings.windows is not None:
            holdings.windows.check()
        names = {(name, node) for node, all_names in holdings.names.items() for name in all_names}
        bound = {(engine_hash, block.node) for engine_hash, block in holdings.blocks.items()}
        assert names == bound | holdings.demoted.items(), "nodes know their hashes"
        assert all(len(all_names) <= TWIN_LIMIT for all_names in holdings.names.values()), "twins are bounded"


def _check_worker(holdings: Holdings, attached: set[Node]) -> None:
    bit = holdings.bit
    kinds = (holdings.blocks, holdings.orphans, holdings.ghosts, holdings.demoted)
    known = [engine_hash for kind in kinds for engine_hash in kind]
    assert len(known) == len(set(known)), "an engine hash is known in one way"
    assert len(holdings.ghosts) <= len(holdings.gone) <= GHOST_LIMIT, "ghosts are bounded"
    assert len(holdings.orphans) <= ORPHAN_LIMIT, "orphans are bounded"
    levels: dict[Node, int] = {}
    device_copies = 0
    block_counts = [block.counts for block in holdings.blocks.values()]
    orphan_counts = [orphan.counts for orphan in holdings.orphans.values()]
    for counts in block_counts + orphan_counts:
        assert counts, "a known block has a copy"
        for (group, tier), number in counts.items():
            assert group in holdings.full_groups, "copies are in full-attention groups"
            assert 0 < number <= MAX_COPIES, "copies are in range"
            device_copies += number if tier is Tier.DEVICE else 0
    assert device_copies == holdings.device_copies, "device copies are counted"
    for block in holdings.blocks.values():
        level = level_of(block.counts, holdings.full_groups)
        assert level == block.level, "a block knows its level"
        levels[block.node] = min(level, levels.get(block.node, level))
        assert block in twins(holdings.nodes.get(block.node)), "a node knows its blocks"
    assert levels.keys() == holdings.nodes.keys(), "bound nodes are listed"
    for node in attached:
        assert node.level(bit) == levels.get(node, NOT_HELD), "masks follow the copies"
        predicted = bool(node.masks[4] & bit)
        assert predicted == (node in holdings.predictions), "predictions have their bit"
    assert holdings.held == sum(1 for node in levels if node.held_by(bit)), "held blocks are counted"
    waiting = {child: parent for parent, children in holdings.waiting.items() for child in children}
    assert waiting == {h: orphan.parent for h, orphan in holdings.orphans.items()}, "orphans wait"
    assert not waiting.values() & holdings.blocks.keys(), "no orphan's parent is bound"
