"""Physical blocks: hits, copies, eviction order, and random runs against a naive model."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

from support.mocker_invariants import check_blocks
from support.seeds import test_seed

from kvscout_mocker.engine.block_manager import BlockManager
from kvscout_mocker.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvscout_mocker.tokens.sequence import BlockTable, Sequence

BLOCK_SIZE = 4


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(array("I", tokens), block_size=BLOCK_SIZE, hash_seed=1)


def run(manager: BlockManager, tokens: list[int]) -> tuple[Sequence, BlockTable, int]:
    """Admit a whole prompt; the blocks it hit."""
    prompt, table = sequence(tokens), BlockTable()
    prefix = manager.cached_prefix(prompt)
    assert manager.allocate(prompt, table, len(prompt), prefix)
    return prompt, table, len(prefix)


def serve(manager: BlockManager, tokens: list[int]) -> int:
    """Admit a whole prompt and release it; the blocks it hit."""
    _, table, hit = run(manager, tokens)
    manager.release(table)
    return hit


def removed(events: list[Event]) -> list[int]:
    return [event.block_hash for event in events if isinstance(event, BlockRemoved)]


def test_a_prompt_is_stored_once_and_hit_afterwards() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    prompt, table, hit = run(manager, list(range(10)))
    assert hit == 0
    [event] = manager.take_events()
    assert isinstance(event, BlockStored)
    assert event.block_hashes == prompt.block_hashes
    assert (event.parent_block_hash, event.token_ids) == (None, list(range(8)))
    manager.release(table)
    assert serve(manager, list(range(10))) == 2
    assert manager.take_events() == []


def test_only_what_follows_the_hit_is_stored_with_its_parent() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    serve(manager, list(range(8)))
    manager.take_events()
    assert serve(manager, [*range(8), 90, 91, 92, 93, 94]) == 2
    [event] = manager.take_events()
    assert isinstance(event, BlockStored)
    assert event.token_ids == [90, 91, 92, 93]
    assert event.parent_block_hash == sequence(list(range(8))).block_hashes[-1]


def test_a_block_aligned_prompt_recomputes_its_last_block_into_a_second_copy() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    last = sequence(list(range(8))).block_hashes[-1]
    assert [serve(manager, list(range(8))) for _ in range(3)] == [0, 1, 1]
    assert manager.cached_copies()[last] == 3
    assert serve(manager, list(range(9))) == 2


def test_each_copy_is_removed_on_its_own() -> None:
    manager = BlockManager(5, BLOCK_SIZE)
    last = sequence(list(range(8))).block_hashes[-1]
    for _ in range(3):
        serve(manager, list(range(8)))
    manager.take_events()
    serve(manager, list(range(100, 116)))
    assert removed(manager.take_events()).count(last) == 3


def test_leaves_are_evicted_before_what_leads_to_them() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    old = sequence(list(range(12)))
    serve(manager, list(range(12)))
    manager.take_events()
    serve(manager, list(range(100, 104)))
    assert removed(manager.take_events()) == [old.block_hashes[2]]
    serve(manager, list(range(200, 208)))
    assert removed(manager.take_events()) == [old.block_hashes[1], old.block_hashes[0]]


def test_a_hit_block_is_recently_used() -> None:
    manager = BlockManager(3, BLOCK_SIZE)
    serve(manager, [1, 2, 3, 4])
    serve(manager, [5, 6, 7, 8])
    manager.take_events()
    _, table, hit = run(manager, [1, 2, 3, 4, 9])
    assert hit == 1
    assert removed(manager.take_events()) == [sequence([5, 6, 7, 8]).block_hashes[0]]
    manager.release(table)


def test_a_partial_tail_is_reused_before_fresh_and_cached_blocks() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    for first in (0, 10, 20):
        serve(manager, list(range(first, first + 5)))
    assert removed(manager.take_events()) == [sequence([0, 1, 2, 3]).block_hashes[0]]


def test_referenced_blocks_are_never_evicted_and_a_refusal_changes_nothing() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    _, table, _ = run(manager, list(range(9)))
    other, other_table = sequence([50]), BlockTable()
    assert not manager.allocate(other, other_table, 1)
    assert other_table.block_ids == []
    assert manager.usage == 1.0
    manager.release(table)
    assert manager.allocate(other, other_table, 1)


def test_blocks_filled_while_decoding_are_stored_one_by_one() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    prompt, table, _ = run(manager, [1, 2, 3])
    assert manager.take_events() == []
    for token in range(4, 10):
        prompt.append(token)
        assert manager.allocate(prompt, table, len(prompt))
    stored = manager.take_events()
    assert [e.token_ids for e in stored if isinstance(e, BlockStored)] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_reset_forgets_everything_but_is_refused_while_a_request_runs() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    _, table, _ = run(manager, list(range(9)))
    manager.take_events()
    assert not manager.reset()
    manager.release(table)
    assert manager.reset()
    assert manager.take_events() == [AllBlocksCleared()]
    assert serve(manager, list(range(9))) == 0
    check_blocks(manager)


@dataclass
class NaiveBlock:
    """A physical block of the model: the free one with the smallest stamp is taken next."""

    stamp: int
    name: tuple[int, ...] | None = None
    """The tokens from the sequence's start to the block's end: what a hash stands for."""
    users: int = 0
    born: int = 0


@dataclass
class NaiveCache:
    """The rules of the module's docstring by exhaustive search over all blocks."""

    blocks: list[NaiveBlock]
    clock: int = 10_000
    removed: list[tuple[int, ...]] = field(default_factory=list)

    def hit(self, tokens: tuple[int, ...]) -> list[NaiveBlock]:
        found: list[NaiveBlock] = []
        for end in range(BLOCK_SIZE, len(tokens), BLOCK_SIZE):
            copies = [block for block in self.blocks if block.name == tokens[:end]]
            if not copies:
                break
            found.append(min(copies, key=lambda block: block.born))
        return found

    def admit(self, tokens: tuple[int, ...]) -> list[NaiveBlock] | None:
        table = self.hit(tokens)
        free = sum(block.users == 0 for block in self.blocks if block not in table)
        if -(-len(tokens) // BLOCK_SIZE) - len(table) > free:
            return None
        for block in table:
            block.users += 1
        return self.grow(table, tokens)

    def grow(self, table: list[NaiveBlock], tokens: tuple[int, ...]) -> list[NaiveBlock] | None:
        missing = -(-len(tokens) // BLOCK_SIZE) - len(table)
        if missing > sum(block.users == 0 for block in self.blocks):
            return None
        for _ in range(missing):
            block = min((b for b in self.blocks if b.users == 0), key=lambda b: b.stamp)
            if block.name is not None:
                self.removed.append(block.name)
            block.name, block.users = None, 1
            table.append(block)
        for index in range(len(tokens) // BLOCK_SIZE):
            if table[index].name is None:
                self.clock += 1
                table[index].name, table[index].born = tokens[: (index + 1) * BLOCK_SIZE], self.clock
        return table

    def release(self, table: list[NaiveBlock]) -> None:
        for block in reversed(table):
            block.users -= 1
            if block.users == 0:
                self.clock += 1
                block.stamp = self.clock if block.name is not None else -self.clock
        table.clear()


def test_random_requests_behave_as_in_the_naive_model() -> None:
    seed = test_seed()
    rng = random.Random(seed)
    where = f"rerun with KVSCOUT_TEST_SEED={seed}"
    for _ in range(30):
        num_blocks = rng.randint(4, 24)
        manager = BlockManager(num_blocks, BLOCK_SIZE)
        model = NaiveCache([NaiveBlock(stamp) for stamp in range(1, num_blocks)])
        names: dict[int, tuple[int, ...]] = {}
        live: list[tuple[Sequence, BlockTable, list[NaiveBlock]]] = []
        for _ in range(150):
            action = rng.random()
            if action < 0.5:
                length = rng.randint(1, 5 * BLOCK_SIZE)
                tokens = [rng.choice((1, 1, 1, 2)) for _ in range(length)]
                prompt, table = sequence(tokens), BlockTable()
                prefix = manager.cached_prefix(prompt)
                assert len(prefix) == len(model.hit(tuple(tokens))), where
                expected = model.admit(tuple(tokens))
                assert manager.allocate(prompt, table, len(prompt), prefix) == (expected is not None), where
                if expected is not None:
                    live.append((prompt, table, expected))
            elif live and action < 0.8:
                prompt, table, naive = rng.choice(live)
                prompt.append(rng.choice((1, 2)))
                grown = model.grow(naive, tuple(prompt.tokens))
                assert manager.allocate(prompt, table, len(prompt)) == (grown is not None), where
                if grown is None:  # preempted: what has no slot was never computed
                    live.remove((prompt, table, naive))
                    manager.release(table)
                    model.release(naive)
            elif live:
                prompt, table, naive = live.pop(rng.randrange(len(live)))
                manager.release(table)
                model.release(naive)
            for request, _, _ in live:
                for index, block_hash in enumerate(request.block_hashes):
                    names[block_hash] = tuple(request.tokens[: (index + 1) * BLOCK_SIZE])
            evicted = [names[block_hash] for block_hash in removed(manager.take_events())]
            assert evicted == model.removed, where
            model.removed.clear()
            check_blocks(manager)
            held = sorted(names[h] for h, count in manager.cached_copies().items() for _ in range(count))
            assert held == sorted(block.name for block in model.blocks if block.name is not None), where
