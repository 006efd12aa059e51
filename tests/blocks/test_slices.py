"""Work on a whole rank in slices: what queries and other workers' events see between them, and what is left at the end.

Over the native index: the reference does such work at once. `KVSCOUT_TEST_SEED` repeats a failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.index_scenarios import IndexFactory, settle
from support.seeds import test_seed

from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_blocks.bytes.events import Cleared, EventBatch, Removed, Stored, Tier
from kvscout_blocks.index.block_index import SLICE, BlockIndex, Loading, Work, WorkerOptions
from kvscout_blocks.index.native import NativeIndex
from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_common.hashing import native_available
from kvscout_common.worker import WorkerRank

pytestmark = pytest.mark.skipif(not native_available(), reason="the extension is not built")

SEED = test_seed()
W0, W1 = WorkerRank("w0", 0), WorkerRank("w1", 0)
SLICES_A_STEP = 8
"""Of a native step, at most."""
CONTENTS = 3
Prompt = tuple[int, ...]


class Pair:
    """Two workers whose prompts share prefixes, in one index."""

    def __init__(self, index: BlockIndex, rng: random.Random, *, prompts: int, tiers: bool = False) -> None:
        self.index = index
        self.rng = rng
        self.tiers = tiers
        self.prompts: list[Prompt] = []
        for worker in (W0, W1):
            index.add_worker(worker, WorkerOptions())
        for _ in range(prompts):
            self.store(W0)
        for _ in range(prompts // 4):
            self.remove(W0)

    def prompt(self) -> Prompt:
        """One that goes on where another one forks off."""
        rng = self.rng
        head = rng.choice(self.prompts)[: rng.randrange(40)] if self.prompts and rng.random() < 0.8 else ()
        return (*head, *(rng.randrange(CONTENTS) for _ in range(rng.randrange(1, 40))))

    def hashes(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(hash((CONTENTS, prompt[: depth + 1])) % 2**64 for depth in range(len(prompt)))

    def store(self, worker: WorkerRank) -> None:
        """A prompt, from somewhere in it on."""
        prompt = self.prompt()
        self.prompts.append(prompt)
        names = self.hashes(prompt)
        start = self.rng.randrange(len(prompt)) if self.rng.random() < 0.2 else 0
        tier = self.rng.choice(list(Tier)) if self.tiers else Tier.DEVICE
        parent = names[start - 1] if start else None
        event = Stored(names[start:], parent, tier=tier, local_hashes=tuple(content + 1 for content in prompt[start:]))
        self.index.apply(worker, EventBatch((event,)))

    def remove(self, worker: WorkerRank) -> None:
        prompt = self.rng.choice(self.prompts)
        names = self.hashes(prompt)
        count = self.rng.choice([1, 1, len(names)])
        self.index.apply(worker, EventBatch((Removed(names[-count:][::-1]),)))

    def disturb(self) -> None:
        """Something happens to the other worker, which cuts shared runs in two and lets them go."""
        if self.rng.random() < 0.05:
            self.index.apply(W1, EventBatch((Cleared(),)))
        elif self.rng.random() < 0.3:
            self.remove(W1)
        else:
            self.store(W1)

    def find(self, prompt: Prompt, worker: WorkerRank = W0) -> tuple[int, ...]:
        found = self.index.find_matches([content + 1 for content in prompt], now=0.0).by_worker()
        return tuple(found.get(worker, (0, 0, 0, 0, 0)))

    def some(self) -> list[Prompt]:
        return self.rng.sample(self.prompts, 12)


@pytest.fixture
def index_factory() -> IndexFactory:
    """Makes an empty native index."""
    return NativeIndex


def pair(factory: IndexFactory, seed: int, *, prompts: int = 150, tiers: bool = False) -> Pair:
    return Pair(factory(4), random.Random(seed), prompts=prompts, tiers=tiers)


def dumped(index: BlockIndex, worker: WorkerRank = W0) -> WorkerDump:
    dump = index.dump(worker)
    assert dump is not None
    return dump


def chain(factory: IndexFactory, blocks: int) -> BlockIndex:
    """An index in which one worker has one long prompt."""
    index = factory(4)
    index.add_worker(W0, WorkerOptions())
    hashes = tuple(range(1, blocks + 1))
    index.apply(W0, EventBatch((Stored(hashes, local_hashes=hashes),)))
    return index


def steps(work: Work) -> int:
    count = 1
    while work.step():
        count += 1
    return count


WORKS: dict[str, Callable[[BlockIndex], Work | None]] = {
    "demotion": lambda index: index.demotion(W0, ttl_seconds=10, now=0.0),
    "load": lambda index: index.loading(dumped(index)),
}


@pytest.mark.parametrize("name", sorted(WORKS))
def test_no_step_does_more_than_a_few_slices(index_factory: IndexFactory, name: str) -> None:
    blocks = 64 * SLICE
    work = WORKS[name](chain(index_factory, blocks))
    assert work is not None
    assert steps(work) >= blocks / (2 * SLICE * SLICES_A_STEP)


def test_a_cut_of_many_blocks_takes_many_steps(index_factory: IndexFactory) -> None:
    cut = chain(index_factory, 512 * SLICE).cut(W0)
    assert cut is not None
    assert steps(cut) >= 4


@pytest.mark.parametrize("tiers", [False, True])
def test_a_cut_is_what_it_was_begun_with_whatever_others_do_meanwhile(index_factory: IndexFactory, tiers: bool) -> None:
    for seed in range(SEED, SEED + 6):
        world = pair(index_factory, seed, tiers=tiers)
        expected = dumped(world.index)
        cut = world.index.cut(W0)
        assert cut is not None
        more = True
        while more:
            for _ in range(3):
                world.disturb()
            more = cut.step()
        assert cut.dump() == expected, f"KVSCOUT_TEST_SEED={seed}"
        world.index.check_invariants()


def test_a_cut_is_what_it_was_begun_with_if_the_worker_changes_meanwhile(index_factory: IndexFactory) -> None:
    for seed in range(SEED, SEED + 6):
        world = pair(index_factory, seed)
        expected = dumped(world.index)
        cuts = [world.index.cut(W0), world.index.cut(W0)]
        for _ in range(20):
            world.disturb()
        for change in (world.store, world.remove):
            change(W0)
        assert [cut.dump() for cut in cuts if cut is not None] == [expected] * 2, f"KVSCOUT_TEST_SEED={seed}"


def test_a_cut_of_a_worker_that_was_reset_or_removed_is_none(index_factory: IndexFactory) -> None:
    for gone in ("reset", "remove_rank"):
        index = chain(index_factory, 8 * SLICE)
        cut = index.cut(W0)
        assert cut is not None
        getattr(index, gone)(W0)
        settle(index)
        assert not cut.step()
        assert cut.dump() is None
    assert factory_cut(index_factory) is None


def factory_cut(factory: IndexFactory) -> object:
    return factory(4).cut(W0)


@pytest.mark.parametrize("tiers", [False, True])
def test_what_is_loaded_is_seen_all_at_once(index_factory: IndexFactory, tiers: bool) -> None:
    for seed in range(SEED, SEED + 4):
        # Another world's content, under names of its own.
        dump = dumped(pair(index_factory, seed + 1, prompts=200, tiers=tiers).index)
        world = pair(index_factory, seed, tiers=tiers)
        loading = world.index.loading(dump)
        more = True
        while more:
            before = {prompt: world.find(prompt) for prompt in world.some()}
            more = loading.step()
            assert {prompt: world.find(prompt) for prompt in before} == before, f"KVSCOUT_TEST_SEED={seed}"
            for _ in range(3):
                world.disturb()
        assert loading.commit()
        assert dumped(world.index) == dump, f"KVSCOUT_TEST_SEED={seed}"
        settle(world.index)
        world.index.check_invariants()


def test_a_load_that_is_given_up_leaves_no_trace(index_factory: IndexFactory) -> None:
    index = chain(index_factory, 4 * SLICE)
    dump = dumped(index)
    index.reset(W0)
    settle(index)
    loading = index.loading(dump)
    loading.step()
    loading.abandon()
    assert not loading.commit()
    settle(index)
    index.check_invariants()
    assert (dumped(index), index.stats().blocks) == (WorkerDump(W0), 0)


def test_a_load_does_not_replace_what_began_after_it(index_factory: IndexFactory) -> None:
    def reset(index: BlockIndex) -> None:
        index.reset(W0)

    def come_back(index: BlockIndex) -> None:
        index.remove_rank(W0)
        index.add_worker(W0, WorkerOptions())

    def load(index: BlockIndex) -> None:
        index.load(WorkerDump(W0, last_event_id=5))

    for begin in (reset, come_back, load):
        index = chain(index_factory, 4 * SLICE)
        loading = index.loading(dumped(index))
        loading.step()
        begin(index)
        expected = dumped(index)
        loading.finish()
        assert not loading.commit()
        assert dumped(index) == expected
        settle(index)
        index.check_invariants()
        assert index.stats().blocks == 0


def test_a_load_of_which_a_part_is_missing_is_not_put_in_place(index_factory: IndexFactory) -> None:
    index = chain(index_factory, 64 * SLICE)
    loading = index.loading(dumped(index))
    loading.step()
    assert not loading.commit()
    assert index.find_matches([1, 2], now=0.0).device == (2,)


def test_what_cannot_be_loaded_is_reported_by_a_step(index_factory: IndexFactory) -> None:
    index = chain(index_factory, 3)
    broken: list[tuple[Loading, type[Exception]]] = [
        (index.loading(WorkerDump(W1)), NotFound),
        (index.loading(WorkerDump(W0, blocks=dumped(index).blocks, incompatible="so")), InvalidArgument),
    ]
    for loading, error in broken:
        with pytest.raises(error):
            loading.finish()
        assert not loading.commit()
    assert index.find_matches([1, 2], now=0.0).device == (2,)


@pytest.mark.slow
def test_a_demotion_takes_and_predicts_between_its_slices_no_more_than_before(index_factory: IndexFactory) -> None:
    for seed in range(SEED, SEED + 4):
        world = pair(index_factory, seed, prompts=200)
        once = pair(index_factory, seed, prompts=200)
        before = {prompt: world.find(prompt) for prompt in world.prompts}
        demotion = world.index.demotion(W0, ttl_seconds=10, now=0.0)
        more = True
        while more:
            more = demotion.step()
            for prompt in world.rng.sample(sorted(before), 12):
                device, *_, predicted = world.find(prompt)
                assert device <= before[prompt][0], f"KVSCOUT_TEST_SEED={seed}"
                assert predicted == before[prompt][4], f"KVSCOUT_TEST_SEED={seed}"
            for _ in range(3):
                world.disturb()
        once.index.demote(W0, ttl_seconds=10, now=0.0)
        assert world.index.worker_stats(W0) == once.index.worker_stats(W0), f"KVSCOUT_TEST_SEED={seed}"
        assert all(world.find(prompt)[0] == 0 for prompt in before)
        settle(world.index)
        world.index.check_invariants()


def test_an_event_finds_a_demotion_done(index_factory: IndexFactory) -> None:
    index = chain(index_factory, 8 * SLICE)
    demotion = index.demotion(W0, ttl_seconds=10, now=0.0)
    demotion.step()
    # Under a demoted parent, and again for a demoted block: both are held, what is above them is predicted.
    index.apply(W0, EventBatch((Stored((9000,), 8 * SLICE, local_hashes=(9000,)), Stored((1,), local_hashes=(1,)))))
    hashes = [*range(1, 8 * SLICE + 1), 9000]
    assert index.find_matches(hashes, now=0.0).by_worker()[W0] == (1, 1, 1, 1, 8 * SLICE + 1)
    assert not demotion.step()
    index.check_invariants()


def test_maintenance_goes_on_with_a_demotion_that_nobody_drives(index_factory: IndexFactory) -> None:
    index = chain(index_factory, 8 * SLICE)
    index.demotion(W0, ttl_seconds=10, now=0.0)
    settle(index)
    stats = index.worker_stats(W0)
    assert stats is not None
    assert (stats.blocks, stats.predictions, stats.device_copies) == (0, 8 * SLICE, 0)
    index.check_invariants()


def test_a_query_ends_some_of_many_predictions_and_maintenance_the_others(index_factory: IndexFactory) -> None:
    blocks = 8 * SLICE
    index = factory_with_predictions(index_factory, blocks)
    index.find_matches([1], now=20.0)
    assert 0.9 * blocks < index.stats().predictions < blocks
    calls = 1
    while index.maintain(now=20.0, budget=SLICE):
        calls += 1
    assert calls >= 0.9 * blocks / SLICE
    assert index.stats().predictions == 0
    assert index.find_matches([1], now=20.0).workers == ()
    index.check_invariants()


def factory_with_predictions(factory: IndexFactory, blocks: int, **bounds: int) -> BlockIndex:
    index = factory(4, **bounds)  # type: ignore[arg-type]
    index.add_worker(W0, WorkerOptions())
    index.predict(W0, range(1, blocks + 1), ttl_seconds=10, now=0.0)
    return index


def test_predictions_above_the_maximum_go_little_by_little_and_the_maximum_is_kept(index_factory: IndexFactory) -> None:
    most = 16 * SLICE
    index = factory_with_predictions(index_factory, most, max_predicted_blocks=most)
    index.predict(W0, [7, 8, 9], ttl_seconds=20, now=0.0)
    assert 0.8 * most < index.stats().predictions <= most
    settle(index, now=1.0)
    assert index.stats().predictions == int(0.8 * most)
    assert index.find_matches([7, 8, 9], now=1.0).predicted == (3,)
    index.check_invariants()


def test_most_of_many_predictions_that_were_cancelled_leave_the_others_theirs(index_factory: IndexFactory) -> None:
    index = factory_with_predictions(index_factory, 8 * SLICE)
    index.predict(W0, [70_000, 70_001], ttl_seconds=5, now=0.0)
    hashes = tuple(range(1, 8 * SLICE + 1))
    index.apply(W0, EventBatch((Stored(hashes, local_hashes=hashes),)))
    assert index.stats().predictions == 2
    settle(index, now=1.0)
    assert index.find_matches([70_000, 70_001], now=4.0).predicted == (2,)
    settle(index, now=6.0)
    assert index.stats().predictions == 0
    index.check_invariants()
