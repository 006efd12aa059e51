"""The share of the workers that an indexer has."""

from collections import Counter

import pytest

from kvscout_common.errors import ConfigError
from kvscout_common.shards import WHOLE, Shard, shard_of


def test_every_worker_belongs_to_exactly_one_shard_and_shards_are_of_like_size() -> None:
    shards = [Shard(index, 4) for index in range(4)]
    names = [("default", f"worker-{number}") for number in range(2_000)]
    sizes = Counter(next(shard.index for shard in shards if shard.has(*name)) for name in names)
    assert all(sum(shard.has(*name) for shard in shards) == 1 for name in names)
    assert all(400 < sizes[shard.index] < 600 for shard in shards)


def test_the_hash_is_the_one_that_is_documented_and_stays() -> None:
    # XXH3_64 of b"default\x00w0", ..., seed 0, modulo 2, 3 and 1024.
    found = [[shard_of("default", f"w{number}", count) for number in range(6)] for count in (2, 3, 1024)]
    assert found == [[0, 1, 1, 0, 1, 0], [2, 0, 1, 2, 2, 0], [808, 31, 893, 818, 475, 768]]


def test_tenant_and_worker_id_are_told_apart() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("c", "ab"), ("abc", "")]
    assert len({shard_of(*pair, 1024) for pair in pairs}) == len(pairs)


def test_the_whole_has_everybody() -> None:
    assert WHOLE.has("t", "w")
    assert str(Shard.parse("2/3", flag="shard")) == "2/3"


@pytest.mark.parametrize("text", ["", "1", "a/b", "3/3", "0/0", "-1/2", "1/2/3", "0/1025", " 0/2", "٣/٤"])
def test_what_is_no_shard_is_refused_by_the_flags_name(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Shard.parse(text, flag="shard")
    assert refused.value.field == "shard"
