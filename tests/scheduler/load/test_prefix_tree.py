"""The radix tree of active prefixes, by cases and against sets of prefixes."""

from __future__ import annotations

from random import Random

from support.scheduler_invariants import check_tree, recount, runs_of
from support.seeds import test_seed

from kvscout_scheduler.load.prefix_tree import Node, PrefixTree, common_bytes
from kvscout_scheduler.values.request import pack_hashes


def packed(*hashes: int) -> bytes:
    return pack_hashes(hashes)


def test_requests_that_branch_share_the_blocks_before_the_branch() -> None:
    tree = PrefixTree()
    first, new_first = tree.add(packed(10, 20, 30), 0)
    second, new_second = tree.add(packed(10, 20, 99), 0)
    assert (new_first, new_second) == (3, 1)
    assert recount(tree) == {0: 4}
    assert tree.remove(first, 0) == 1
    assert tree.remove(second, 0) == 3
    assert runs_of(tree) == {}


def test_a_fully_shared_request_adds_nothing() -> None:
    tree = PrefixTree()
    tree.add(packed(1, 2), 0)
    again, new = tree.add(packed(1, 2), 0)
    assert new == 0
    assert tree.remove(again, 0) == 0


def test_shared_stops_at_the_first_block_that_differs_even_within_a_run() -> None:
    tree = PrefixTree()
    tree.add(packed(1, 2, 3, 4), 0)
    tree.add(packed(1, 2), 1)
    assert tree.shared(packed(1, 2, 3, 9)) == {0: 3, 1: 2}
    assert tree.shared(packed(1)) == {0: 1, 1: 1}
    assert tree.shared(packed(9, 2, 3)) == {}
    assert tree.shared(b"") == {}


def test_equal_blocks_after_different_prefixes_are_different_blocks() -> None:
    tree = PrefixTree()
    tree.add(packed(1, 5), 0)
    assert tree.shared(packed(2, 5)) == {}
    assert tree.add(packed(2, 5), 0)[1] == 2


def test_a_request_without_whole_blocks_holds_nothing() -> None:
    tree = PrefixTree()
    end, new = tree.add(b"", 3)
    assert new == 0
    assert tree.remove(end, 3) == 0
    check_tree(tree)


def test_a_cut_run_is_joined_again_when_its_reason_is_gone() -> None:
    tree = PrefixTree()
    long, _ = tree.add(packed(*range(1, 9)), 0)
    short, _ = tree.add(packed(1, 2, 3), 1)
    assert len(runs_of(tree)) == 2
    tree.remove(short, 1)
    assert runs_of(tree) == {packed(*range(1, 9)): {0: 1}}
    check_tree(tree)
    assert tree.remove(long, 0) == 8


def test_common_prefix_is_found_at_every_length() -> None:
    run = packed(*range(1, 20))
    for same in range(1, 20):
        hashes = packed(77) + packed(*range(1, same + 1), *range(100, 110))
        assert common_bytes(run, hashes, 8) == same * 8


def test_random_requests_match_sets_of_prefixes() -> None:
    rng = Random(test_seed())
    tree = PrefixTree()
    active: list[tuple[Node, int, tuple[int, ...]]] = []
    for step in range(3000):
        if active and rng.random() < 0.48:
            end, slot, hashes = active.pop(rng.randrange(len(active)))
            before = _prefixes([*active, (end, slot, hashes)], slot)
            assert tree.remove(end, slot) == len(before) - len(_prefixes(active, slot))
        else:
            hashes, slot = tuple(rng.choices((1, 2), k=rng.randrange(9))), rng.randrange(4)
            before = _prefixes(active, slot)
            end, new = tree.add(packed(*hashes), slot)
            active.append((end, slot, hashes))
            assert new == len(_prefixes(active, slot)) - len(before)
        probe = tuple(rng.choices((1, 2), k=rng.randrange(9)))
        held = {slot: _prefixes(active, slot) for slot in range(4)}
        expected = {slot: sum(probe[: n + 1] in held[slot] for n in range(len(probe))) for slot in range(4)}
        assert tree.shared(packed(*probe)) == {slot: blocks for slot, blocks in expected.items() if blocks}
        if step % 50 == 0:
            check_tree(tree)
            assert recount(tree) == {slot: len(prefixes) for slot, prefixes in held.items() if prefixes}
    for end, slot, _ in active:
        tree.remove(end, slot)
    assert runs_of(tree) == {}


def _prefixes(active: list[tuple[Node, int, tuple[int, ...]]], slot: int) -> set[tuple[int, ...]]:
    return {hashes[: n + 1] for _, where, hashes in active if where == slot for n in range(len(hashes))}
