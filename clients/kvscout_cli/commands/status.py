"""`kvscout status`: is everything there, and do the events of every worker come?"""

from __future__ import annotations

from collections.abc import Mapping

import click
from rich.text import Text

from kvscout_cli.connection import Services, json_flag, services_flags
from kvscout_cli.lifetime import run
from kvscout_cli.output import age, print_json
from kvscout_cli.tables import columns, stderr, stdout
from kvscout_common.doctor.overview import Overview, QueueRow, ServiceRow, SourceRow, overview
from kvscout_common.settings.flags import SectionedCommand


@click.command(cls=SectionedCommand)
@json_flag
@services_flags
def command(services: Services, *, as_json: bool) -> None:
    """Show every service, every worker and its events; exit with 1 if something is wrong.

    The gateway names its indexers and schedulers, and workers name their bridges. ADDRESS is a further service.

    \b
        kvscout status
        kvscout status --gateway 10.0.0.5:7050 10.0.0.6:7050 --json
    """
    shown = overview(run(services.snapshot(engines=False)))
    if as_json:
        print_json(shown)
    else:
        _print(shown)
    if not shown.well:
        raise SystemExit(1)


def _print(shown: Overview) -> None:
    console = stdout()
    table = columns("service", "address", "version", "up", "state")
    for row in shown.services:
        table.add_row(
            *(row.kind or "?", row.address, row.version or "–", age(row.uptime_seconds)),
            Text(row.state, style="" if row.well else "red"),
        )
    console.print(table)
    if shown.sources:
        console.print()
        console.print(_sources(shown.sources))
    if shown.queue:
        console.print()
        console.print(_queue(shown.queue))
    if any(shown.failed.values()) or shown.answered:
        console.print()
        console.print(
            f"failed: {_failed(shown.failed)}; answered with less knowledge, or by another worker: {shown.answered:,}"
        )
    for trouble in shown.troubles:
        stderr().print(Text(trouble, style="red"), soft_wrap=True)
    for row in shown.services:
        for warning in row.warnings:
            stderr().print(Text(f"{_name(row)}: {warning}", style="yellow"), soft_wrap=True)


def _failed(failed: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} by the {owner}" for owner, number in failed.items())


def _sources(rows: tuple[SourceRow, ...]) -> object:
    several = len({row.indexer for row in rows}) > 1
    tenants = len({row.tenant for row in rows}) > 1
    table = columns(
        *(["tenant"] if tenants else []),
        *("worker", "model"),
        *(["indexer"] if several else []),
        *("state", "events", "age", "blocks", "requests", "prediction error", "address", "why"),
        right=("age", "blocks", "requests", "prediction error"),
    )
    for row in rows:
        error = "–" if row.prediction_error is None else f"{100 * row.prediction_error:.0f} %"
        cells = [
            *([row.tenant] if tenants else []),
            *(f"{row.worker_id}/{row.dp_rank}", row.model),
            *([row.indexer or "–"] if several else []),
        ]
        reasons = (row.health.why, row.reason)
        table.add_row(
            *cells,
            Text(row.health.state, style="" if row.health.well else "red"),
            Text(row.state, style="" if row.well else "red"),
            *(age(row.last_event_age_seconds), f"{row.blocks:,}", f"{row.requests:,}", error),
            *(row.endpoint or "–", "; ".join(reason for reason in reasons if reason)),
        )
    return table


def _queue(rows: tuple[QueueRow, ...]) -> object:
    numbers = ("priority", "waiting", "ahead")
    table = columns("queue of", "caller", "fairness id", *numbers, right=numbers)
    for row in rows:
        cells = (row.model, row.caller or row.tenant, row.fairness_id or "–")
        table.add_row(*map(Text, cells), str(row.priority), f"{row.waiting:,}", f"{row.ahead_seconds:.1f} s")
    return table


def _name(row: ServiceRow) -> str:
    return f"{row.kind or 'service'} {row.address}"
