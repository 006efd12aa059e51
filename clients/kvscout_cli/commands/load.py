"""`kvscout load`: send sessions, agents or a trace to a gateway, and watch what it makes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import click
from rich.live import Live

from kvscout_cli.connection import Connection, chosen_model, connection_flags, json_flag, model_flag, option
from kvscout_cli.lifetime import run
from kvscout_cli.load_view import Measurements, line, table
from kvscout_cli.output import echo, plain, print_json
from kvscout_cli.tables import stderr, stdout
from kvscout_common.settings.flags import SectionedCommand
from kvscout_lab.real_time.http_client import sessions_of
from kvscout_lab.real_time.open_loop import Limits, OpenLoop, gateway_target
from kvscout_lab.workloads.generators import Agents, agents
from kvscout_lab.workloads.sessions import MultiTurn, Session, multi_turn
from kvscout_lab.workloads.trace import TraceOptions, trace_sessions
from kvscout_lab.workloads.workload import at_rate

WORKLOADS: Final = ("sessions", "agents")
LINE_SECONDS: Final = 5.0
"""Time between lines where there is no terminal."""
DRAW_SECONDS: Final = 0.5
MAX_SESSIONS: Final = 1_000_000


@click.command(cls=SectionedCommand)
@option(
    "--workload",
    default=WORKLOADS[0],
    show_default=True,
    type=click.Choice(WORKLOADS),
    help="Conversations of people, or of agents with long prompts and tools.",
)
@option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Send a trace in Mooncake's format instead of a workload.",
)
@option(
    "--rate",
    default=2.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Sessions per second; with a trace, a factor of its recorded rate.",
)
@option(
    "--duration",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds in which sessions begin; they are then finished.",
)
@option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Seed of the workload.")
@model_flag
@json_flag
@connection_flags
def command(
    connection: Connection,
    *,
    workload: str,
    trace: Path | None,
    rate: float,
    duration: float,
    seed: int,
    model: str,
    as_json: bool,
) -> None:
    """Send load to a gateway, and show rate, TTFT, hit rate and errors until it is done or Ctrl-C.

    Requests are sent when they are due, however long others take (open loop). Exits with 1 if a request failed.

    \b
        kvscout load
        kvscout load --workload agents --rate 5 --duration 30
    """
    if rate * duration > MAX_SESSIONS:
        raise click.UsageError(f"--rate times --duration is above {MAX_SESSIONS:,} sessions.")
    sessions = _sessions(workload, trace, rate, duration, seed)
    measurements, started = Measurements(), time.monotonic()

    def now() -> float:
        return time.monotonic() - started

    async def send() -> None:
        async with connection.router() as router:
            limits = Limits()
            target = gateway_target(router, await chosen_model(router, model), limits)
            await OpenLoop(target, limits, measurements.add).run(sessions)

    async def shown() -> None:
        sending = asyncio.create_task(send())
        try:
            if as_json:
                await sending
            elif (console := stderr()).is_terminal:
                with Live(table(measurements, now()), console=console, auto_refresh=False, transient=True) as live:
                    while not (await asyncio.wait({sending}, timeout=DRAW_SECONDS))[0]:
                        live.update(table(measurements, now()), refresh=True)
            else:
                while not (await asyncio.wait({sending}, timeout=LINE_SECONDS))[0]:
                    echo(line(measurements, now()), err=True)
            await sending
        finally:
            sending.cancel()
            _print(measurements, now(), as_json=as_json)

    run(shown(), until_signalled=True)
    if measurements.errors:
        raise SystemExit(1)


def _sessions(workload: str, trace: Path | None, rate: float, duration: float, seed: int) -> Iterable[Session]:
    if trace is not None:
        return trace_sessions(trace, TraceOptions(duration_seconds=duration, rate_scale=rate).validate())
    count = max(1, round(rate * duration))
    if workload == "agents":
        return sessions_of(at_rate(agents(Agents(sessions=count, seed=seed)), rate))
    return multi_turn(replace(MultiTurn(), sessions=count, sessions_per_second=rate, seed=seed).validate())


def _print(measurements: Measurements, now: float, *, as_json: bool) -> None:
    if as_json:
        print_json({**plain(measurements.all(now)), "seconds": now, "error_texts": measurements.errors})
        return
    stdout().print(table(measurements, now))
    for text, count in sorted(measurements.errors.items(), key=lambda item: -item[1])[:5]:
        echo(f"{count} × {text}", err=True)
