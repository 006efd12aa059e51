"""`kvscout top`: what are the workers doing now?"""

from __future__ import annotations

import asyncio

import click
from rich.live import Live

from kvscout_cli.connection import Services, option, services_flags
from kvscout_cli.lifetime import run
from kvscout_cli.tables import stdout
from kvscout_cli.top_view import frame
from kvscout_common.settings.flags import SectionedCommand

DECISIONS = 10


@click.command(cls=SectionedCommand)
@option("--interval", default=1.0, show_default=True, type=click.FloatRange(min=0.1), help="Seconds between two looks.")
@option("--once", is_flag=True, help="Print one frame and end; so it does where it is not shown on a terminal.")
@services_flags
def command(services: Services, *, interval: float, once: bool) -> None:
    """Show workers, load, hit rate, events and the last decisions, live, until Ctrl-C.

    \b
        kvscout top
        kvscout top --once
    """
    console = stdout()
    gathering, named = services.gathering, services.named
    if once or not console.is_terminal:
        console.print(frame(run(gathering.look(named)), None, ()))
        return

    async def show() -> None:
        before, now = None, await gathering.look(named)
        async with gathering.decisions(kept=DECISIONS) as decisions:
            decisions.follow(now.snapshot)
            with Live(frame(now, None, ()), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    await asyncio.sleep(interval)
                    before, now = now, await gathering.look(named)
                    live.update(frame(now, before, list(decisions.last)), refresh=True)
                    decisions.follow(now.snapshot)

    run(show(), until_signalled=True)
