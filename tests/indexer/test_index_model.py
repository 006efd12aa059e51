"""Random operations: every implementation equals the brute-force model after every step.

`KVSCOUT_INDEX_SEQUENCES` sets how many sequences run, `KVSCOUT_INDEX_SEED` reruns one (its number is in
the failure's message).
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

from index_model import IndexModel, ModelWorker
from index_scenarios import IndexFactory, reload, settle

from kvscout_common.worker import CopyMode, WorkerRank
from kvscout_indexer.events import Cleared, Event, EventBatch, Removed, Stored, Tier
from kvscout_indexer.index import BlockIndex, WorkerOptions

SEQUENCES = int(os.environ.get("KVSCOUT_INDEX_SEQUENCES", "150"))
ONE_SEED = os.environ.get("KVSCOUT_INDEX_SEED")
STEPS = 40
CONTENTS = 3
DEPTH = 5


class World:
    """One random sequence, over an index and the model."""

    def __init__(self, rng: random.Random, factory: IndexFactory) -> None:
        self.rng = rng
        self.factory = factory
        self.index: BlockIndex = factory(4)
        self.model = IndexModel()
        self.options: dict[WorkerRank, WorkerOptions] = {}
        self.now = 0.0
        self.tiers = rng.random() < 0.5
        self.groups = rng.choice([1, 1, 2, 3])
        self.strange_hashes = rng.random() < 0.5
        self.ranks = [WorkerRank(f"w{n // 2}", n % 2) for n in range(rng.randint(2, 8))]
        for worker in self.ranks:
            self.add(worker)

    def add(self, worker: WorkerRank) -> None:
        mode = CopyMode.SET if self.rng.random() < 0.2 else CopyMode.COUNT
        options = WorkerOptions(copies=mode)
        if worker not in self.model.workers:
            self.model.workers[worker] = ModelWorker()
        self.model.workers[worker].mode = mode
        self.options[worker] = options
        self.index.add_worker(worker, options)

    def prompt(self) -> tuple[int, ...]:
        return tuple(self.rng.randint(1, CONTENTS) for _ in range(self.rng.randint(1, DEPTH)))

    def engine_hash(self, prefix: tuple[int, ...]) -> int:
        if self.strange_hashes and self.rng.random() < 0.3:
            return self.rng.randint(1, 12)
        return int("".join(map(str, prefix))) + 1000

    def place(self) -> tuple[int, Tier]:
        tier = self.rng.choice(list(Tier)) if self.tiers else Tier.DEVICE
        return self.rng.randrange(self.groups), tier

    def event(self) -> Event:
        rng, prompt = self.rng, self.prompt()
        group, tier = self.place()
        kind = rng.random()
        if kind < 0.02:
            return Cleared()
        start = rng.randrange(len(prompt))
        hashes = tuple(self.engine_hash(prompt[: k + 1]) for k in range(start, len(prompt)))
        if kind < 0.35:
            return Removed(hashes if rng.random() < 0.3 else hashes[-1:], tier, group)
        # Group 2 is no full attention.
        stored = Stored(hashes, tier=tier, group=group, full_attention=group < 2)
        if kind < 0.4:
            return stored
        parent = self.engine_hash(prompt[:start]) if start else None
        return replace(stored, parent=parent, local_hashes=prompt[start:])

    def step(self) -> None:
        rng, worker = self.rng, self.rng.choice(self.ranks)
        kind = rng.random()
        if kind < 0.86:
            events = [self.event() for _ in range(rng.choice([1, 1, 1, 3]))]
            events += events[:1] if rng.random() < 0.1 else []
            self.index.apply(worker, EventBatch(tuple(events)))
            for event in events:
                self.model.apply(worker, event)
        elif kind < 0.88:
            self.index.remove_rank(worker)
            self.model.workers.pop(worker, None)
        elif kind < 0.89:
            self.index.remove_worker(worker.worker_id)
            for rank in [w for w in self.model.workers if w.worker_id == worker.worker_id]:
                del self.model.workers[rank]
        elif kind < 0.90:
            self.index.reset(worker)
            if worker in self.model.workers:
                self.model.workers[worker] = ModelWorker(mode=self.model.workers[worker].mode)
        elif kind < 0.93:
            self.add(worker)
        elif kind < 0.94:
            fresh = self.factory(4)
            reload(self.index, fresh, self.options)
        elif kind < 0.96 and worker in self.model.workers:
            self.index.demote(worker, ttl_seconds=3, now=self.now)
            self.model.demote(worker, self.now + 3)
        elif kind < 0.98 and worker in self.model.workers:
            prompt = self.prompt()
            self.index.predict(worker, prompt, ttl_seconds=2, now=self.now)
            self.model.predict(worker, prompt, self.now + 2)
        else:
            self.now += 1
            settle(self.index, self.now)
            self.model.tick(self.now)

    def compare(self) -> None:
        for _ in range(4):
            prompt = self.prompt()
            expected = self.model.find(prompt)
            assert self.index.find_matches(prompt, now=self.now).by_worker() == expected, prompt
            early = self.index.find_matches(prompt, now=self.now, early_exit=True).by_worker()
            assert all(
                all(low <= exact for low, exact in zip(row, expected[worker], strict=True))
                for worker, row in early.items()
            ), "early_exit gives lower bounds"
        worker = self.rng.choice(self.ranks)
        dump = self.index.dump(worker)
        if worker in self.model.workers:
            assert dump is not None
            assert replace(dump, epoch=0, last_event_id=None) == self.model.dump(worker)
        else:
            assert dump is None
        stats = self.index.stats()
        assert (stats.memberships, stats.hidden) == (self.model.memberships(), self.model.hidden())
        self.index.check_invariants()


def test_random_operations_agree_with_the_model(index_factory: IndexFactory) -> None:
    base = random.SystemRandom().randrange(2**32)
    seeds = [int(ONE_SEED)] if ONE_SEED else [base + n for n in range(SEQUENCES)]
    for seed in seeds:
        world = World(random.Random(seed), index_factory)
        for step in range(STEPS):
            try:
                world.step()
                world.compare()
            except Exception as error:
                raise AssertionError(f"KVSCOUT_INDEX_SEED={seed}, step {step}: {error}") from error
