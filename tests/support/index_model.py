"""A brute-force model of the block index: the definitions, without any structure that could be wrong.

It knows a prefix as a tuple of local hashes, and what is held by looking at every block of every worker.
Only for small worlds, without a bound; the limits of ghosts and orphans are not modelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import ceil

from kvscout_blocks.bytes.dump import (
    Copies,
    DumpedBlock,
    DumpedOrphan,
    DumpedWindowBlock,
    WindowGroup,
    WorkerDump,
)
from kvscout_blocks.bytes.events import STATE_WINDOW, Cleared, Event, Removed, Stored, Tier
from kvscout_blocks.index.block_index import Overlap
from kvscout_common.hashing import sequence_hashes
from kvscout_common.worker import CopyMode, WorkerRank

BLOCK_SIZE = 4

Prefix = tuple[int, ...]


@dataclass
class ModelWorker:
    """What events said of one worker."""

    mode: CopyMode = CopyMode.COUNT
    groups: dict[int, bool] = field(default_factory=dict)
    copies: dict[int, Counter[tuple[int, Tier]]] = field(default_factory=dict)
    """Engine hash → copies, of bound hashes and orphans."""
    bound: dict[int, Prefix] = field(default_factory=dict)
    orphans: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Engine hash → parent's engine hash, local hash."""
    gone: dict[int, tuple[int | None, int]] = field(default_factory=dict)
    """Removed lately: engine hash of the block above, None for the root, and the local hash."""
    names: dict[Prefix, list[int]] = field(default_factory=dict)
    """What bound and demoted blocks are called, in the order of their binding."""
    names_gone: dict[Prefix, int] = field(default_factory=dict)
    """What blocks were called that the event in hand removed."""
    demoted: dict[int, Prefix] = field(default_factory=dict)
    demoted_until: float = 0.0
    windows: dict[int, WindowGroup] = field(default_factory=dict)
    """Groups with a sliding window."""
    window_copies: dict[int, Counter[tuple[int, Tier]]] = field(default_factory=dict)
    """Engine hash → copies in them."""
    window_prefixes: dict[int, Prefix] = field(default_factory=dict)
    """Of those but what the batch stored that is being applied."""
    predicted: dict[Prefix, float] = field(default_factory=dict)
    incomplete: bool = False
    """A limit kept something out."""
    _held: dict[Prefix, Tier] | None = None

    def known(self, engine_hash: int) -> Prefix | None:
        return self.bound.get(engine_hash, self.demoted.get(engine_hash))

    def changed(self) -> None:
        """Must follow whatever changes `bound`, `copies` or `groups`."""
        self._held = None

    def held(self) -> dict[Prefix, Tier]:
        """The held prefixes, and the slowest tier one must count to find each held.

        One of its engine hashes must be on that tier or a faster one in every full-attention group.
        """
        if self._held is None:
            self._held = {}
            full = [group for group, is_full in self.groups.items() if is_full]
            for h, prefix in self.bound.items():
                counts = self.copies[h]
                at = [min((t for (g, t), n in counts.items() if n and g == group), default=None) for group in full]
                if None not in at:
                    slowest = max((tier for tier in at if tier is not None), default=Tier.DEVICE)
                    self._held[prefix] = min(slowest, self._held.get(prefix, Tier.EXTERNAL))
        return self._held

    def holds(self, prefix: Prefix, tier: Tier) -> bool:
        """Whether a prefix is held on a tier or a faster one."""
        return self.held().get(prefix, len(Tier)) <= tier

    def serves(self, prefix: Prefix, tier: Tier) -> bool:
        """Whether all groups with a window serve a prefix from a tier or a faster one."""
        return all(self._serves(group, prefix, tier) for group in self.windows.values())

    def _serves(self, group: WindowGroup, prefix: Prefix, tier: Tier) -> bool:
        blocks, rest = divmod(len(prefix) * BLOCK_SIZE, group.block_size)
        needed = range(max(0, blocks - max(1, ceil((group.window - 1) / group.block_size))), blocks)
        held = {
            self.window_prefixes[h]
            for h, counts in self.window_copies.items()
            if any(n and g == group.number and t <= tier for (g, t), n in counts.items())
        }
        return not rest and all(prefix[: (n + 1) * group.block_size // BLOCK_SIZE] in held for n in needed)

    def longest(self, prefixes: Sequence[Prefix], most: int, usable: int, tier: Tier) -> int:
        """The longest prefix of at most `most` blocks that all groups with a window serve."""
        served = [k for k in range(most + 1) if not k or self.serves(prefixes[k - 1], tier)]
        below = max(k for k in served if k <= usable)
        return below if below < usable else served[-1]

    def rooted(self) -> set[Prefix]:
        """The held prefixes whose ancestors are held too: what a query can match."""
        held = self.held()
        return {p for p in held if all(p[:k] in held for k in range(1, len(p)))}

    def add(self, engine_hash: int, group: int, tier: Tier) -> None:
        self.add_to(self.copies.setdefault(engine_hash, Counter()), group, tier)

    def add_to(self, counts: Counter[tuple[int, Tier]], group: int, tier: Tier) -> None:
        if self.mode is CopyMode.COUNT or not counts[group, tier]:
            counts[group, tier] += 1

    def unname(self, engine_hash: int, prefix: Prefix) -> None:
        self.names[prefix].remove(engine_hash)
        if not self.names[prefix]:
            del self.names[prefix]

    def forget(self, engine_hash: int) -> None:
        """No ghost, and not demoted any more."""
        self.gone.pop(engine_hash, None)
        if engine_hash in self.demoted:
            self.unname(engine_hash, self.demoted.pop(engine_hash))

    def bury(self, engine_hash: int, prefix: Prefix) -> None:
        """A ghost, if what is above it has a name, or had one before this event."""
        above, local = prefix[:-1], prefix[-1]
        self.unname(engine_hash, prefix)
        if prefix not in self.names:
            self.names_gone[prefix] = engine_hash
        if not above:
            self.gone[engine_hash] = None, local
        elif above in self.names or above in self.names_gone:
            self.gone[engine_hash] = self.names.get(above, [self.names_gone.get(above, 0)])[0], local

    def bind(self, engine_hash: int, prefix: Prefix) -> None:
        if self.demoted.get(engine_hash) == prefix:
            del self.demoted[engine_hash]
        else:
            self.forget(engine_hash)
        names = self.names.setdefault(prefix, [])
        if engine_hash not in names:
            names.append(engine_hash)
        self.bound[engine_hash] = prefix
        for child, (parent, local) in list(self.orphans.items()):
            if parent == engine_hash and child in self.orphans:
                del self.orphans[child]
                self.bind(child, (*prefix, local))


class IndexModel:
    """All workers of one index.

    Args:
        most_window_blocks: Of one worker, in groups with a window.
    """

    def __init__(self, most_window_blocks: int) -> None:
        self.workers: dict[WorkerRank, ModelWorker] = {}
        self._most_window_blocks = most_window_blocks

    def add(self, worker: WorkerRank, mode: CopyMode) -> None:
        """Adds a worker, or changes the mode of a known one."""
        self.workers.setdefault(worker, ModelWorker()).mode = mode

    def reset(self, worker: WorkerRank) -> None:
        """Forgets all that events said; an unknown worker is ignored."""
        if worker in self.workers:
            self.workers[worker] = ModelWorker(mode=self.workers[worker].mode)

    def reload(self) -> None:
        """What is no part of a dump is lost."""
        for w in self.workers.values():
            w.gone, w.demoted, w.predicted, w.names = {}, {}, {}, {}
            for h in sorted(w.bound):
                w.names.setdefault(w.bound[h], []).append(h)

    def prefixes(self, worker: WorkerRank) -> set[Prefix]:
        """What a worker has any copy of."""
        return set(self.workers[worker].bound.values()) if worker in self.workers else set()

    def forgot(self, worker: WorkerRank, engine_hashes: Sequence[int]) -> bool:
        """Whether it has no copy of some of a worker's blocks."""
        bound = self.workers[worker].bound if worker in self.workers else {}
        return any(engine_hash not in bound for engine_hash in engine_hashes)

    def apply(self, worker: WorkerRank, events: Sequence[Event]) -> None:
        """Applies one batch."""
        if worker in self.workers:
            for event in events:
                self._apply(worker, event)
            self._settle(self.workers[worker], events)

    def _settle(self, w: ModelWorker, events: Sequence[Event]) -> None:
        """Finds the prefixes of what a batch stored in groups with a window; what has none is dropped."""
        new = [h for h in w.window_copies if h not in w.window_prefixes]
        told = {h: w.bound[h] for h in new if h in w.bound}
        if len(told) < len(new):
            for event in events:
                if isinstance(event, Stored) and event.group in w.windows and event.local_hashes:
                    self._tell(w, event, told)
        for h in new:
            if h in told:
                w.window_prefixes[h] = told[h]
            else:
                del w.window_copies[h]

    def _tell(self, w: ModelWorker, event: Stored, told: dict[int, Prefix]) -> None:
        above: Prefix = ()
        if event.parent is not None:
            places = (told, w.window_prefixes, w.bound)
            known = next((place[event.parent] for place in places if event.parent in place), None)
            if known is None:
                return
            above = known
        for h, local in zip(event.engine_hashes, event.local_hashes, strict=True):
            above = (*above, local)
            told.setdefault(h, above)

    def _apply(self, worker: WorkerRank, event: Event) -> None:
        w = self.workers[worker]
        w.changed()
        if isinstance(event, Cleared):
            self.workers[worker] = ModelWorker(mode=w.mode, groups=w.groups, windows=w.windows)
        elif isinstance(event, Removed):
            for h in event.engine_hashes:
                self._remove(w, h, event)
            w.names_gone.clear()
        elif w.groups.setdefault(event.group, event.full_attention):
            if event.local_hashes:
                self._store(w, event)
            else:
                self._move(w, event)
        elif event.group in w.windows or (event.window and event.block_size):
            block_size = BLOCK_SIZE if event.window == STATE_WINDOW else event.block_size
            w.windows.setdefault(event.group, WindowGroup(event.group, event.window, block_size))
            for h in event.engine_hashes:
                if h in w.window_copies or len(w.window_copies) < self._most_window_blocks:
                    w.add_to(w.window_copies.setdefault(h, Counter()), event.group, event.tier)
                else:
                    w.incomplete = True

    def _remove(self, w: ModelWorker, h: int, event: Removed) -> None:
        if event.group in w.windows and w.window_copies.get(h, Counter())[event.group, event.tier]:
            w.window_copies[h][event.group, event.tier] -= 1
            if not +w.window_copies[h]:
                del w.window_copies[h]
                w.window_prefixes.pop(h, None)
        if w.groups.get(event.group) is False:
            return
        prefix = w.known(h)
        if prefix is not None:
            w.predicted.pop(prefix, None)
        counts = w.copies.get(h, Counter())
        if not counts[event.group, event.tier]:
            if h in w.demoted:
                w.bury(h, w.demoted.pop(h))
            return
        counts[event.group, event.tier] -= 1
        if not +counts:
            del w.copies[h]
            w.orphans.pop(h, None)
            if h in w.bound:
                w.bury(h, w.bound.pop(h))

    def _move(self, w: ModelWorker, event: Stored) -> None:
        for h in event.engine_hashes:
            if h in w.gone:
                parent, local = w.gone.pop(h)
                self._store(w, replace(event, engine_hashes=(h,), parent=parent, local_hashes=(local,)))
                continue
            prefix = w.known(h)
            if prefix is None and h not in w.orphans:
                continue
            w.add(h, event.group, event.tier)
            if prefix is not None:
                w.bind(h, prefix)
                w.predicted.pop(prefix, None)

    def _store(self, w: ModelWorker, event: Stored) -> None:
        above: Prefix | None = () if event.parent is None else w.known(event.parent)
        parent = event.parent
        for h, local in zip(event.engine_hashes, event.local_hashes, strict=True):
            if above is None:
                assert parent is not None
                if h in w.bound or w.orphans.get(h, (parent, local)) != (parent, local):
                    return
                w.forget(h)
                w.orphans[h] = (parent, local)
                w.add(h, event.group, event.tier)
                parent = h
                continue
            above = (*above, local)
            if h not in w.orphans and w.bound.get(h, above) == above:
                w.add(h, event.group, event.tier)
                w.bind(h, above)
                w.predicted.pop(above, None)

    def demote(self, worker: WorkerRank, until: float) -> None:
        w = self.workers[worker]
        on_device = [prefix for prefix, tier in w.held().items() if tier is Tier.DEVICE]
        w.changed()
        w.demoted |= w.bound
        w.bound, w.orphans, w.copies = {}, {}, {}
        w.window_copies, w.window_prefixes = {}, {}
        w.demoted_until = max(w.demoted_until, until)
        for prefix in on_device:
            w.predicted[prefix] = max(until, w.predicted.get(prefix, 0.0))

    def predict(self, worker: WorkerRank, hashes: Sequence[int], until: float) -> None:
        w = self.workers[worker]
        for k in range(1, len(hashes) + 1):
            prefix = tuple(hashes[:k])
            if not w.holds(prefix, Tier.DEVICE):
                w.predicted[prefix] = max(until, w.predicted.get(prefix, 0.0))

    def tick(self, now: float) -> None:
        for w in self.workers.values():
            w.predicted = {prefix: until for prefix, until in w.predicted.items() if until > now}
            if now >= w.demoted_until:
                for h in list(w.demoted):
                    w.forget(h)

    def find(self, hashes: Sequence[int], usable: int) -> dict[WorkerRank, Overlap]:
        found = {}
        prefixes = [tuple(hashes[:k]) for k in range(1, len(hashes) + 1)]
        for worker, w in self.workers.items():
            held = w.held()
            reach = [held.get(prefix, len(Tier)) for prefix in prefixes]
            runs = [_run(tier <= at for tier in reach) for at in Tier]
            on_device = zip(reach, prefixes, strict=True)
            runs.append(_run(tier == Tier.DEVICE or prefix in w.predicted for tier, prefix in on_device))
            if w.windows:
                predicted = runs.pop() if runs[-1] > runs[0] else runs.pop() * 0
                most = runs if any(w.groups.values()) else [len(hashes)] * len(Tier)
                runs = [w.longest(prefixes, k, usable, tier) for tier, k in zip(Tier, most, strict=True)]
                runs.append(max(predicted, runs[0]))
            if any(runs):
                found[worker] = Overlap(*runs)
        return found

    def dump(self, worker: WorkerRank) -> WorkerDump:
        """Equal to the index's dump, but for the cursor."""
        w = self.workers[worker]
        prefixes = sorted({p[:k] for p in w.bound.values() for k in range(1, len(p) + 1)})
        blocks: list[DumpedBlock] = []
        first: dict[Prefix, int] = {(): -1}
        for prefix in prefixes:
            first[prefix] = len(blocks)
            parent = first[prefix[:-1]]
            hashes = sorted(h for h, at in w.bound.items() if at == prefix)
            for h in hashes:
                blocks.append(DumpedBlock(h, parent, prefix[-1], _copies(w.copies[h])))
            if not hashes:
                blocks.append(DumpedBlock(None, parent, prefix[-1], ()))
        orphans = tuple(
            DumpedOrphan(h, parent, local, _copies(w.copies[h])) for h, (parent, local) in sorted(w.orphans.items())
        )
        windows = tuple(
            DumpedWindowBlock(h, sequence_hashes(w.window_prefixes[h])[-1], _copies(counts))
            for h, counts in sorted(w.window_copies.items())
        )
        return WorkerDump(
            worker,
            groups=tuple(sorted(w.groups.items())),
            blocks=tuple(blocks),
            orphans=orphans,
            windows=tuple(sorted(w.windows.values())),
            window_blocks=windows,
            incomplete=w.incomplete,
        )

    def memberships(self) -> int:
        return sum(len(w.held()) for w in self.workers.values())

    def hidden(self) -> int:
        return sum(len(w.held()) - len(w.rooted()) for w in self.workers.values())


def _run(held: Iterable[bool]) -> int:
    """Length of the leading run of True."""
    return sum(1 for _ in takewhile(bool, held))


def _copies(counts: Counter[tuple[int, Tier]]) -> tuple[Copies, ...]:
    return tuple(Copies(group, tier, n) for (group, tier), n in sorted(counts.items()) if n)
