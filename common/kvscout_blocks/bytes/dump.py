"""A worker rank's blocks as plain values: the form in which an index gives its state away and takes it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvscout_blocks.bytes.events import Tier
from kvscout_common.worker import WorkerRank


class Copies(NamedTuple):
    """Physical copies of one block in one cache group on one tier."""

    group: int
    tier: Tier
    number: int


class DumpedBlock(NamedTuple):
    """One block of a dump: an engine hash bound to a prefix, or a hole above one."""

    engine_hash: int | None
    """None: a hole, not held, listed because a block below it is."""
    parent: int
    """Position of the parent's first entry in the list; -1: the block begins a prompt."""
    local_hash: int
    copies: tuple[Copies, ...]
    """Sorted; empty for a hole."""


class DumpedOrphan(NamedTuple):
    """One orphan of a dump."""

    engine_hash: int
    parent_engine_hash: int
    local_hash: int
    copies: tuple[Copies, ...]


class WindowGroup(NamedTuple):
    """A cache group with a sliding window."""

    number: int
    window: int
    """Tokens that a token sees."""
    block_size: int
    """Tokens a block, a multiple of the index's own."""


class DumpedWindowBlock(NamedTuple):
    """One block in the groups with a sliding window."""

    engine_hash: int
    sequence_hash: int
    """Sequence hash of the prefix that ends with it."""
    copies: tuple[Copies, ...]
    """Sorted; not empty."""


@dataclass(frozen=True, slots=True)
class WorkerDump:
    """One consistent cut of a worker rank's state: the same state gives an equal dump, in any backend.

    `blocks` is in depth-first order from the root, parents before children, siblings by local hash, the
    engine hashes of one prefix in ascending order; the parent of a block is the first entry of its prefix.
    Predictions and ghosts are not part of it.
    """

    worker: WorkerRank
    epoch: int = 0
    """Incarnation of the engine that the cursor belongs to; 0: the source has none."""
    last_event_id: int | None = None
    """Last event applied; None: none yet."""
    groups: tuple[tuple[int, bool], ...] = ()
    """Known cache groups, sorted, and whether each is full attention."""
    blocks: tuple[DumpedBlock, ...] = ()
    orphans: tuple[DumpedOrphan, ...] = ()
    """Sorted by engine hash."""
    incompatible: str = ""
    """Reason for not indexing the worker, which then has no blocks; "" = it is indexed."""
    windows: tuple[WindowGroup, ...] = ()
    """Groups with a sliding window, sorted."""
    window_blocks: tuple[DumpedWindowBlock, ...] = ()
    """Blocks of these groups, sorted by engine hash."""
    incomplete: bool = False
    """A limit of the index kept some of the worker's blocks out; in messages it is `history_incomplete`."""
