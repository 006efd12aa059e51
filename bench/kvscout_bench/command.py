"""`kvscout bench`: named workloads, measured on this machine, beside a peer where one is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
from rich.table import Table

from kvscout_bench.all_bench import BENCHES, PARTS, USUAL_PARTS, AllBench
from kvscout_bench.all_bench import PEERS as ALL_PEERS
from kvscout_bench.all_report import cells, columns, markdown
from kvscout_bench.fleet_bench import FleetBench
from kvscout_bench.harness import Bench, Row
from kvscout_cli.connection import option
from kvscout_cli.tables import stderr, stdout
from kvscout_common.settings.flags import SectionedCommand, SectionedGroup


@click.group(name="bench", cls=SectionedGroup, invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Measure on this machine; without a subcommand, everything."""
    if context.invoked_subcommand is None:
        context.invoke(everything)


ABOUT = {
    "index": "Measure the block index against its goals.",
    "ingest": "Measure what taking events in costs an indexer process, and how soon they are found.",
    "scheduler": "Measure what requests cost the scheduler: a real process, and its native core.",
    "gateway": "Measure what requests cost gateway, scheduler and indexer together.",
    "rpc": "Measure what calls cost the transport: server and client, by rate.",
    "http": "Measure what it costs to forward engines' streams, and nothing else.",
    "routers": "Measure clients behind kvscout and other routers: hit rate, latency, cost.",
    "fleet": "Measure an indexer with up to 16,000 ranks: restarts, ingest, scrapes, memory.",
}
QUICK = option("--quick", is_flag=True, help="One short round: shows that it works, judges nothing.")


def _subcommand(name: str, bench: type[Bench]) -> None:
    """Add a subcommand that runs one benchmark."""

    def run(*, as_json: bool, **options: Any) -> None:
        _print(bench(**options).run(_say), as_json=as_json)

    decorators = [
        option("--json", "as_json", is_flag=True, help="Print one JSON object a line."),
        _rounds(bench().rounds),
        option(
            "--only", multiple=True, metavar="PART", help="Only workloads whose name contains this; may be repeated."
        ),
        option(
            "--seconds",
            default=0.0,
            type=click.FloatRange(min=0.0),
            help=f"Length of each run; 0 = {bench.SECONDS[0]:g}.",
        ),
        QUICK,
    ]
    if bench.PEERS:
        measured = "Measure this one too, alternately with ours; may be repeated."
        decorators.append(option("--peer", "peers", multiple=True, type=click.Choice(list(bench.PEERS)), help=measured))
    for decorate in decorators:
        run = decorate(run)
    command.command(name=name, cls=SectionedCommand, help=ABOUT[name])(run)


def _rounds(default: int) -> Callable[..., Any]:
    positive = click.IntRange(min=1)
    runs = "Runs of each workload and side."
    return option("--rounds", default=default, show_default=True, type=positive, help=runs)


for _name in ABOUT:
    _subcommand(_name, FleetBench if _name == "fleet" else BENCHES[_name])


@command.command(name="all", cls=SectionedCommand)
@option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(list(ALL_PEERS)),
    help="Measure this one too, alternately with ours, where it has the same; may be repeated.",
)
@option("--json", "as_json", is_flag=True, help="Print the report as one JSON object, not as Markdown.")
@_rounds(2)
@option(
    "--only",
    "parts",
    multiple=True,
    type=click.Choice(PARTS),
    help="Only this part; may be repeated. Unnamed, routers are left out: they take an hour.",
)
@QUICK
def everything(peers: tuple[str, ...], as_json: bool, rounds: int, parts: tuple[str, ...], quick: bool) -> None:
    """Measure all parts in one run, and report where it ran and where a peer is better."""
    report = AllBench(peers=peers, rounds=rounds, parts=parts or USUAL_PARTS, quick=quick).run(_say)
    click.echo(json.dumps(report.as_json(), ensure_ascii=False) if as_json else markdown(report))
    if all(part.failure for part in report.parts.values()):
        raise SystemExit(1)


def _say(text: str) -> None:
    stderr().print(text, style="dim")


def _print(rows: Iterator[Row], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            click.echo(json.dumps(row.as_json(), ensure_ascii=False))
        return
    _print_table(list(rows))


def _print_table(rows: Sequence[Row]) -> None:
    head = columns(rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, justify="left" if name == "workload" else "right")
    for row in rows:
        table.add_row(*cells(row, head), style="red" if row.met is False else None)
    stdout().print(table)
    if rows:
        machine = rows[0].machine
        stdout().print(
            f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, Linux {machine.kernel}, "
            f"Python {machine.python}, {machine.rustc or 'no rustc'}"
        )
