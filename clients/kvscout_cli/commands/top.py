"""`kvscout top`: what are the workers doing now?"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.live import Live

from kvscout.v1 import scheduler_pb2
from kvscout_cli.connection import Services, option, services_flags
from kvscout_cli.lifetime import run
from kvscout_cli.output import plain
from kvscout_cli.tables import stdout
from kvscout_cli.top_keys import View, keyboard, pressed
from kvscout_cli.top_rows import totals, worker_rows
from kvscout_cli.top_view import frame, shown_rows
from kvscout_common.doctor.gathering import Decisions
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.overview import overview
from kvscout_common.settings.flags import SectionedCommand

KEPT_DECISIONS = 200
"""Decisions that a worker's page can show."""
RATE_SECONDS = 10.0
"""Time over which rates are taken."""


@click.command(cls=SectionedCommand)
@option("--interval", default=1.0, show_default=True, type=click.FloatRange(min=0.1), help="Interval, in seconds.")
@option(
    "--once",
    is_flag=True,
    help="Watch for one interval, print one frame and end; this is the default without a terminal.",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON document per line and interval; with --once only one.")
@services_flags
def command(services: Services, *, interval: float, once: bool, as_json: bool) -> None:
    """Show workers, load, hit rate, TTFT and the last decisions, live. Press ? for the keys, q to quit.

    \b
        kvscout top
        kvscout top --once
        kvscout top --json | jq -c '.workers[] | [.name, .hit_rate]'
    """
    console = stdout()
    if as_json:
        run(_look_on(services, interval, _documents(once=once)), until_signalled=True)
    elif once or not console.is_terminal:
        run(_look_on(services, interval, _frame_on(console)))
    else:
        run(_show(services, interval, console), until_signalled=True)


Look = Callable[[Moment, Moment | None, Decisions], bool]
"""Takes what is known now, what was known up to `RATE_SECONDS` ago (None = nothing), and the decisions. Returns whether
that was the last look."""


async def _look_on(services: Services, interval: float, take: Look) -> None:
    """Look once an interval, for the first time immediately, until it is enough."""
    gathering, named = services.gathering, services.named
    past = deque([await gathering.look(named)])
    async with gathering.decisions(kept=KEPT_DECISIONS, explain=True) as decisions:
        decisions.follow(past[-1].snapshot)
        is_enough = take(past[-1], None, decisions)
        while not is_enough:
            await asyncio.sleep(interval)
            now = await gathering.look(named)
            while len(past) > 1 and past[1].at <= now.at - RATE_SECONDS:
                past.popleft()
            past.append(now)
            decisions.follow(now.snapshot)
            is_enough = take(now, past[0], decisions)


def _frame_on(console: Console) -> Look:
    def take(now: Moment, before: Moment | None, decisions: Decisions) -> bool:
        if before is not None:
            console.print(frame(now, before, list(decisions.last), width=console.width))
        return before is not None

    return take


def _documents(*, once: bool) -> Look:
    printed = 0.0

    def take(now: Moment, before: Moment | None, decisions: Decisions) -> bool:
        nonlocal printed
        if before is None:
            return False
        new = [one for one in decisions.last if one.decided_unix_seconds > printed]
        printed = max([printed, *(one.decided_unix_seconds for one in new)])
        click.echo(json.dumps(_document(now, before, reversed(new))))
        return once

    return take


def _document(now: Moment, before: Moment, decisions: Iterable[scheduler_pb2.WatchDecisionsResponse]) -> dict[str, Any]:
    shown = overview(now.snapshot)
    rows = worker_rows(now, before, shown)
    workers = [{**plain(row), "name": str(row.name), "tenant": row.name.tenant} for row in rows]
    made = [MessageToDict(one, preserving_proto_field_name=True) for one in decisions]
    return {"totals": plain(totals(now, before, shown, rows)), "workers": workers, "decisions": made}


class _Screen:
    """What is known, as the keys want to see it, on a terminal."""

    def __init__(self, live: Live) -> None:
        self.is_over = asyncio.Event()
        self._live = live
        self._view = View()
        self._known: tuple[Moment, Moment | None, Decisions] | None = None

    def take(self, now: Moment, before: Moment | None, decisions: Decisions) -> bool:
        """Show what is known now; it is never enough."""
        self._known = now, before, decisions
        self._draw()
        return False

    def press(self, key: str) -> None:
        """Change the view."""
        names = [row.name for row in shown_rows(*self._known[:2], self._view)] if self._known else []
        self._view = pressed(self._view, key, names)
        if self._view.is_over:
            self.is_over.set()
        self._draw()

    def _draw(self) -> None:
        if self._known is not None:
            now, before, decisions = self._known
            width, height = self._live.console.size
            shown = frame(now, before, list(decisions.last), self._view, width=width, height=height)
            self._live.update(shown, refresh=True)


async def _show(services: Services, interval: float, console: Console) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        screen = _Screen(live)
        with keyboard(screen.press):
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(_look_on(services, interval, screen.take), name="looks")
                await screen.is_over.wait()
                looking.cancel()
