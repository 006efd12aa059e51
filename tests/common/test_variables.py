"""Names of environment variables: none that Kubernetes makes for a Service, and none that nobody reads unnoticed."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.processes import DEADLINE_SECONDS

from kvscout_cli.main import main as commands
from kvscout_common.variables import of_kubernetes, value_of, warnings

SERVICES = ("indexer", "scheduler", "gateway", "bridge", "mocker")
PROGRAMS = {name: import_module(f"kvscout_{name}.main").main for name in SERVICES}

LABELS = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
OUR_LABELS = st.builds("".join, st.tuples(st.just("kvscout"), st.from_regex(r"(-+[a-z0-9]+){0,4}", fullmatch=True)))


def of_service(name: str, address: str, ports: list[tuple[str, int, str]]) -> dict[str, str]:
    """The variables that a kubelet sets in every container for a Service (pkg/kubelet/envvars).

    Args:
        name: Of the Service, a DNS label.
        address: Its cluster IP.
        ports: Name ("" = none), number and protocol of each.
    """
    prefix = name.upper().replace("-", "_")
    found = {f"{prefix}_SERVICE_HOST": address, f"{prefix}_SERVICE_PORT": str(ports[0][1])}
    for port_name, number, _ in ports:
        if port_name:
            found[f"{prefix}_SERVICE_PORT_{port_name.upper().replace('-', '_')}"] = str(number)
    _, first, protocol = ports[0]
    found[f"{prefix}_PORT"] = f"{protocol}://{address}:{first}"
    for _, number, protocol in ports:
        stem = f"{prefix}_PORT_{number}_{protocol.upper()}"
        found[stem] = f"{protocol}://{address}:{number}"
        found |= {f"{stem}_PROTO": protocol, f"{stem}_PORT": str(number), f"{stem}_ADDR": address}
    return found


def variables(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        names = parameter.envvar or ()
        yield from (names,) if isinstance(names, str) else names


PORTS = st.lists(
    st.tuples(st.just("") | LABELS, st.integers(1, 65535), st.sampled_from(["tcp", "udp", "sctp"])),
    min_size=1,
    max_size=3,
)


@given(OUR_LABELS | LABELS, st.sampled_from(["10.96.0.7", "[fd00::7]"]), PORTS)
def test_what_kubernetes_makes_for_a_service_is_no_value_of_a_flag(
    name: str, address: str, ports: list[tuple[str, int, str]]
) -> None:
    made = of_service(name, address, ports)
    assert {variable: value_of(variable, made) for variable in made} == dict.fromkeys(made)
    assert [variable for variable, value in made.items() if not of_kubernetes(variable, value)] == []


@pytest.mark.parametrize("value", ["7050", "http://gateway:7050", "tcp://gateway", ""])
def test_what_people_write_into_a_variable_is_its_value(value: str) -> None:
    assert value_of("KVSCOUT_GATEWAY_PORT", {"KVSCOUT_GATEWAY_PORT": value}) == (value or None)


def test_a_program_starts_beside_services_that_are_named_after_its_flags() -> None:
    # "kvscout-gateway-metrics" makes KVSCOUT_GATEWAY_METRICS_PORT, and so on.
    stems = {"", *(f"-{name}" for name in SERVICES)}
    ports = {word.strip("-").removesuffix("port").strip("-") for word in words() if word.endswith("port")}
    names = {f"kvscout{stem}{'-' if port else ''}{port}" for stem in stems for port in ports}
    assert {"kvscout", "kvscout-gateway", "kvscout-scheduler-metrics", "kvscout-mocker-events"} <= names
    environment: dict[str, str] = {}
    for name in names:
        environment |= of_service(name, "10.96.0.7", [("grpc", 7050, "tcp"), ("metrics", 9091, "tcp")])
    for service, program in PROGRAMS.items():
        context = CliRunner().invoke(click.Command("probe", params=program.params, callback=echo_port), env=environment)
        assert context.exit_code == 0, context.output
        assert (
            context.output
            == CliRunner().invoke(click.Command("probe", params=program.params, callback=echo_port)).output
        ), service
        assert environment.keys() & set(variables(program)), service
        (warning,) = warnings(program, environment)
        assert re.fullmatch(
            r"ignored what Kubernetes sets for Services: KVSCOUT_\w+, \w+, \w+ and \d+ more; "
            r"`enableServiceLinks: false` in the pod omits them",
            warning,
        )


def words() -> Iterator[str]:
    """The flags of all programs."""
    for program in PROGRAMS.values():
        for option in program.params:
            yield from option.opts


def echo_port(port: int, host: str, **_: object) -> None:
    click.echo(f"{host}:{port}")


@pytest.mark.parametrize("name", SERVICES)
def test_help_shows_the_variable_of_every_flag(name: str) -> None:
    text = re.sub(r"\s+", "", CliRunner().invoke(PROGRAMS[name], ["--help-all"]).output)
    for option in PROGRAMS[name].params:
        assert isinstance(option, click.Option)
        if not option.expose_value:
            continue  # --version: it is not configured
        stem = option.opts[0].lstrip("-").replace("-", "_").upper()
        assert f"KVSCOUT_{stem}" in text or f"KVSCOUT_{name.upper()}_{stem}" in text


def test_a_variable_that_nobody_reads_is_told_with_the_nearest_that_somebody_does() -> None:
    environment = {
        "KVSCOUT_RUOTER_TTL": "1",
        "kvscout_indexer_prt": "2",
        "KVSCOUT_ROUTER_MODE": "kv",  # the scheduler's
        "KVSCOUT_GATEWAY": "localhost:1",  # the command line's
        "KVSCOUT_NATIVE": "0",
        "HOME": "/",
    }
    assert warnings(PROGRAMS["indexer"], environment) == [
        "nothing reads the variable KVSCOUT_RUOTER_TTL; is it KVSCOUT_ROUTER_TTL?",
        "nothing reads the variable kvscout_indexer_prt; is it KVSCOUT_INDEXER_PORT?",
    ]


def test_a_lower_case_name_counts_where_the_new_one_is_not_set_and_is_told_as_deprecated() -> None:
    old = {"kvscout_scheduler_port": "7", "kvscout_gateway": "localhost:1"}
    assert value_of("KVSCOUT_SCHEDULER_PORT", old) == "7"
    assert value_of("KVSCOUT_SCHEDULER_PORT", old | {"KVSCOUT_SCHEDULER_PORT": "8"}) == "8"
    assert value_of("KVSCOUT_SCHEDULER_PORT", old | {"KVSCOUT_SCHEDULER_PORT": "tcp://10.96.0.7:1"}) == "7"
    assert value_of("NATS_SERVER", {"nats_server": "1"}) is None
    assert warnings(PROGRAMS["scheduler"], old) == [
        "the variable kvscout_gateway is called KVSCOUT_GATEWAY now; the old name is deprecated",
        "the variable kvscout_scheduler_port is called KVSCOUT_SCHEDULER_PORT now; the old name is deprecated",
    ]


def test_a_command_takes_a_lower_case_name_and_says_that_it_is_deprecated() -> None:
    result = CliRunner().invoke(commands, ["workers", "list"], env={"kvscout_gateway": "localhost:1"})
    assert "the variable kvscout_gateway is called KVSCOUT_GATEWAY now; the old name is deprecated" in result.stderr
    assert "no gateway answers at localhost:1" in result.stderr
    assert result.exit_code == 3


async def test_a_service_takes_old_names_ignores_kubernetes_and_warns_of_both_at_start() -> None:
    made = of_service("kvscout-scheduler", "10.96.0.7", [("grpc", 7052, "tcp")])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_scheduler.main", "--metrics-port", "-1"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | made | {"KVSCOUT_ROUTER_MOD": "kv", "kvscout_scheduler_port": "0"},
    )
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_SECONDS):
        ready = json.loads(await process.stdout.readline())
        process.terminate()
        _, log = await process.communicate()
    assert process.returncode == 0
    assert ready["port"] != 7052
    assert b"nothing reads the variable KVSCOUT_ROUTER_MOD; is it KVSCOUT_ROUTER_MODE?" in log
    assert b"the variable kvscout_scheduler_port is called KVSCOUT_SCHEDULER_PORT now" in log
    assert log.count(b"Kubernetes") == 1
