"""What events do to a worker of the reference index: judged in the order of `Ignored`, then stored or removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvscout_blocks.bytes.acceptance import Ignored, judge_content, local_hashes_of
from kvscout_blocks.bytes.events import EventBatch, Removed, Stored
from kvscout_blocks.index.block_index import GROUP_LIMIT, WorkerOptions
from kvscout_blocks.index.holdings import Holdings
from kvscout_blocks.index.predictions import Predictions
from kvscout_blocks.index.prefix_tree import PrefixTree, sequence_hasher
from kvscout_blocks.index.windows import Chain, WindowGroups


class KnownWorker:
    """What the index knows of a worker rank, around the content of its slot."""

    def __init__(self, options: WorkerOptions, holdings: Holdings) -> None:
        self.options = options
        self.holdings = holdings
        self.epoch = 0
        self.last_event_id: int | None = None
        self.content = object()
        """Another one after each reset and load: what was begun for one content is not for the next."""
        self.groups: dict[int, bool] = {}
        """Known cache groups, and whether each is full attention."""
        self.incompatible = ""
        self.ignored: Counter[Ignored] = Counter()

    def ignore(self, reason: Ignored, number: int = 1) -> None:
        """Counts what was not indexed."""
        if number:
            self.ignored[reason] += number
            self.holdings.incomplete |= reason.is_limit

    @property
    def over_capacity(self) -> bool:
        """Whether there are more device copies than the device has room for."""
        return 0 < self.options.total_kv_blocks < self.holdings.device_copies

    def learn_group(self, group: int, full_attention: bool) -> bool:
        """Notes a group's kind the first time it is told; whether the group is full attention."""
        known = self.groups.get(group)
        if known is not None or len(self.groups) >= GROUP_LIMIT:
            return bool(known)
        self.groups[group] = full_attention
        if full_attention:
            self.holdings.set_full_groups(self.full_groups)
        return full_attention

    @property
    def full_groups(self) -> tuple[int, ...]:
        """The groups that must all have a block for it to be held."""
        return tuple(sorted(group for group, full in self.groups.items() if full))


def _rooted(holdings: Holdings, event: Stored) -> Stored:
    """An event in which a parent 0 is none, since some engines have no other word for it.

    A worker's is if it never began a prompt without a parent, and never had a block 0.
    """
    if event.parent != 0 or holdings.zero_is_block or 0 in holdings.blocks or 0 in holdings.orphans:
        return event
    return replace(event, parent=None)


class Ingest:
    """Changes the holdings of workers as events tell.

    Args:
        block_size: Tokens of a block.
        eagle: Blocks are EAGLE windows.
        most_window_blocks: Of one worker, in groups with a sliding window.
        tree: Of all workers.
        predictions: Of all workers.
    """

    def __init__(
        self, block_size: int, eagle: bool, most_window_blocks: int, tree: PrefixTree, predictions: Predictions
    ) -> None:
        self._block_size = block_size
        self._eagle = eagle
        self._most_window_blocks = most_window_blocks
        self._tree = tree
        self._predictions = predictions

    def stored(self, known: KnownWorker, event: Stored) -> bool:
        """Judges one Stored event, in the order of `Ignored`, and stores what is left of it.

        Returns:
            False if it shows that the worker is incompatible: what is held of it is to go.
        """
        holdings = known.holdings
        if 0 in event.engine_hashes or (event.parent is None and (event.tokens or event.local_hashes)):
            holdings.zero_is_block = True
        event = _rooted(holdings, event)
        if not known.learn_group(event.group, event.full_attention):
            self._window_stored(known, event)
        elif not event.tokens and not event.local_hashes:
            self._moved(known, event)
        else:
            adapters = known.options.adapters
            verdict = judge_content(event, self._block_size, self._eagle, adapters)
            if verdict is None:
                self._store_chain(known, event, local_hashes_of(event, self._block_size, self._eagle, adapters))
                return True
            known.ignore(verdict)
            if verdict is Ignored.BLOCK_SIZE:
                known.incompatible = (
                    f"the engine's blocks have {event.block_size} tokens, the registration says {self._block_size}"
                )
        return not known.incompatible

    def _window_stored(self, known: KnownWorker, event: Stored) -> None:
        """Stores an event of a group that is not full attention, if it has a window."""
        holdings = known.holdings
        windows = WindowGroups(self._block_size) if holdings.windows is None else holdings.windows
        if known.groups.get(event.group) is not False or not windows.learn(event):
            known.ignore(Ignored.SKIPPED_GROUP)
            return
        holdings.windows = windows
        refused = windows.store(event, known.options.copies, self._most_window_blocks)
        known.ignore(Ignored.WINDOW_LIMIT, refused)

    def settle_windows(self, known: KnownWorker, batch: EventBatch) -> None:
        """Finds the prefixes of what a batch stored in groups with a window."""
        windows = known.holdings.windows
        if windows is None:
            return
        blocks, sequence_hashes = known.holdings.blocks, sequence_hasher()

        def sequence_hash_of(engine_hash: int) -> int | None:
            block = blocks.get(engine_hash)
            return sequence_hashes(block.node) if block is not None else None

        rules = self._block_size, self._eagle, known.options.adapters
        groups = windows.groups

        def chains() -> Iterator[Chain]:
            for event in batch.events:
                if not isinstance(event, Stored) or event.group not in groups:
                    continue
                event = _rooted(known.holdings, event)
                if (event.tokens or event.local_hashes) and judge_content(event, *rules) is None:
                    yield event.parent, event.engine_hashes, local_hashes_of(event, *rules)

        unknown = windows.settle(sequence_hash_of, chains)
        known.ignore(Ignored.UNKNOWN_MOVED, unknown)

    def _store_chain(self, known: KnownWorker, event: Stored, local_hashes: Sequence[int]) -> None:
        """Stores an event's blocks below their parent, or as orphans if it is unknown."""
        holdings = known.holdings
        if event.parent is not None:
            holdings.restore_evicted(event.parent)
        for engine_hash in event.engine_hashes:
            holdings.restore_evicted(engine_hash)
        above = self._tree.root if event.parent is None else holdings.prefix_of(event.parent)
        if above is None:
            self._store_orphans(known, event, local_hashes)
            return
        at, mode = (event.group, event.tier), known.options.copies
        refused_before = holdings.refused_twins
        for engine_hash, local in zip(event.engine_hashes, local_hashes, strict=True):
            above = self._tree.child(above, local)
            refused = holdings.refused_twins
            if holdings.store(engine_hash, above, at, mode):
                self._predictions.cancel(holdings, above)
            elif holdings.refused_twins == refused:
                known.ignore(Ignored.HASH_CONFLICT)
        known.ignore(Ignored.TWIN_LIMIT, holdings.refused_twins - refused_before)
        self._tree.touch(above)
        self._tree.prune(above)

    def _store_orphans(self, known: KnownWorker, event: Stored, local_hashes: Sequence[int]) -> None:
        holdings = known.holdings
        at, mode = (event.group, event.tier), known.options.copies
        parent = event.parent
        assert parent is not None
        for position, (engine_hash, local) in enumerate(zip(event.engine_hashes, local_hashes, strict=True)):
            rest = len(local_hashes) - position
            if not holdings.can_wait(engine_hash):
                known.ignore(Ignored.ORPHAN_LIMIT, rest)
                return
            if not holdings.store_orphan(engine_hash, parent, local, at, mode):
                # What follows hangs below a block that this event contradicts.
                known.ignore(Ignored.HASH_CONFLICT, rest)
                return
            parent = engine_hash

    def _moved(self, known: KnownWorker, event: Stored) -> None:
        holdings = known.holdings
        for engine_hash in event.engine_hashes:
            holdings.restore_evicted(engine_hash)
            ghost = holdings.ghosts.get(engine_hash)
            if ghost is not None:
                holdings.forget(engine_hash)
                back = replace(event, engine_hashes=(engine_hash,), parent=ghost.parent)
                self._store_chain(known, back, (ghost.local,))
            elif not holdings.move(engine_hash, (event.group, event.tier), known.options.copies):
                known.ignore(Ignored.UNKNOWN_MOVED)
            elif holdings.predictions:
                self._cancel_prediction(holdings, engine_hash)

    def removed(self, known: KnownWorker, event: Removed) -> None:
        """Drops the copies that a Removed event names."""
        holdings = known.holdings
        if known.groups.get(event.group) is False:
            if holdings.windows is None or event.group not in holdings.windows.groups:
                known.ignore(Ignored.SKIPPED_GROUP)
            elif unknown := holdings.windows.remove(event):
                known.ignore(Ignored.UNKNOWN_REMOVED, unknown)
            return
        for engine_hash in event.engine_hashes:
            if holdings.predictions:
                self._cancel_prediction(holdings, engine_hash)
            if not holdings.remove(engine_hash, (event.group, event.tier)) and not holdings.retire_demoted(engine_hash):
                known.ignore(Ignored.UNKNOWN_REMOVED)
        holdings.names_gone.clear()

    def _cancel_prediction(self, holdings: Holdings, engine_hash: int) -> None:
        node = holdings.prefix_of(engine_hash)
        if node is not None:
            self._predictions.cancel(holdings, node)
