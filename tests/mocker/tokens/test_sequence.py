"""The engine's own hash chain."""

from __future__ import annotations

from array import array

from kvscout_mocker.tokens.sequence import CacheScope, Sequence


def sequence(tokens: list[int], scope: CacheScope | None = None, hash_seed: int = 1) -> Sequence:
    return Sequence(array("I", tokens), block_size=4, hash_seed=hash_seed, scope=scope)


def test_only_full_blocks_are_hashed() -> None:
    assert [len(sequence(list(range(n))).block_hashes) for n in (1, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_appending_tokens_gives_the_hashes_of_the_whole_sequence() -> None:
    grown = sequence([1, 2, 3])
    for token in range(4, 14):
        grown.append(token)
    assert grown.block_hashes == sequence(list(range(1, 14))).block_hashes


def test_a_hash_names_the_whole_prefix() -> None:
    one, other = sequence([1, 2, 3, 4, 5, 6, 7, 8]), sequence([9, 2, 3, 4, 5, 6, 7, 8])
    assert set(one.block_hashes).isdisjoint(other.block_hashes)


def test_adapter_salt_and_hash_seed_separate_every_block() -> None:
    tokens = list(range(12))
    chains = [
        sequence(tokens),
        sequence(tokens, hash_seed=2),
        sequence(tokens, CacheScope(lora_name="a", lora_id=1)),
        sequence(tokens, CacheScope(cache_salt="s")),
        sequence(tokens, CacheScope(lora_name="a", lora_id=1, cache_salt="s")),
    ]
    hashes = [block_hash for chain in chains for block_hash in chain.block_hashes]
    assert len(hashes) == len(set(hashes)) == 15


def test_the_salt_is_an_extra_key_of_the_first_block_only() -> None:
    scope = CacheScope(lora_name="adapter", lora_id=1, cache_salt="salt")
    assert [scope.extra_keys(0), scope.extra_keys(1)] == [["adapter", "salt"], ["adapter"]]
    assert CacheScope(session_id="s").extra_keys(0) is None


def test_a_session_does_not_separate_blocks() -> None:
    tokens = list(range(8))
    assert sequence(tokens, CacheScope(session_id="s")).block_hashes == sequence(tokens).block_hashes
