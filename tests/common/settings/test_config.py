"""Flags and environment become one frozen configuration, or an error that names the flag."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvscout_common.endpoints import is_loopback
from kvscout_common.errors import ConfigError
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.settings.config import ServerConfig
from kvscout_common.settings.flags import PERFORMANCE, SectionedCommand, flag, server_flags


@click.command(cls=SectionedCommand)
@flag("--router-ttl", default=120.0, help="How long.")
@flag("--threads", default=1, section=PERFORMANCE, help="How many.")
@server_flags("indexer", port=7051, metrics_port=9091)
def command(**values: Any) -> None:
    config = ServerConfig.from_flags(values)
    click.echo(f"{config.host} {config.port} {values['router_ttl']:g}")


def run(*arguments: str, **environment: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(command, arguments, env=environment)
    return result.exit_code, result.output.strip(), result.exception


def test_defaults_bind_loopback_only() -> None:
    assert run()[1] == "127.0.0.1 7051 120"


def test_each_flag_has_its_variable_and_the_service_s_own_comes_first() -> None:
    assert run(KVSCOUT_ROUTER_TTL="7", KVSCOUT_PORT="1")[1] == "127.0.0.1 1 7"
    assert run(KVSCOUT_PORT="1", KVSCOUT_INDEXER_PORT="2")[1] == "127.0.0.1 2 120"
    assert run("--port", "3", KVSCOUT_INDEXER_PORT="2")[1] == "127.0.0.1 3 120"


def test_help_groups_the_flags() -> None:
    text = run("--help")[1]
    assert text.index("Behaviour:") < text.index("--router-ttl") < text.index("Performance:") < text.index("--threads")
    assert text.index("--threads") < text.index("Server:") < text.index("--tls-cert")


def test_beyond_loopback_tokens_are_required_or_their_absence_asked_for(tmp_path: Path) -> None:
    error = run("--host", "0.0.0.0")[2]
    assert isinstance(error, ConfigError)
    assert error.field == "host"
    assert run("--host", "0.0.0.0", "--allow-anonymous")[0] == 0
    tokens = tmp_path / "tokens"
    tokens.touch()
    assert run("--host", "0.0.0.0", "--auth-tokens", str(tokens))[0] == 0


def test_contradicting_files_name_the_flag(tmp_path: Path) -> None:
    pem = tmp_path / "pem"
    pem.touch()
    for flags, field in ((("--tls-cert", str(pem)), "tls_cert"), (("--tls-client-ca", str(pem)), "tls_client_ca")):
        error = run(*flags)[2]
        assert isinstance(error, ConfigError)
        assert error.field == field
    with pytest.raises(ConfigError, match="tls_client_cert"):
        ClientSecurity.from_flags(None, pem, None, None)
    with pytest.raises(ConfigError, match="tls_client_cert: needs --tls-ca"):
        ClientSecurity.from_flags(None, pem, pem, None)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True), ("0.0.0.0", False), ("::", False)],
)
def test_what_counts_as_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
