"""Names of environment variables: none that Kubernetes makes for a Service, and none that nobody reads unnoticed."""

import asyncio
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

from kvscout_common.variables import of_kubernetes, warnings

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


@given(OUR_LABELS | LABELS, PORTS)
def test_no_service_of_kubernetes_has_a_variable_that_a_program_reads(
    name: str, ports: list[tuple[str, int, str]]
) -> None:
    made = of_service(name, "10.96.0.7", ports)
    read = {variable for program in PROGRAMS.values() for variable in variables(program)}
    assert not made.keys() & read
    assert not [variable for variable in made if variable.startswith("kvscout")]
    assert [variable for variable, value in made.items() if not of_kubernetes(variable, value)] == []


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
        assert warnings(program, environment) == []


def words() -> Iterator[str]:
    """The flags of all programs."""
    for program in PROGRAMS.values():
        for option in program.params:
            yield from option.opts


def echo_port(port: int, host: str, **_: object) -> None:
    click.echo(f"{host}:{port}")


@pytest.mark.parametrize("name", SERVICES)
def test_help_shows_the_variable_of_every_flag(name: str) -> None:
    text = re.sub(r"\s+", "", CliRunner().invoke(PROGRAMS[name], ["--help"]).output)
    for option in PROGRAMS[name].params:
        assert isinstance(option, click.Option)
        if not option.expose_value:
            continue  # --version: it is not configured
        stem = option.opts[0].lstrip("-").replace("-", "_")
        assert f"kvscout_{stem}" in text or f"kvscout_{name}_{stem}" in text


def test_a_variable_that_nobody_reads_is_told_with_the_nearest_that_somebody_does() -> None:
    environment = {
        "kvscout_ruoter_ttl": "1",
        "KVSCOUT_INDEXER_PORT": "2",
        "kvscout_router_mode": "kv",  # the scheduler's
        "kvscout_gateway": "localhost:1",  # the command line's
        "kvscout_native": "0",
        "HOME": "/",
    }
    assert warnings(PROGRAMS["indexer"], environment) == [
        "nothing reads the variable KVSCOUT_INDEXER_PORT; is it kvscout_indexer_port?",
        "nothing reads the variable kvscout_ruoter_ttl; is it kvscout_router_ttl?",
    ]


async def test_a_service_warns_at_start() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_scheduler.main", "--port", "0", "--metrics-port", "-1"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"kvscout_router_mod": "kv", "KVSCOUT_SCHEDULER_PORT": "tcp://10.96.0.7:7052"},
    )
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_SECONDS):
        await process.stdout.readline()
        process.terminate()
        _, log = await process.communicate()
    assert process.returncode == 0
    assert b"nothing reads the variable kvscout_router_mod; is it kvscout_router_mode?" in log
    assert b"KVSCOUT_SCHEDULER_PORT" not in log
