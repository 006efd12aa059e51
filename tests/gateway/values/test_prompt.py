"""Prompts and their hashes."""

from array import array

import pytest

from kvscout_common.errors import FailedPrecondition
from kvscout_common.hashing import MmItem, block_hashes_packed
from kvscout_common.worker import WorkerSpec
from kvscout_gateway.values.prompt import Geometry, Prompt, geometries, hash_prompt

PLAIN, EAGLE, WIDE = Geometry(4, eagle=False), Geometry(4, eagle=True), Geometry(8, eagle=False)
TOKENS = array("I", range(1, 14)).tobytes()

ONE_TWO = array("Q", (1, 2)).tobytes()


def test_the_geometry_of_most_workers_comes_first() -> None:
    specs = [WorkerSpec("a", "m", 8), WorkerSpec("b", "m", 4, eagle=True), WorkerSpec("c", "m", 8)]
    assert geometries(specs) == (WIDE, EAGLE)
    assert geometries([]) == ()


def test_tokens_are_hashed_once_for_each_geometry() -> None:
    prompt = Prompt(13, TOKENS, cache_salt="s", mm_items=(MmItem("i", 5, 2),))
    found = hash_prompt(prompt, (WIDE, PLAIN, EAGLE), "lora")
    assert list(found) == [WIDE, PLAIN, EAGLE]
    for pool, hashes in found.items():
        assert hashes == block_hashes_packed(
            TOKENS,
            pool.block_size,
            lora_name="lora",
            cache_salt="s",
            mm_items=[("i", 5, 2)],
            eagle=pool.eagle,
        )


def test_given_hashes_stand_for_their_own_geometry_only() -> None:
    prompt = Prompt(8, given_hashes=ONE_TWO, given_block_size=4)
    assert hash_prompt(prompt, (WIDE, PLAIN), "") == {WIDE: b"", PLAIN: ONE_TWO}
    assert hash_prompt(prompt, (EAGLE, PLAIN), "") == {EAGLE: b"", PLAIN: ONE_TWO}
    assert hash_prompt(prompt, (EAGLE,), "") == {EAGLE: ONE_TWO}
    assert hash_prompt(prompt, (), "") == {PLAIN: ONE_TWO}


def test_hashes_of_a_block_size_that_no_worker_has_are_refused() -> None:
    with pytest.raises(FailedPrecondition, match="block_size is 16, the model's workers have 4, 8"):
        hash_prompt(Prompt(16, given_hashes=ONE_TWO[:8], given_block_size=16), (WIDE, PLAIN, EAGLE), "")


def test_a_prompt_of_nothing_has_no_hashes() -> None:
    assert hash_prompt(Prompt(0), (PLAIN,), "") == {PLAIN: b""}
