"""The gateway's own flags."""

import pytest
from click.testing import CliRunner

from kvscout_common.errors import ConfigError
from kvscout_gateway.config import addresses
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
