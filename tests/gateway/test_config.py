"""The gateway's own flags."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvscout_common.errors import ConfigError
from kvscout_gateway.config import addresses, indexer_shards, renderer_urls, tokenizer_folders
from kvscout_gateway.engines.engine_key import EngineKey
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
    assert "neither host:port" in result.output


def test_tokenizers_are_folders_of_models_or_of_all(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    given = [f"org/model={tmp_path}", str(tmp_path / "a=b")]
    assert tokenizer_folders("tokenizer", given) == {"org/model": tmp_path, "": tmp_path / "a=b"}
    for wrong in (["nowhere"], ["m=nowhere"], ["m="], [f"m={tmp_path}", f"m={tmp_path}"], [str(tmp_path)] * 2):
        with pytest.raises(ConfigError, match=r"DIR|twice"):
            tokenizer_folders("tokenizer", wrong)


def test_renderers_are_urls_of_models_or_of_all() -> None:
    given = ["http://one:8100/", "org/model=https://two/base", "a=b=http://three:1/x=y"]
    expected = {"": "http://one:8100", "org/model": "https://two/base", "a=b": "http://three:1/x=y"}
    assert renderer_urls("renderer", given) == expected
    for wrong in (["one:8100"], ["m="], ["ftp://one"], ["http://"], ["http://a?b=c"], ["http://a", "http://b"]):
        with pytest.raises(ConfigError, match="renderer"):
            renderer_urls("renderer", wrong)


def test_an_engine_key_is_one_line_and_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for wrong in ("", " \n", "two words", "ä", "a\nb"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="no key in it"):
            EngineKey(path)
    path.write_text("first\n")
    key = EngineKey(path)
    assert key.headers == (("Authorization", "Bearer first"),)
    assert key.file is not None
    path.write_text("second one's length differs".replace(" ", "-"))
    key.file.look()
    assert key.headers == (("Authorization", "Bearer second-one's-length-differs"),)
    assert EngineKey(None).headers == ()


def test_indexers_without_a_shard_are_replicas_of_the_whole() -> None:
    assert indexer_shards("indexer", ["b:2", "a:1"]) == (("b:2", "a:1"),)
    assert indexer_shards("indexer", []) == ()
    assert indexer_shards("indexer", ["dns://svc.prod:1"]) == (("dns://svc.prod:1",),)
    assert indexer_shards("indexer", ["0/2=dns://a:1", "1/2=b:1"]) == (("dns://a:1",), ("b:1",))


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
        (["0/1=nowhere"], "neither host:port"),
        (["dns://svc"], "neither host:port"),
        (["dns://svc:1/path"], "neither host:port"),
        (["http://svc:1"], "neither host:port"),
        (["0/2=a:1", "1/2=a:1"], "twice"),
    ],
)
def test_shards_that_do_not_fit_together_are_refused_by_the_flags_name(given: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        indexer_shards("indexer", given)
    assert refused.value.field == "indexer"
