"""Random operations on block indexes beside the brute-force model: all must agree after every step.

A world is one sequence: a few worker ranks with their own habits (tiers, groups, colliding engine hashes, a
bound), and steps drawn from one random generator. Without a bound all implementations go through the same
steps side by side. What a bound drops is up to the implementation, so that a bounded world has only one; the
model has no bound then, and what the index has must be what the model has, or less. Engines of such a world name
each prefix by one hash, store nothing below what they do not hold, and move nothing that the model forgot: ghosts of
the bound live longer than what was demoted.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgpack

from kvscout_blocks.bytes.events import STATE_WINDOW, Cleared, Event, EventBatch, Removed, Stored, Tier
from kvscout_blocks.index.block_index import WINDOW_LIMIT, Applied, BlockIndex, WorkerOptions
from kvscout_common.hashing import block_hashes
from kvscout_common.worker import CopyMode, WorkerRank
from support.index_model import BLOCK_SIZE, IndexModel
from support.index_scenarios import IndexFactory, reload, settle

CONTENTS = 3
"""Different blocks: few, so that prompts share prefixes and engine hashes collide."""
DEPTH = 5
TOKENS = {content: (content,) * BLOCK_SIZE for content in range(1, CONTENTS + 1)}
LOCAL = {content: block_hashes(tokens, BLOCK_SIZE)[0] for content, tokens in TOKENS.items()}
MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK", Tier.EXTERNAL: "EXTERNAL"}
SLOW_CHECK_EVERY = 4
"""Steps between two verifications of all invariants, which take longer than all else."""

Contents = tuple[int, ...]


def draw_steps(rng: random.Random, mean: int) -> int:
    """Length of a sequence: most are short, some are five times the mean."""
    return 4 + min(round(rng.expovariate(1 / (mean - 4))), 5 * mean)


class World:
    """One random sequence."""

    def __init__(self, rng: random.Random, factories: Mapping[str, IndexFactory]) -> None:
        self.rng = rng
        self.max_blocks = rng.choice([8, 24]) if rng.random() < 0.15 else 0
        names = rng.sample(sorted(factories), 1) if self.max_blocks else sorted(factories)
        self.factories = {name: factories[name] for name in names}
        self.options: dict[WorkerRank, WorkerOptions] = {}
        self.now = 0.0
        self.steps = 0
        self.tiers = rng.random() < 0.5
        self.groups = rng.choice([1, 1, 2, 3])
        # Tokens of the windows of further groups; a block has 4.
        windows = rng.random() < 0.4 and not self.max_blocks
        self.windows = {3: rng.choice([4, 8]), 4: rng.choice([2, 5, 13]), 5: STATE_WINDOW} if windows else {}
        self.window_blocks = rng.choice([BLOCK_SIZE, BLOCK_SIZE, 2 * BLOCK_SIZE])
        self.alone = windows and rng.random() < 0.2
        """No worker has full attention."""
        self.window_limit = rng.choice([3, 6]) if self.alone and rng.random() < 0.5 else 0
        """What `max_blocks` bounds where all are in windows: what comes above is left out, and said to be."""
        self.indexes = self.fresh()
        self.model = IndexModel(self.window_limit or self.max_blocks or WINDOW_LIMIT)
        self.strange_hashes = rng.random() < 0.5 and not self.max_blocks
        self.was_full = False
        """The bound had something to drop."""
        self.payloads = rng.random() < 0.3
        self.ranks = [WorkerRank(f"w{n // 2}", n % 2) for n in range(rng.randint(2, 8))]
        for worker in self.ranks:
            self.add(worker)

    def fresh(self) -> dict[str, BlockIndex]:
        """Empty indexes."""
        most = self.max_blocks or self.window_limit
        return {name: make(BLOCK_SIZE, max_blocks=most) for name, make in self.factories.items()}

    @property
    def any_index(self) -> BlockIndex:
        """One of them, for what was compared already."""
        return next(iter(self.indexes.values()))

    def add(self, worker: WorkerRank) -> None:
        mode = CopyMode.SET if self.rng.random() < 0.2 else CopyMode.COUNT
        options = WorkerOptions(copies=mode, total_kv_blocks=self.rng.choice([0, 6]))
        self.options[worker] = options
        self.model.add(worker, mode)
        for index in self.indexes.values():
            index.add_worker(worker, options)

    # Events

    def prompt(self) -> Contents:
        return tuple(self.rng.choices(range(1, CONTENTS + 1), k=self.rng.randint(1, DEPTH)))

    def engine_hash(self, prefix: Contents) -> int:
        if self.strange_hashes and self.rng.random() < 0.3:
            return self.rng.randint(1, 12)
        return int("".join(map(str, prefix))) + 1000

    def event(self, worker: WorkerRank) -> Event:
        """An event with local hashes; the model reads no other form."""
        rng, prompt = self.rng, self.prompt()
        tier = rng.choice(list(Tier)) if self.tiers else Tier.DEVICE
        groups = [*([] if self.alone else range(self.groups)), *self.windows]
        group = rng.choice(groups)
        kind = rng.random()
        if kind < 0.02:
            return Cleared()
        start = rng.randrange(len(prompt))
        if self.max_blocks and local_hashes(prompt[:start]) not in self.model.prefixes(worker):
            start = 0
        hashes = tuple(self.engine_hash(prompt[: k + 1]) for k in range(start, len(prompt)))
        if kind < 0.35:
            return Removed(hashes if rng.random() < 0.3 else hashes[-1:], tier, group)
        # Group 2 is no full attention.
        stored = Stored(hashes, tier=tier, group=group, full_attention=group < 2)
        if group in self.windows:
            # The first one has larger blocks in some worlds, states have any, and all most often keep less than the
            # tokens tell.
            size = {3: self.window_blocks, 5: rng.choice([BLOCK_SIZE, BLOCK_SIZE, 1, 6])}.get(group, BLOCK_SIZE)
            stored = replace(stored, window=self.windows[group], block_size=size)
            if size != BLOCK_SIZE or kind < 0.7:
                return replace(stored, engine_hashes=hashes[1:] or hashes, tokens=(0,))
        if kind < 0.4 and not (self.max_blocks and self.model.forgot(worker, hashes)):
            return stored
        parent = self.engine_hash(prompt[:start]) if start else None
        return replace(stored, parent=parent, local_hashes=local_hashes(prompt[start:]))

    def apply(self, worker: WorkerRank) -> None:
        """One batch, as values or as the bytes of an engine."""
        rng = self.rng
        events = [self.event(worker) for _ in range(rng.choice([1, 1, 1, 3]))]
        events += events[:1] if rng.random() < 0.1 else []
        if self.max_blocks:
            events = events[:1]
        batch, payload = EventBatch(tuple(events)), b""
        if self.payloads:
            payload = packed(events)
        answers: list[Applied] = []
        for index in self.indexes.values():
            if self.payloads:
                answers.append(index.apply_payload(worker, payload, epoch=1, event_id=self.steps))
            else:
                answers.append(index.apply(worker, batch, epoch=1, event_id=self.steps))
        assert all(answer == answers[0] for answer in answers), f"apply: {answers}"
        self.model.apply(worker, events)
        self.was_full = self.was_full or self.any_index.stats().evicted > 0

    def check_bounded(self, worker: WorkerRank) -> None:
        """What a bounded index has is what the events say, or less."""
        index, truth = self.any_index, self.model.workers.get(worker)
        stats = index.stats()
        assert stats.ghosts <= self.max_blocks, "ghosts are bounded"
        dump = index.dump(worker)
        if dump is None or truth is None:
            assert dump is None and truth is None
            return
        assert len(dump.orphans) + sum(1 for block in dump.blocks if block.copies) <= self.max_blocks
        prefixes: list[Contents] = []
        for block in dump.blocks:
            above = prefixes[block.parent] if block.parent >= 0 else ()
            prefixes.append((*above, block.local_hash))
            if block.engine_hash is not None:
                assert truth.bound.get(block.engine_hash) == prefixes[-1], f"{block} is where events put it"
                told = truth.copies[block.engine_hash]
                assert all(told[at.group, at.tier] >= at.number for at in block.copies), f"{block} has no more copies"
        if not self.was_full:
            assert replace(dump, epoch=0, last_event_id=None) == self.model.dump(worker), "nothing goes below the bound"
        for _ in range(3):
            hashes = local_hashes(self.prompt())
            expected = self.model.find(hashes, len(hashes))
            for rank, row in index.find_matches(hashes, now=self.now).by_worker().items():
                most = expected.get(rank, (0,) * 5)
                assert all(low <= exact for low, exact in zip(row[:4], most[:4], strict=True)), f"find {hashes}: {row}"

    # Steps

    def step(self) -> None:
        """One random operation on everything, and the comparison."""
        rng, worker = self.rng, self.rng.choice(self.ranks)
        known = worker in self.model.workers
        kind = rng.random()
        self.steps += 1
        if kind < 0.86:
            self.apply(worker)
        elif kind < 0.88:
            for index in self.indexes.values():
                assert index.remove_rank(worker) == known
            self.model.workers.pop(worker, None)
        elif kind < 0.89:
            ranks = [other for other in self.model.workers if other.worker_id == worker.worker_id]
            for index in self.indexes.values():
                assert index.remove_worker(worker.worker_id) == len(ranks)
            for rank in ranks:
                del self.model.workers[rank]
        elif kind < 0.90:
            for index in self.indexes.values():
                index.reset(worker)
            self.model.reset(worker)
        elif kind < 0.93:
            self.add(worker)
        elif kind < 0.94:
            self.reload()
        elif kind < 0.96 and known:
            for index in self.indexes.values():
                index.demote(worker, ttl_seconds=3, now=self.now)
            self.model.demote(worker, self.now + 3)
        elif kind < 0.98 and known:
            hashes = local_hashes(self.prompt())
            for index in self.indexes.values():
                index.predict(worker, hashes, ttl_seconds=2, now=self.now)
            self.model.predict(worker, hashes, self.now + 2)
        else:
            self.now += 1
            for index in self.indexes.values():
                settle(index, self.now)
            self.model.tick(self.now)
        if self.max_blocks:
            self.check_bounded(worker)
            self.any_index.check_invariants()
        else:
            self.compare(worker)

    def reload(self) -> None:
        """Goes on with new indexes, each from the dumps of the next one."""
        fresh = self.fresh()
        sources = [*self.indexes.values()][1:] + [*self.indexes.values()][:1]
        for source, empty in zip(sources, fresh.values(), strict=True):
            reload(source, empty, self.options)
        self.indexes = fresh
        self.model.reload()

    def compare(self, worker: WorkerRank) -> None:
        """All indexes with one another and with the model: finds, the dump of one rank, stats, invariants."""
        for number in range(3):
            hashes = local_hashes(self.prompt())
            usable = len(hashes) - self.rng.randrange(2)
            expected = self.model.find(hashes, usable)
            for name, index in self.indexes.items():
                found = index.find_matches(hashes, now=self.now, usable=usable).by_worker()
                assert found == expected, f"find {hashes}, {usable}: {name} {found}, model {expected}"
                if number:
                    continue
                asked = struct.pack(f"<{len(hashes)}Q", *hashes)
                early = index.find_matches(asked, now=self.now, early_exit=True, usable=usable).by_worker()
                assert all(
                    low <= exact for rank in early for low, exact in zip(early[rank], expected[rank], strict=True)
                ), f"early_exit gives lower bounds: {name} {early}, model {expected}"
        incomplete = {rank for rank, w in self.model.workers.items() if w.incomplete}
        expected_dump = self.model.dump(worker) if worker in self.model.workers else None
        first = self.any_index
        for name, index in self.indexes.items():
            dump = index.dump(worker)
            shown = None if dump is None else replace(dump, epoch=0, last_event_id=None)
            assert shown == expected_dump, f"dump of {worker}: {name} {shown}, model {expected_dump}"
            assert index.cursor(worker) == first.cursor(worker)
            assert index.incomplete() == incomplete, f"limits kept out: {name} {index.incomplete()}, model {incomplete}"
            ours, theirs = index.worker_stats(worker), first.worker_stats(worker)
            assert ours == theirs, f"counters of {worker}: {name} {ours}, {theirs}"
            stats = index.stats()
            expected_counts = self.model.memberships(), self.model.hidden()
            assert (stats.memberships, stats.hidden) == expected_counts, f"{name} {stats}, model {expected_counts}"
            common = {"bytes": 0, "blocks": 0}
            assert replace(stats, **common) == replace(first.stats(), **common), f"{name} {stats}, {first.stats()}"
            if self.steps % SLOW_CHECK_EVERY == 0:
                index.check_invariants()

    def finish(self) -> None:
        """Once all that was dropped is freed, the number of blocks agrees, too."""
        prefixes = {prefix for w in self.model.workers.values() for prefix in w.held()}
        for name, index in self.indexes.items():
            settle(index, self.now)
            index.check_invariants()
            assert index.stats().blocks == len(prefixes) or self.was_full, name


def local_hashes(prompt: Sequence[int]) -> tuple[int, ...]:
    """Local hashes of a prompt's blocks."""
    return tuple(LOCAL[content] for content in prompt)


def packed(events: Sequence[Event]) -> bytes:
    """A batch in an engine's bytes; content goes as tokens."""
    contents = {local: content for content, local in LOCAL.items()}
    kinds = {True: "full_attention", False: "chunked_local_attention"}
    raw: list[object] = []
    for event in events:
        if isinstance(event, Cleared):
            raw.append(["AllBlocksCleared"])
        elif isinstance(event, Removed):
            raw.append(["BlockRemoved", event.engine_hashes, MEDIA[event.tier], event.group])
        else:
            tokens = [token for local in event.local_hashes for token in TOKENS[contents[local]]] or event.tokens
            size = event.block_size or BLOCK_SIZE
            fields = [event.engine_hashes, event.parent, tokens, size, None, MEDIA[event.tier], None, None]
            kind = "sliding_window" if event.window else kinds[event.full_attention]
            kind = "mamba" if event.window == STATE_WINDOW else kind
            raw.append(["BlockStored", *fields, event.group, kind, event.window or None])
    payload: bytes = msgpack.packb([0.0, raw])
    return payload


def run_world(seed: int, factories: Mapping[str, IndexFactory], *, mean_steps: int) -> int:
    """Runs the sequence of a seed.

    Returns:
        How many steps it had.

    Raises:
        AssertionError: Naming the seed and the step at which something differed.
    """
    rng = random.Random(seed)
    world = World(rng, factories)
    steps = draw_steps(rng, mean_steps)
    try:
        for _ in range(steps):
            world.step()
        world.finish()
    except Exception as error:
        raise AssertionError(
            f"KVSCOUT_TEST_SEED={seed} KVSCOUT_INDEX_SEQUENCES=1 KVSCOUT_INDEX_STEPS={mean_steps}, "
            f"step {world.steps}, bound {world.max_blocks},"
            f" {', '.join(world.indexes)}: {type(error).__name__}: {error}"
        ) from error
    return steps
