"""`kvscout shadow`: what would the policy have done?"""

from __future__ import annotations

import time

import click
from rich.table import Table
from rich.text import Text

from kvscout_cli.connection import Services, json_flag, services_flags
from kvscout_cli.lifetime import run
from kvscout_cli.output import plain, print_json
from kvscout_cli.tables import columns, stderr, stdout
from kvscout_common.doctor.shadow import Shadow, ShadowRow, sentences, shadow_of
from kvscout_common.settings.flags import SectionedCommand

NUMBERS = ("requests", "compared", "hit rate as it is", "with the policy", "same worker")


@click.command(cls=SectionedCommand)
@json_flag
@services_flags
def command(services: Services, *, as_json: bool) -> None:
    """Show, by the hour, the actual hit rate and the policy's, at gateways in shadow mode.

    ADDRESS is any further gateway. Exits with 1 if none runs with --shadow.

    \b
        kvscout shadow
        kvscout shadow --gateway 10.0.0.5:7050 10.0.0.6:7050 --json
    """
    found = shadow_of(run(services.snapshot(engines=False)))
    if as_json:
        hours = [{**plain(row), **row.shares} for row in found.hours]
        total = {**plain(found.total), **found.total.shares}
        print_json({"balancers": found.balancers, "hours": hours, "total": total})
    elif found.balancers:
        _print(found)
    if not found.balancers:
        if not as_json:
            stderr().print(Text("no gateway that answered runs with --shadow"))
        raise SystemExit(1)


def _print(found: Shadow) -> None:
    table = columns("hour", "model", *NUMBERS, right=NUMBERS)
    several = len({row.tenant for row in found.hours}) > 1
    for row in found.hours:
        hour = _hour(row.begin_unix_seconds)
        _add(table, hour, f"{row.tenant} · {row.model}" if several else row.model, row)
    if len(found.hours) > 1:
        _add(table, "all", "", found.total)
    console = stdout()
    if found.hours:
        console.print(table)
        console.print()
    for sentence in sentences(found):
        console.print(Text(sentence), soft_wrap=True)


def _add(table: Table, hour: str, model: str, row: ShadowRow) -> None:
    shares = (row.hit_rate, row.policy_hit_rate, row.same_share)
    cells = (hour, model or "–", f"{row.requests:,}", f"{row.compared:,}", *map(_percent, shares))
    table.add_row(*cells)


def _hour(unix_seconds: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_seconds))
    except (OverflowError, ValueError, OSError):
        return "?"  # a gateway may say anything


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
