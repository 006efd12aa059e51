"""A brute-force model of the block index: the definitions, without any structure that could be wrong.

It knows a prefix as a tuple of local hashes and answers each query by looking at every block of every
worker. Only for small worlds: bounds are not modelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvscout_common.worker import CopyMode, WorkerRank
from kvscout_indexer.events import Cleared, Event, Removed, Stored, Tier
from kvscout_indexer.index import Copies, DumpedBlock, DumpedOrphan, Overlap, WorkerDump

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
    gone: dict[int, Prefix] = field(default_factory=dict)
    """Removed lately: no copies, but the prefix is known."""
    demoted: dict[int, Prefix] = field(default_factory=dict)
    demoted_until: float = 0.0
    predicted: dict[Prefix, float] = field(default_factory=dict)

    def known(self, engine_hash: int) -> Prefix | None:
        for place in (self.bound, self.gone, self.demoted):
            if engine_hash in place:
                return place[engine_hash]
        return None

    def holds(self, prefix: Prefix, tier: Tier) -> bool:
        """Whether one of the prefix's engine hashes is there or faster, in every full-attention group."""
        full = [group for group, is_full in self.groups.items() if is_full]
        return any(
            at == prefix and all(any(self.copies[h][group, t] for t in Tier if t <= tier) for group in full)
            for h, at in self.bound.items()
        )

    def add(self, engine_hash: int, group: int, tier: Tier) -> None:
        counts = self.copies.setdefault(engine_hash, Counter())
        if self.mode is CopyMode.COUNT or not counts[group, tier]:
            counts[group, tier] += 1

    def bind(self, engine_hash: int, prefix: Prefix) -> None:
        self.gone.pop(engine_hash, None)
        self.demoted.pop(engine_hash, None)
        self.bound[engine_hash] = prefix
        for child, (parent, local) in list(self.orphans.items()):
            if parent == engine_hash and child in self.orphans:
                del self.orphans[child]
                self.bind(child, (*prefix, local))


class IndexModel:
    """All workers of one index."""

    def __init__(self) -> None:
        self.workers: dict[WorkerRank, ModelWorker] = {}

    def apply(self, worker: WorkerRank, event: Event) -> None:
        if worker not in self.workers:
            return
        w = self.workers[worker]
        if isinstance(event, Cleared):
            self.workers[worker] = ModelWorker(mode=w.mode, groups=w.groups)
        elif isinstance(event, Removed):
            for h in event.engine_hashes:
                self._remove(w, h, event)
        elif w.groups.setdefault(event.group, event.full_attention):
            if event.local_hashes:
                self._store(w, event)
            else:
                self._move(w, event)

    def _remove(self, w: ModelWorker, h: int, event: Removed) -> None:
        if w.groups.get(event.group) is False:
            return
        prefix = w.known(h)
        if prefix is not None:
            w.predicted.pop(prefix, None)
        counts = w.copies.get(h, Counter())
        if not counts[event.group, event.tier]:
            if h in w.demoted:
                w.gone[h] = w.demoted.pop(h)
            return
        counts[event.group, event.tier] -= 1
        if not +counts:
            del w.copies[h]
            w.orphans.pop(h, None)
            if h in w.bound:
                w.gone[h] = w.bound.pop(h)

    def _move(self, w: ModelWorker, event: Stored) -> None:
        for h in event.engine_hashes:
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
                w.gone.pop(h, None)
                w.demoted.pop(h, None)
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
        on_device = {p for p in w.bound.values() if w.holds(p, Tier.DEVICE)}
        w.demoted |= w.bound
        w.bound, w.orphans, w.copies = {}, {}, {}
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
                w.demoted = {}

    def find(self, hashes: Sequence[int]) -> dict[WorkerRank, Overlap]:
        found = {}
        for worker, w in self.workers.items():
            prefixes = [tuple(hashes[:k]) for k in range(1, len(hashes) + 1)]
            runs = []
            for tier in Tier:
                runs.append(_run([w.holds(p, tier) for p in prefixes]))
            runs.append(_run([w.holds(p, Tier.DEVICE) or p in w.predicted for p in prefixes]))
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
        return WorkerDump(worker, groups=tuple(sorted(w.groups.items())), blocks=tuple(blocks), orphans=orphans)

    def memberships(self) -> int:
        return sum(len({p for p in w.bound.values() if w.holds(p, Tier.EXTERNAL)}) for w in self.workers.values())

    def hidden(self) -> int:
        count = 0
        for w in self.workers.values():
            held = {p for p in w.bound.values() if w.holds(p, Tier.EXTERNAL)}
            count += sum(1 for p in held if any(p[:k] not in held for k in range(1, len(p))))
        return count


def _run(held: list[bool]) -> int:
    return held.index(False) if False in held else len(held)


def _copies(counts: Counter[tuple[int, Tier]]) -> tuple[Copies, ...]:
    return tuple(Copies(group, tier, n) for (group, tier), n in sorted(counts.items()) if n)
