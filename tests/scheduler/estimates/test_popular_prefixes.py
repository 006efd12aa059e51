"""Which prefixes of prompts are worth a copy."""

from __future__ import annotations

from random import Random

import pytest
from support.seeds import test_seed

from kvscout_scheduler.estimates import popular_prefixes
from kvscout_scheduler.estimates.popular_prefixes import HORIZON_SECONDS, NOTHING, PopularPrefix, PopularPrefixes
from kvscout_scheduler.values.request import pack_hashes

BLOCK = 64


def prompt(shared: int, own: int = 0, name: int = 0) -> bytes:
    """Hashes of a prompt of so many shared blocks, and of some that no other has."""
    return pack_hashes([*range(1, shared + 1), *range(10_000 * (name + 1), 10_000 * (name + 1) + own)])


def test_what_many_prompts_begin_with_is_worth_a_copy_as_far_as_they_have_it_in_common() -> None:
    prefixes = PopularPrefixes()
    for name in range(100):
        found = prefixes.of(prompt(20, 40, name), BLOCK, 0.0, 10, counts=True)
        assert (found != NOTHING) == (name >= 16)
    # 20 blocks are 1,280 tokens: the longest prefix that is counted of them has 1,024. A hundred had it, ten a worker.
    assert prefixes.of(prompt(20, 40, 1_000), BLOCK, 0.0, 10, counts=False) == PopularPrefix(1_024.0, 1 - 10 / 110)


def test_of_what_only_one_conversation_has_nothing_is_worth_a_copy() -> None:
    prefixes = PopularPrefixes()
    for turn in range(15):
        assert prefixes.of(prompt(8 + turn, 8), BLOCK, float(turn), 8, counts=True) == NOTHING


def test_what_each_worker_is_asked_for_less_than_once_is_worth_no_copy() -> None:
    prefixes = PopularPrefixes()
    found = [prefixes.of(prompt(20), BLOCK, 0.0, 50, counts=True) for _ in range(60)]
    assert [popular != NOTHING for popular in found] == [seen >= 50 for seen in range(60)]


def test_what_is_asked_for_no_more_is_worth_less_and_less() -> None:
    prefixes = PopularPrefixes()
    for _ in range(40):
        prefixes.of(prompt(4), BLOCK, 0.0, 1, counts=True)
    found = [prefixes.of(prompt(4), BLOCK, at, 1, counts=False) for at in (0.0, HORIZON_SECONDS, 1e6)]
    assert found == [PopularPrefix(256.0, 1 - 1 / 41), PopularPrefix(256.0, 1 - 1 / 21), NOTHING]


def test_a_question_that_books_nothing_counts_for_nothing() -> None:
    prefixes = PopularPrefixes()
    for _ in range(40):
        prefixes.of(prompt(8), BLOCK, 0.0, 1, counts=False)
    assert len(prefixes) == 0


def test_short_prompts_large_blocks_and_no_hashes_have_no_prefix_that_is_counted() -> None:
    prefixes = PopularPrefixes()
    for hashes, block_size in ((b"", 16), (prompt(3), 64), (prompt(15), 16)):
        for _ in range(40):
            assert prefixes.of(hashes, block_size, 0.0, 1, counts=True) == NOTHING
    assert len(prefixes) == 0
    for _ in range(40):
        # A prefix ends with a whole block.
        found = prefixes.of(prompt(1), 512, 0.0, 1, counts=True)
    assert found.tokens == 512.0


def test_as_many_are_remembered_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(popular_prefixes, "MAX_PREFIXES", 50)
    rng, prefixes = Random(test_seed()), PopularPrefixes()
    for name in range(200):
        prefixes.of(prompt(0, rng.randrange(4, 60), name), BLOCK, float(name), 1, counts=True)
        prefixes.of(prompt(4), BLOCK, float(name), 1, counts=True)
        assert len(prefixes) <= 50
    assert prefixes.of(prompt(4), BLOCK, 200.0, 1, counts=False) != NOTHING
