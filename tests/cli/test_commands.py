"""The commands that talk to a gateway: what they ask, print and exit with."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest
from click import shell_completion
from click.testing import CliRunner, Result
from google.protobuf import proto
from support.fake_gateway import FakeGateway, fake_gateway

from kvscout.v1 import events_pb2, gateway_pb2, types_pb2
from kvscout_cli.main import main
from kvscout_common import __version__, errors
from kvscout_common.registry.worker_proto import spec_from_proto
from kvscout_common.worker import EngineKind, Role

LONG_ID = "a-worker-with-a-name-that-is-longer-than-a-terminal-is-wide-of-which-lines-stay-lines"


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """A fake gateway on a thread of its own: commands run a loop themselves."""
    ready, stop = threading.Event(), threading.Event()
    found: list[FakeGateway] = []

    async def serve() -> None:
        async with fake_gateway() as fake:
            found.append(fake)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield found[0]
    stop.set()
    thread.join()


def kvscout(gateway: FakeGateway, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin, env={"KVSCOUT_GATEWAY": gateway.address})


def test_route_prints_where_a_prompt_goes_and_why(gateway: FakeGateway) -> None:
    result = kvscout(gateway, "route", "1", "2,3", "--explain", "--policy", "random")
    assert result.exit_code == 0, result.output
    assert "w0, rank 1" in result.stdout
    assert "3 of 4 blocks, 48 of 3 tokens" in result.stdout
    assert "least cost (policy kv)" in result.stdout
    asked = gateway.last
    assert (list(asked.token_ids), asked.model, asked.request_id) == ([1, 2, 3], "m", "")
    assert asked.router_config_override.policy == "random"


def test_route_reads_stdin_and_prints_json(gateway: FakeGateway) -> None:
    result = kvscout(gateway, "route", "--file", "-", "--json", "--model", "other", stdin="[7, 8]")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["worker"] == {"worker_id": "w0", "dp_rank": 1}
    assert (gateway.last.model, list(gateway.last.token_ids)) == ("other", [7, 8])


def test_route_asks_for_a_worker_of_the_role_that_is_named(gateway: FakeGateway) -> None:
    for role, asked in (("prefill", types_pb2.ROLE_PREFILL), ("decode", types_pb2.ROLE_DECODE)):
        assert kvscout(gateway, "route", "1", "--role", role).exit_code == 0
        assert gateway.last.role == asked
    refused = kvscout(gateway, "route", "1", "--role", "both")
    assert (refused.exit_code, "'--role'" in refused.output) == (2, True)


def test_generate_streams_text_and_tells_what_was_cached(gateway: FakeGateway) -> None:
    gateway.chunks = [
        gateway_pb2.GenerateResponse(
            token_ids=[5],
            text="hello ",
            route=gateway_pb2.RouteResponse(worker=types_pb2.WorkerRank(worker_id=LONG_ID)),
        ),
        gateway_pb2.GenerateResponse(token_ids=[6], finish_reason=gateway_pb2.FINISH_REASON_LENGTH),
        gateway_pb2.GenerateResponse(usage=gateway_pb2.Usage(prompt_tokens=40, completion_tokens=2, cached_tokens=32)),
    ]
    result = kvscout(gateway, "generate", "1", "2", "--max-tokens", "2")
    assert result.exit_code == 0, result.output
    assert result.stdout == "hello 6 \n"
    [summary] = result.stderr.splitlines()
    assert summary.startswith(f"{LONG_ID}, rank 0 · 40 prompt tokens, 32 cached · 2 generated · first after ")
    as_json = kvscout(gateway, "generate", "1", "2", "--json")
    answer = json.loads(as_json.stdout)
    assert (answer["token_ids"], answer["finish_reason"], answer["usage"]["cached_tokens"]) == ([5, 6], "length", 32)


def test_the_timeout_of_generate_is_for_its_first_token_and_not_for_all_that_follows(gateway: FakeGateway) -> None:
    gateway.seconds_between_chunks = 0.4
    gateway.chunks = [gateway_pb2.GenerateResponse(token_ids=[token]) for token in (5, 6, 7)]
    result = kvscout(gateway, "generate", "1", "--model", "m", "--timeout", "0.6")
    assert (result.exit_code, result.stdout) == (0, "5 6 7 \n"), result.stderr
    gateway.chunks = [
        gateway_pb2.GenerateResponse(route=gateway_pb2.RouteResponse(worker=types_pb2.WorkerRank(worker_id="w0")))
    ]
    gateway.hang_after_chunks = True
    result = kvscout(gateway, "generate", "1", "--model", "m", "--timeout", "0.3")
    assert result.exit_code != 0
    assert "no token came within 0.3 s" in result.stderr


def test_engine_and_role_of_a_worker_are_typed_as_the_workers_file_has_them(gateway: FakeGateway) -> None:
    arguments = ("workers", "register", "w", "--model", "m", "--block-size", "16")
    for engine in EngineKind:
        assert kvscout(gateway, *arguments, "--engine", engine.value).exit_code == 0, engine
        assert spec_from_proto(gateway.last.worker).engine is engine
    for role in Role:
        assert kvscout(gateway, *arguments, "--role", role.value).exit_code == 0, role
        assert spec_from_proto(gateway.last.worker).role is role
    assert "[default: vllm]" in kvscout(gateway, "workers", "register", "--help").stdout


def test_workers_are_listed_registered_drained_and_removed(gateway: FakeGateway) -> None:
    listed = kvscout(gateway, "workers", "list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["worker", "w0", "w1"]
    arguments = (
        "--model",
        "m",
        "--block-size",
        "16",
        "--event-endpoint",
        "tcp://h:1",
        "--label",
        "zone=a",
        "--tenant",
        "t",
    )
    registered = kvscout(gateway, "workers", "register", "w9", *arguments)
    assert (registered.exit_code, registered.stdout) == (0, "w9 registered\n")
    worker = gateway.last.worker
    assert (worker.tenant, worker.event_endpoints[0].endpoint, dict(worker.labels)) == ("t", "tcp://h:1", {"zone": "a"})
    assert kvscout(gateway, "workers", "drain", "w0").stdout == "w0 drains, 2 requests active\n"
    assert kvscout(gateway, "workers", "drain", "w0", "--undo").stdout == "w0 takes requests again\n"
    assert json.loads(kvscout(gateway, "workers", "remove", "w0", "--json").stdout) == {"removed": ["w0"]}


def test_workers_of_a_revision_are_drained_together(gateway: FakeGateway) -> None:
    nobody = kvscout(gateway, "workers", "drain", "--revision", "7")
    assert nobody.exit_code == 1
    assert "no worker has the label revision=7; there are none" in nobody.stderr
    assert "Name workers, or give --revision" in kvscout(gateway, "workers", "drain").stderr
    gateway.labels = {"revision": "7"}
    heading, *rows = kvscout(gateway, "workers", "list").stdout.splitlines()
    assert "revision" in heading.split()
    assert [row.split()[5] for row in rows] == ["7", "–"]
    drained = kvscout(gateway, "workers", "drain", "--revision", "7", "w1")
    assert sorted(line.split()[0] for line in drained.stdout.splitlines()) == ["w0", "w1"]


def test_active_requests_are_listed(gateway: FakeGateway) -> None:
    lines = kvscout(gateway, "requests", "--worker-id", "w0").stdout.splitlines()
    assert [line.split()[:5] for line in lines[1:]] == [["r", "m", "decode", "w0/1", "decode"]]
    [active] = json.loads(kvscout(gateway, "requests", "--json").stdout)
    assert (active["request_id"], active["blocks"]) == ("r", 7)


def test_failures_are_listed_with_cause_owner_and_workers(gateway: FakeGateway) -> None:
    heading, line = kvscout(gateway, "failures", "--whose", "engine", "--worker", "w0").stdout.splitlines()
    assert heading.split() == ["time", "whose", "cause", "status", "path", "model", "workers", "request", "message"]
    assert "engine  worker  UNAVAILABLE  Generate  m      w0, w1   r        the worker broke off" in line
    assert (gateway.last.worker_id, gateway.last.tenant) == ("w0", "*")
    [failure] = json.loads(kvscout(gateway, "failures", "--json").stdout)
    assert (failure["owner"], failure["worker_ids"]) == ("engine", ["w0", "w1"])
    assert kvscout(gateway, "failures", "--whose", "nobody").exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("route",),
        ("route", "x"),
        ("route", "1", "--file", "-"),
        ("workers", "register"),
        ("workers", "register", "w", "--model", "m"),
        ("workers", "register", "w", "--model", "m", "--block-size", "16", "--label", "nothing"),
        ("workers", "register", "w", "--model", "m", "--block-size", "16", "--replay-endpoint", "tcp://h:1"),
        ("workers", "register", "w", "--model", "m", "--block-size", "16", "--event-endpoint", "nowhere"),
        ("nonsense",),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_before_anything_is_asked(gateway: FakeGateway, arguments: tuple[str, ...]) -> None:
    result = kvscout(gateway, *arguments, stdin="1")
    assert result.exit_code == 2
    assert "rror: " in result.stderr
    assert gateway.requests == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgument("negative", field="router_temperature"), 2),
        (errors.NotFound("no such model"), 1),
        (errors.ResourceExhausted("all busy"), 1),
        (errors.Unavailable("no worker now"), 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_line_and_an_exit_code(gateway: FakeGateway, error: errors.KvscoutError, code: int) -> None:
    gateway.errors["Route"] = error
    result = kvscout(gateway, "route", "1")
    assert (result.exit_code, result.stderr, result.stdout) == (code, f"error: {error}\n", "")


def test_a_gateway_that_is_not_there_is_said_so() -> None:
    result = CliRunner().invoke(main, ["workers", "list", "--gateway", "127.0.0.1:1"])
    assert result.exit_code == 3
    assert result.stderr == "error: no gateway answers at 127.0.0.1:1; `kvscout up` starts one on this machine\n"


def commands() -> list[tuple[str, ...]]:
    context = click.Context(main)
    found: list[tuple[str, ...]] = []
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        found.append((name,))
        if isinstance(command, click.Group):
            found += [(name, other) for other in command.list_commands(context)]
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_has_help_and_tells_its_version(command: tuple[str, ...]) -> None:
    long, short = (CliRunner().invoke(main, [*command, flag]) for flag in ("--help", "-h"))
    assert (long.exit_code, long.stdout) == (0, short.stdout)
    version = CliRunner().invoke(main, [*command, "--version"])
    assert (version.exit_code, version.stdout.split()[-1]) == (0, __version__)


@pytest.mark.parametrize("scheme", ["http://", "grpc://", "HTTP://"])
def test_a_scheme_before_the_gateways_address_is_left_out(gateway: FakeGateway, scheme: str) -> None:
    result = CliRunner().invoke(main, ["route", "1", "--gateway", f"{scheme}{gateway.address}/"])
    assert result.exit_code == 0, result.output


def test_a_url_of_another_scheme_is_refused_with_what_to_give(gateway: FakeGateway) -> None:
    result = CliRunner().invoke(main, ["route", "1", "--gateway", f"https://{gateway.address}"])
    assert result.exit_code == 2
    assert "is a URL: give host:port, and --tls-ca for TLS" in result.stderr


def test_a_role_without_workers_is_answered_with_the_roles_that_have_some(gateway: FakeGateway) -> None:
    gateway.errors["Route"] = errors.Unavailable("model 'm' has no prefill worker now")
    result = kvscout(gateway, "route", "1", "--role", "prefill")
    assert result.exit_code == 3
    assert result.stderr == "error: model 'm' has no prefill worker now: choose --role aggregated\n"


MAX_HELP_LINES = 60


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_of_a_command_fits_a_screen_and_says_where_the_rest_is(command: tuple[str, ...]) -> None:
    check_help(main, *command)


@pytest.mark.parametrize("service", ["indexer", "scheduler", "gateway", "bridge", "mocker"])
def test_help_of_a_service_fits_a_screen_and_says_where_the_rest_is(service: str) -> None:
    check_help(import_module(f"kvscout_{service}.main").main)


def check_help(program: click.Command, *command: str) -> None:
    short, full = (
        CliRunner().invoke(program, [*command, flag], env={"COLUMNS": "80"}) for flag in ("-h", "--help-all")
    )
    assert short.exit_code == 0
    assert len(short.stdout.splitlines()) <= MAX_HELP_LINES
    if isinstance(found(program, *command), click.Group):
        return
    assert full.exit_code == 0
    flags = re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", full.stdout, re.MULTILINE)
    listed = re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", short.stdout, re.MULTILINE)
    assert set(listed) <= {*flags, "--help-all"}
    told = re.search(r"^(\d+) more flags: .* --help-all$", short.stdout, re.MULTILINE)
    assert (told is not None) == (set(listed) - {"--help-all"} < set(flags))
    assert told is None or int(told[1]) == len(set(flags) - set(listed) - {"--version"})


def found(program: click.Command, *names: str) -> click.Command:
    """The command of these names."""
    for name in names:
        assert isinstance(program, click.Group)
        inner = program.get_command(click.Context(program), name)
        assert inner is not None
        program = inner
    return program


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["servr"], "No such command 'servr'. Did you mean 'serve'?"),
        (["workers", "lst"], "No such command 'lst'. Did you mean 'list'?"),
        (["status", "--gatewy", "x"], "No such option '--gatewy'. Did you mean '--gateway'?"),
    ],
)
def test_an_unknown_command_or_flag_is_told_with_the_nearest(words: list[str], expected: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert f"Error: {expected}" in result.stderr


WITHOUT_JSON = {("serve",), ("up",), ("down",), ("health",), ("break",), ("logs",), ("record",)}
"""What starts, breaks and ends processes or shows their logs, or tells by its exit code."""


def test_whatever_prints_what_it_found_prints_it_as_json_too() -> None:
    context = click.Context(main)
    without = set()
    for name in commands():
        command: click.Command | None = main
        for part in name:
            assert isinstance(command, click.Group)
            command = command.get_command(context, part)
        assert command is not None
        flags = {flag for parameter in command.params for flag in parameter.opts}
        if not isinstance(command, click.Group) and "--json" not in flags:
            without.add(name)
    assert without == WITHOUT_JSON


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_completes_commands_flags_and_what_they_take(shell: str) -> None:
    kind = shell_completion.get_completion_class(shell)
    assert kind is not None
    completing = kind(main, {}, "kvscout", "_KVSCOUT_COMPLETE")

    def offered(line: str, word: str) -> set[str]:
        return {item.value for item in completing.get_completions(line.split(), word)}

    for *above, name in commands():
        assert name in offered(" ".join(above), name[:2]), (above, name)
        assert {"--help", "--version"} <= offered(" ".join([*above, name]), "--"), (above, name)
    assert {"prefill", "decode"} <= offered("workers register w --role", "")
    assert {"kv", "kv-time", "round-robin"} <= offered("route --policy", "")
    for program in ("serve", "up"):
        assert offered(f"{program} --router-mode", "round") == {"round-robin"}, program
    assert offered("route --gateway localhost:1 --model", "") == set()


@pytest.mark.parametrize(
    ("words", "begun", "expected"),
    [
        (["workers", "drain"], "", {"w0", "w1"}),
        (["requests", "--worker-id"], "w1", {"w1"}),
        (["route", "--model"], "", {"m"}),
        (["workers", "drain"], "x", set()),
    ],
)
def test_workers_and_models_of_the_gateway_are_completed(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, words: list[str], begun: str, expected: set[str]
) -> None:
    monkeypatch.setenv("KVSCOUT_GATEWAY", gateway.address)
    completing = shell_completion.BashComplete(main, {}, "kvscout", "_KVSCOUT_COMPLETE")
    assert {item.value for item in completing.get_completions(words, begun)} == expected


@pytest.mark.parametrize("service", ["indexer", "scheduler", "gateway", "bridge", "mocker"])
def test_every_service_has_help_and_tells_its_version(service: str) -> None:
    program = import_module(f"kvscout_{service}.main").main
    assert CliRunner().invoke(program, ["-h"]).exit_code == 0
    assert __version__ in CliRunner().invoke(program, ["--version"]).stdout


def test_a_list_of_commands_cuts_no_sentence() -> None:
    for group in ((), ("workers",), ("bench",)):
        listed = CliRunner().invoke(main, [*group, "-h"]).stdout.partition("Commands:")[2]
        assert listed
        assert "..." not in listed


def test_loads_of_every_role_are_shown(gateway: FakeGateway) -> None:
    heading, *lines = kvscout(gateway, "loads", "--model", "m").stdout.splitlines()
    assert heading.split()[:2] == ["worker", "role"]
    roles = ["aggregated", "prefill", "decode"]
    shown = ["1", "0", "0", "–", "left", "out", "7.0", "s", "hangs"]
    assert [line.split() for line in lines] == [["w0/0", role, *shown] for role in roles]
    [load] = json.loads(kvscout(gateway, "loads", "--role", "decode", "--json").stdout)
    assert (load["role"], load["active_requests"], load["busy"]) == ("decode", 1, True)
    assert gateway.last.role == types_pb2.ROLE_DECODE


def test_dump_prints_a_line_a_worker_or_every_chunk_and_writes_them_to_a_file(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    path = tmp_path / "state.bin"
    result = kvscout(gateway, "dump", "--model", "m", "--output", str(path))
    assert result.exit_code == 0, result.output
    assert result.stdout.split("\n")[1].split() == ["w0", "0", "m", "4", "2", "0", "7", *result.stdout.split()[-2:]]
    assert result.stdout.split()[-1] == "incomplete"
    assert gateway.last.model == "m"
    with path.open("rb") as file:
        chunks = [proto.parse_length_prefixed(events_pb2.KvEventBatch, file) for _ in range(2)]  # type: ignore[arg-type]
        assert not file.read()
    assert [chunk.events[0].state.index for chunk in chunks] == [0, 1]
    result = kvscout(gateway, "dump", "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["events"][0]["state"].get("last", False) for line in lines] == [False, True]
