"""`kvscout bench`: named workloads, measured on this machine, beside a peer where one is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
from rich.table import Table

from kvscout_bench.all_bench import PARTS, AllBench
from kvscout_bench.all_bench import PEERS as ALL_PEERS
from kvscout_bench.all_report import markdown, number
from kvscout_bench.gateway_bench import PEERS as GATEWAY_PEERS
from kvscout_bench.gateway_bench import GatewayBench
from kvscout_bench.harness import Row
from kvscout_bench.http_bench import PEERS as HTTP_PEERS
from kvscout_bench.http_bench import HttpBench
from kvscout_bench.index_bench import PEERS, IndexBench
from kvscout_bench.ingest import PEERS as INGEST_PEERS
from kvscout_bench.ingest import IngestBench
from kvscout_bench.rpc_bench import PEERS as RPC_PEERS
from kvscout_bench.rpc_bench import RpcBench
from kvscout_bench.scheduler_bench import SchedulerBench
from kvscout_cli.connection import option
from kvscout_cli.output import stderr, stdout
from kvscout_common.settings.flags import SectionedCommand, SectionedGroup


@click.group(name="bench", cls=SectionedGroup, invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Measure on this machine; without a subcommand, everything."""
    if context.invoked_subcommand is None:
        context.invoke(everything)


def _subcommand(
    name: str,
    bench: Callable[..., Any],
    about: str,
    *,
    peer: Sequence[str] = (),
    peers: Sequence[str] = (),
    rounds: int = 3,
) -> None:
    """Add a subcommand that runs one benchmark.

    Args:
        name: Name of the subcommand.
        bench: Makes the benchmark of its options.
        about: Help text.
        peer: Peers of which one may be measured too.
        peers: Peers of which several may be.
        rounds: Default of `--rounds`.
    """

    def run(*, as_json: bool, **options: Any) -> None:
        if peer:
            options["peer"] = options["peer"] or ""
        _print(bench(**options).run(_say), as_json=as_json)

    decorators = [
        option("--json", "as_json", is_flag=True, help="Print one JSON object a line."),
        option(
            "--rounds",
            default=rounds,
            show_default=True,
            type=click.IntRange(min=1),
            help="Runs of each workload and side.",
        ),
        option(
            "--only", multiple=True, metavar="PART", help="Only workloads whose name contains this; may be repeated."
        ),
        option("--quick", is_flag=True, help="One short round: shows that it works, judges nothing."),
    ]
    if peer:
        decorators.append(option("--peer", type=click.Choice(peer), help="Measure this one too, in turns with ours."))
    if peers:
        several = "Measure this one too, in turns with ours; may be repeated."
        decorators.append(option("--peer", "peers", multiple=True, type=click.Choice(peers), help=several))
    for decorate in decorators:
        run = decorate(run)
    command.command(name=name, cls=SectionedCommand, help=about)(run)


_subcommand("index", IndexBench, "Measure the block index against its goals.", peer=PEERS, rounds=5)
_subcommand(
    "ingest",
    IngestBench,
    "Measure what taking events in costs an indexer process, and how soon they are found.",
    peer=INGEST_PEERS,
)
_subcommand(
    "scheduler", SchedulerBench, "Measure what requests cost the scheduler: a real process, and its native core."
)
_subcommand(
    "gateway",
    GatewayBench,
    "Measure what requests cost gateway, scheduler and indexer together.",
    peers=GATEWAY_PEERS,
)
_subcommand("rpc", RpcBench, "Measure what calls cost the transport: server and client, by rate.", peer=RPC_PEERS)
_subcommand("http", HttpBench, "Measure what it costs to forward engines' streams, and nothing else.", peers=HTTP_PEERS)


@command.command(name="all", cls=SectionedCommand)
@option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(list(ALL_PEERS)),
    help="Measure this one too, in turns with ours, where it has the same; may be repeated.",
)
@option("--json", "as_json", is_flag=True, help="Print the report as one JSON object, not as Markdown.")
@option("--rounds", default=2, show_default=True, type=click.IntRange(min=1), help="Runs of each workload and side.")
@option("--only", "parts", multiple=True, type=click.Choice(PARTS), help="Only this part; may be repeated.")
@option("--quick", is_flag=True, help="One short round: shows that it works, judges nothing.")
def everything(peers: tuple[str, ...], as_json: bool, rounds: int, parts: tuple[str, ...], quick: bool) -> None:
    """Measure everything in one run, and report where it ran and where a peer is better."""
    report = AllBench(peers=peers, rounds=rounds, parts=parts or PARTS, quick=quick).run(_say)
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
    _print_table(rows)


def _print_table(rows: Iterator[Row]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("workload")
    for column in ("value", "unit", "goal", "met", "p99", "peer", "peer p99", "ratio", "rounds from", "to"):
        table.add_column(column, justify="left" if column in ("unit", "met") else "right")
    machine = None
    for row in rows:
        met = {None: "–", True: "yes", False: "no"}[row.met]
        low, high = row.spread
        table.add_row(
            *(row.title, number(row.value), row.unit, number(row.goal), met, number(row.p99)),
            *(number(row.peer), number(row.peer_p99), f"{row.ratio:.2f}×" if row.ratio else "–"),
            *(number(low), number(high)),
        )
        machine = row.machine
    stdout().print(table)
    if machine is not None:
        stdout().print(
            f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, Linux {machine.kernel}, "
            f"Python {machine.python}, {machine.rustc or 'no rustc'}"
        )
