"""Digests of the last batches: a window of ids, packed."""

from __future__ import annotations

import random

from support.intake_world import packed
from support.seeds import test_seed

from kvscout_blocks.source.digests import Digests


def test_digests_are_found_by_id_and_packed_in_order() -> None:
    digests = Digests(100)
    for number in range(5, 9):
        digests.add(number, 2**64 - number)
    assert [digests.get(number) for number in range(4, 10)] == [None, *(2**64 - n for n in range(5, 9)), None]
    assert digests.packed() == packed(2**64 - number for number in range(5, 9))
    digests.extend(11, packed([1, 2, 3]))
    assert [digests.get(number) for number in (8, 9, 10, 11, 12)] == [2**64 - 8, 1, 2, 3, None]


def test_what_did_not_come_has_no_digest_and_leaves_the_others_where_they_are() -> None:
    digests = Digests(100)
    digests.add(1, 11)
    digests.add(4, 44)
    digests.add(3, 33)
    assert [digests.get(number) for number in range(6)] == [None, 11, None, 33, 44, None]
    assert digests.packed() == packed([11, 0, 33, 44])


def test_an_id_that_is_far_away_begins_another_window_and_takes_no_memory_for_those_between() -> None:
    digests = Digests(100)
    digests.add(1, 11)
    digests.add(10**12, 7)
    assert (digests.get(1), digests.get(10**12), len(digests)) == (None, 7, 1)
    digests.add(3, 33)
    assert (digests.get(10**12), digests.get(3), len(digests)) == (None, 33, 1)


def test_old_digests_are_forgotten_but_the_last_ones_and_never_more_than_a_bound_is_kept() -> None:
    digests = Digests(100)
    for number in range(50):
        digests.add(number, number + 1)
        digests.forget(below=0, keep=10)
    assert len(digests) == 50
    digests.forget(below=20, keep=10)
    assert (digests.get(19), digests.get(20)) == (None, 21)
    digests.forget(below=1000, keep=10)
    assert (len(digests), digests.get(39), digests.get(40)) == (10, None, 41)
    for number in range(50, 1000):
        digests.add(number, number + 1)
        digests.forget(below=0, keep=10)
        assert len(digests) <= 110
    assert digests.get(999) == 1000


def test_a_window_has_what_a_dictionary_has() -> None:
    seed = test_seed()
    rng = random.Random(seed)
    digests, known, last = Digests(1_000), dict[int, int](), 0
    for _ in range(2_000):
        last += rng.choice([1, 1, 1, 1, 2, 5])
        known[last] = rng.randrange(1, 2**64)
        digests.add(last, known[last])
        below = last - rng.randrange(200)
        digests.forget(below=below, keep=20)
        for number in [number for number in known if number < min(below, last - 19)]:
            del known[number]
        near = range(last - 150, last + 2)
        assert {number: digests.get(number) for number in near} == {number: known.get(number) for number in near}
