"""`kvscout up`: a whole kvscout on this machine, running until stopped."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from kvscout_cli.connection import option
from kvscout_cli.lifetime import run
from kvscout_cli.output import echo
from kvscout_cli.process import ManagedProcess, ProcessFailed
from kvscout_cli.relay import SERVICES, given_words, relay, relayed_flags
from kvscout_cli.stack import READY_SECONDS, Stack
from kvscout_cli.state import StateDirectory
from kvscout_cli.topology import DEFAULT_PORTS, Mockers, Ports, Running, Topology, launch, same_engine
from kvscout_common.errors import FailedPrecondition, NotFound
from kvscout_common.known_names import or_known
from kvscout_common.settings.flags import SectionedCommand, flag
from kvscout_common.worker import Role, Transport

_FLAGS = relayed_flags()

_FREE_PORTS = Ports(gateway_metrics=0, indexer_metrics=0, scheduler_metrics=0, bridge_metrics=0, gateway_http=0)

NAME_WIDTH = 10
"""Characters of a process's name before its lines in the log."""
DEFAULT_STATE_DIR = ".kvscout"

state_dir_flag = flag(
    "--state-dir",
    section="Options",
    default=DEFAULT_STATE_DIR,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of its lock, state and log.",
)


FIRST = (
    "--mockers",
    "--prefill",
    "--blocks",
    "--workers-file",
    "--transport",
    "--one-process",
    "--free-ports",
    "--detach",
    "--log-level",
    "--state-dir",
    "--router-mode",
    "--tokenizer",
)
"""Flags that --help shows."""


@click.command(cls=SectionedCommand, first=FIRST)
@option("--mockers", default=4, show_default=True, type=click.IntRange(0, 64), help="Simulated engines.")
@option(
    "--prefill",
    default=0,
    show_default=True,
    type=click.IntRange(0, 63),
    help="Number of these engines that are prefill workers; the others are decode workers.",
)
@option("--blocks", default=4096, show_default=True, type=click.IntRange(min=2), help="KV blocks of each of them.")
@option(
    "--workers-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML file of real engines; no simulated ones are started.",
)
@option(
    "--transport",
    default=Transport.ZMQ.value,
    show_default=True,
    type=click.Choice([Transport.ZMQ.value, Transport.NATS_CORE.value, Transport.JETSTREAM.value]),
    help="Transport of events to the indexer; with NATS, a private server and a bridge are also started.",
)
@option("--one-process", is_flag=True, help="Indexer, scheduler and gateway as one process, `kvscout serve`.")
@option("--free-ports", is_flag=True, help="Any free ports instead of the default ones.")
@option("--detach", is_flag=True, help="Return when it is up; `kvscout down` stops it.")
@option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Minimum severity of logged messages, in all processes.",
)
@state_dir_flag
@relay(_FLAGS)
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    mockers: int,
    prefill: int,
    blocks: int,
    workers_file: Path | None,
    transport: str,
    one_process: bool,
    free_ports: bool,
    detach: bool,
    log_level: str,
    state_dir: Path,
    **_relayed: Any,
) -> None:
    """Start indexer, scheduler, gateway and engines, and keep them until Ctrl-C or `kvscout down`.

    It also takes the services' own flags, and passes them on.
    """
    if prefill and prefill >= mockers:
        raise click.UsageError("--prefill leaves no engine that answers: it must be below --mockers.")
    state = StateDirectory(state_dir)
    if detach:
        _detach(state)
        return
    level = ("--log-level", log_level)
    topology = Topology(
        one_process=one_process,
        mockers=Mockers(mockers, prefill, num_gpu_blocks=blocks, flags=level),
        workers_file=workers_file,
        ports=_FREE_PORTS if free_ports else DEFAULT_PORTS,
        transport=Transport(transport),
        bridge_flags=level,
        indexer_flags=(*level, *given_words(context, _FLAGS, "indexer")),
        scheduler_flags=(*level, *given_words(context, _FLAGS, "scheduler")),
        gateway_flags=(*level, *given_words(context, _FLAGS, *(SERVICES if one_process else ("gateway",)))),
    )
    with state.held():
        run(_keep(topology, state), until_signalled=True)


async def _keep(topology: Topology, state: StateDirectory) -> None:
    with TemporaryDirectory(prefix="kvscout-") as directory, state.log() as write:

        def on_line(name: str, line: str) -> None:
            write(f"{name:<{NAME_WIDTH}} {line}")

        async with Stack(on_line=on_line) as stack:
            running = await launch(stack, topology, Path(directory))
            _write_state(state, running, stack)
            echo(how_to_talk_to_it(state.read()))
            echo("Ctrl-C or `kvscout down` stops it.")

            def say(sentence: str) -> None:
                on_line("up", sentence)
                _write_state(state, running, stack)

            await stack.keep(same_engine, say)


def _write_state(state: StateDirectory, running: Running, stack: Stack) -> None:
    engines = {worker.worker_id: worker.http_endpoint for worker in running.workers}
    state.write(
        {
            **{name: address for name, address in asdict(running).items() if name != "workers"},
            "workers": list(engines),
            "model": running.workers[0].model if running.workers else "",
            "prefill_apart": Role.PREFILL in {worker.role for worker in running.workers},
            "processes": {process.program.name: process.pid for process in stack.processes},
            "engines": {
                process.program.name: engines[process.program.name]
                for process in stack.processes
                if process.program.name in engines
            },
            "serves": {process.program.name: _served(process) for process in stack.processes if process.ready_line},
            "has_dashboard": all("--no-dashboard" not in process.program.arguments for process in stack.processes),
        }
    )


@dataclass(frozen=True, slots=True)
class RunningStack:
    """Processes that `kvscout up` started, for commands that act on them."""

    processes: Mapping[str, int]
    """Process ids by name."""
    engines: Mapping[str, str]
    """URLs of the simulated engines by name."""

    @classmethod
    def of(cls, state_dir: Path) -> RunningStack:
        """Read the state of a stack.

        Raises:
            FailedPrecondition: None runs.
        """
        state = StateDirectory(state_dir)
        read = state.read() if state.is_held() else {}
        if not read:
            raise FailedPrecondition(f"kvscout is not up in {state_dir}; `kvscout up --detach` starts it")
        return cls(read["processes"], read["engines"])

    def engine(self, name: str) -> tuple[str, int]:
        """Return the URL and process id of a simulated engine.

        Raises:
            NotFound: There is none of the name.
        """
        if name not in self.engines:
            raise NotFound(f"there is no simulated engine {name!r}{or_known(name, self.engines)}")
        return self.engines[name], self.processes[name]


def complete_engine(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the simulated engines that run."""
    return _names(context, "engines", incomplete)


def complete_process(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the processes that run."""
    return _names(context, "processes", incomplete)


def _names(context: click.Context, kind: str, incomplete: str) -> list[str]:
    state = StateDirectory(Path(context.params.get("state_dir") or DEFAULT_STATE_DIR))
    return [name for name in state.read().get(kind, {}) if name.startswith(incomplete)]


def how_to_talk_to_it(state: Mapping[str, Any]) -> str:
    """Return addresses, and commands that work where they are pasted."""
    gateway, workers, kvscout = state["gateway"], len(state["workers"]), _program()
    is_default = gateway.endswith(":7050")
    role = " --role prefill" if state["prefill_apart"] else ""
    body = json.dumps({"model": state["model"], "prompt": "hello", "max_tokens": 8})
    commands = [] if is_default else [f"export KVSCOUT_GATEWAY={gateway}"]
    if workers:
        commands += [
            f"{kvscout} generate $(seq 1 64) --max-tokens 8",
            f"{kvscout} route $(seq 1 64) --explain{role}",
            f"curl {state['openai']}/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        ]
    commands.append(f"{kvscout} top")
    served = "\n".join(f"  {name:<{NAME_WIDTH}} {what}" for name, what in state["serves"].items())
    page = f"\ndashboard: {state['openai'].removesuffix('v1')}\n" if state["has_dashboard"] else ""
    lines = "\n".join(f"  {command}" for command in commands)
    return f"""
kvscout is up, with {workers} worker{"s" * (workers != 1)}:

{served}

Try, in any terminal:

{lines}
{page}"""


def _program() -> str:
    """Return how a shell calls this program: by its name where that is on the path, else by its file."""
    script = Path(sys.executable).with_name("kvscout")
    if (found := shutil.which("kvscout")) is not None and Path(found).samefile(script):
        return "kvscout"
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m kvscout_cli.main"


def _served(process: ManagedProcess) -> str:
    """Return the addresses of a process, by its ready line."""
    ready, here = process.ready_line, "127.0.0.1"
    if "ranks" in ready:
        events = (event for rank in ready["ranks"] for event in (rank["events"], rank["replay"]) if event)
        return " · ".join([f"http://{here}:{ready['http_port']}", *events])
    found = [f"nats://{here}:{ready['port']}" if ready["service"] == "nats" else f"gRPC {here}:{ready['port']}"]
    if "http_port" in ready:
        found.append(f"OpenAI http://{here}:{ready['http_port']}/v1")
        if "--no-dashboard" not in process.program.arguments:
            found.append(f"dashboard http://{here}:{ready['http_port']}/")
    if "endpoint_picker_port" in ready:
        found.append(f"endpoint picker {here}:{ready['endpoint_picker_port']}")
    if "metrics_port" in ready:
        found.append(f"metrics http://{here}:{ready['metrics_port']}/metrics")
    return " · ".join(found)


def _detach(state: StateDirectory) -> None:
    arguments = [word for word in sys.argv[1:] if word != "--detach"]
    state.log_file.parent.mkdir(parents=True, exist_ok=True)
    with state.log_file.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvscout_cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + 2 * READY_SECONDS
    while state.read().get("pid") != process.pid:
        tail = tuple(state.log_file.read_text().splitlines()[-30:])
        if process.poll() is not None:
            raise ProcessFailed(f"kvscout up ended with code {process.returncode}", tail)
        if time.monotonic() >= deadline:
            process.terminate()
            raise ProcessFailed("kvscout up was not ready in time", tail)
        time.sleep(0.1)
    echo(how_to_talk_to_it(state.read()))
    echo("`kvscout logs` prints its log, `kvscout down` stops it.")
