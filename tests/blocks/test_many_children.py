"""Blocks with many children that come and go: hidden at once, rooted again in slices that have a budget."""

from __future__ import annotations

import random

import pytest
from support.cpu_cost import cpu_seconds
from support.index_scenarios import IndexFactory, settle
from support.seeds import test_seed

from kvscout_blocks.bytes.events import Event, EventBatch, Removed, Stored, Tier
from kvscout_blocks.index.block_index import SLICE, BlockIndex, WorkerOptions
from kvscout_blocks.index.native import NativeIndex
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common.hashing import native_available
from kvscout_common.worker import WorkerRank

W0 = WorkerRank("w0", 0)
SEED = test_seed()
ROOT = 1
FIRST = 10
"""Of the children's hashes."""
PAIRS = 200

needs_native = pytest.mark.skipif(not native_available(), reason="the extension is not built: the reference is slow")


def block(engine_hash: int, parent: int | None, tier: Tier = Tier.DEVICE) -> Stored:
    return Stored((engine_hash,), parent=parent, local_hashes=(engine_hash,), tier=tier)


def family(index: BlockIndex, children: int) -> BlockIndex:
    """A root with so many children, each of one block."""
    index.add_worker(W0, WorkerOptions())
    index.apply(W0, EventBatch((block(ROOT, None),)))
    for first in range(FIRST, FIRST + children, 1000):
        names = range(first, min(first + 1000, FIRST + children))
        index.apply(W0, EventBatch(tuple(block(name, ROOT) for name in names)))
    return index


def device(index: BlockIndex, *hashes: int) -> int:
    row = index.find_matches(hashes, now=0.0).by_worker().get(W0)
    return 0 if row is None else row.device


def cpu_of(index: BlockIndex, *batches: EventBatch) -> float:
    def apply() -> None:
        for batch in batches:
            index.apply(W0, batch)

    return cpu_seconds(apply)


@needs_native
@pytest.mark.parametrize("in_one", [True, False], ids=["in one batch", "in a batch each"])
def test_a_block_that_comes_and_goes_costs_no_more_with_a_hundred_times_the_children(in_one: bool) -> None:
    pair: tuple[Event, ...] = (Removed((ROOT,)), block(ROOT, None))
    batches = [EventBatch(pair * PAIRS)] if in_one else [EventBatch(pair)] * PAIRS
    # What the first removal hides was paid for by the events that stored it.
    few, many = (family(NativeIndex(4), 1000 * times) for times in (1, 100))
    for index in (few, many):
        index.apply(W0, EventBatch(pair))
    assert cpu_of(many, *batches) < 20 * max(cpu_of(few, *batches), 0.001)
    settle(many)
    assert [device(many, ROOT, FIRST + child) for child in (0, 50_000, 99_999)] == [2, 2, 2]


def test_children_of_a_removed_block_are_hidden_at_once_and_rooted_when_it_is_back(
    index_factory: IndexFactory,
) -> None:
    index = family(index_factory(4), 3 * SLICE)
    prompts = [(ROOT, FIRST + child) for child in range(0, 3 * SLICE, 100)]
    for _ in range(3):
        index.apply(W0, EventBatch((Removed((ROOT,)),)))
        assert {device(index, *prompt) for prompt in prompts} == {0}
        index.apply(W0, EventBatch((block(ROOT, None),)))
        assert {device(index, *prompt) for prompt in prompts} <= {1, 2}
    settle(index)
    assert {device(index, *prompt) for prompt in prompts} == {2}
    stats = index.worker_stats(W0)
    assert stats is not None
    assert stats.hidden == 0
    index.check_invariants()


@needs_native
def test_random_families_never_have_more_than_the_reference_and_the_same_once_settled() -> None:
    rng = random.Random(SEED)
    native, reference = NativeIndex(4), ReferenceIndex(4)
    parents = [ROOT, 2, 3]
    children = {parent: range(1000 * parent, 1000 * parent + SLICE + 200) for parent in parents}
    above = {ROOT: None, 2: ROOT, 3: 2}
    path = {ROOT: (ROOT,), 2: (ROOT, 2), 3: (ROOT, 2, 3)}

    def both(*events: Event) -> None:
        for index in (native, reference):
            index.apply(W0, EventBatch(events))

    for index in (native, reference):
        index.add_worker(W0, WorkerOptions())
    both(*[block(parent, above[parent]) for parent in parents])
    for parent in parents:
        both(*[block(child, parent, rng.choice([Tier.DEVICE, Tier.HOST])) for child in children[parent]])
    for step in range(60):
        parent, tier = rng.choice(parents), rng.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST])
        kind = rng.random()
        if kind < 0.4:
            both(Removed((parent,), tier))
        elif kind < 0.8:
            both(block(parent, above[parent], tier))
        elif kind < 0.9:
            both(*[Removed((child,), tier) for child in rng.sample(children[parent], 20)])
        else:
            both(*[block(child, parent, tier) for child in rng.sample(children[parent], 20)])
        settled = rng.random() < 0.3
        if settled:
            settle(native)
        prompts = [(*path[p], child) for p in parents for child in rng.sample(children[p], 40)]
        for prompt in prompts:
            rows = [index.find_matches(prompt, now=0.0).by_worker().get(W0) for index in (native, reference)]
            got, wanted = ([0, 0] if row is None else [row.device, row.host] for row in rows)
            fits = got == wanted if settled else got[0] <= wanted[0] and got[1] <= wanted[1]
            assert fits, f"{got} of {wanted}, step {step}, KVSCOUT_TEST_SEED={SEED}"
        if step % 10 == 0:
            native.check_invariants()
    settle(native)
    assert native.dump(W0) == reference.dump(W0)
    native.check_invariants()
