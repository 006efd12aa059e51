"""The gateway's own flags."""

import pytest
from click.testing import CliRunner

from kvscout_common.errors import ConfigError
from kvscout_gateway.config import addresses, indexer_shards
from kvscout_gateway.main import main


@pytest.mark.parametrize("given", [["nowhere"], [":1"], ["host:"], ["host:0"], ["host:99999"], ["a:1", "a:1"]])
def test_wrong_addresses_are_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        addresses("indexer", given)
    assert refused.value.field == "indexer"


def test_addresses_keep_their_order() -> None:
    assert addresses("scheduler", ["b:2", "a:1", "[::1]:3"]) == ("b:2", "a:1", "[::1]:3")


def test_a_wrong_flag_ends_with_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["--scheduler", "nowhere"])
    assert result.exit_code == 2
    assert "scheduler" in result.output
    assert "not host:port" in result.output


def test_indexers_without_a_shard_are_replicas_of_the_whole() -> None:
    assert indexer_shards("indexer", ["b:2", "a:1"]) == (("b:2", "a:1"),)
    assert indexer_shards("indexer", []) == ()


def test_replicas_of_a_shard_keep_their_order() -> None:
    given = ["1/2=b:2", "0/2=[::1]:3", "1/2=a:1"]
    assert indexer_shards("indexer", given) == (("[::1]:3",), ("b:2", "a:1"))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["0/2=a:1"], "no address of shard 1/2"),
        (["0/3=a:1", "2/3=b:1"], "no address of shard 1/3"),
        (["0/2=a:1", "1/3=b:1"], "shards of 2 and of 3"),
        (["0/2=a:1", "b:1"], "not I/N"),
        (["=a:1"], "not I/N"),
        (["2/2=a:1"], "numbered from 0"),
        (["0/1=nowhere"], "not host:port"),
        (["0/2=a:1", "1/2=a:1"], "twice"),
    ],
)
def test_shards_that_do_not_fit_together_are_refused_by_the_flags_name(given: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        indexer_shards("indexer", given)
    assert refused.value.field == "indexer"
