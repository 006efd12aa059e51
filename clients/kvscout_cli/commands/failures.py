"""`kvscout failures`: which requests failed, why, and whose fault was it?"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Final

import click
from rich.text import Text

from kvscout_cli import completion
from kvscout_cli.connection import Services, json_flag, of_model_flag, option, services_flags
from kvscout_cli.lifetime import run
from kvscout_cli.output import echo, plain, print_json
from kvscout_cli.tables import columns, stdout
from kvscout_client import Failure, FaultOwner, Router
from kvscout_common.settings.flags import SectionedCommand

FOLLOW_SECONDS: Final = 1.0
"""Between two questions for what is new."""
MAX_NEW: Final = 1_000
"""Failures that are shown of those since the last question: more than a gateway remembers of one owner."""


@click.command(cls=SectionedCommand)
@of_model_flag
@option(
    "--worker",
    "worker_id",
    default="",
    shell_complete=completion.workers,
    help="Only requests that were sent to this worker.",
)
@option(
    "--cause",
    default="",
    help="Only failures with this cause, such as queue or worker; docs/failure-modes.md lists them.",
)
@option(
    "--whose",
    type=click.Choice([owner.value for owner in FaultOwner]),
    help="Only failures for which this side is responsible.",
)
@option(
    "--answered",
    is_flag=True,
    help="Also requests that were answered, but placed with less knowledge (degraded), or moved to another worker.",
)
@option("--limit", default=100, show_default=True, type=click.IntRange(min=1), help="Largest number of failures.")
@option("--follow", is_flag=True, help="Print what fails from now on, until interrupted.")
@json_flag
@services_flags
def command(
    services: Services,
    *,
    model: str,
    worker_id: str,
    cause: str,
    whose: str | None,
    answered: bool,
    limit: int,
    follow: bool,
    as_json: bool,
) -> None:
    """List the last requests that failed, the newest first: cause, responsible side, workers, message.

    A gateway remembers the last failures of callers, of engines and of the router since its start.
    ADDRESS is a further gateway.

    \b
        kvscout failures
        kvscout failures --whose engine --worker vllm-3
        kvscout failures --answered --follow
    """

    async def of(address: str, *, after: int = 0, at_most: int) -> list[Failure]:
        router = Router(
            address, tenant=services.tenant, security=services.security, timeout_seconds=services.timeout_seconds
        )
        async with router:
            return await router.failures(
                model=model,
                worker_id=worker_id,
                cause=cause,
                owner=FaultOwner(whose) if whose else None,
                answered=answered,
                after=after,
                limit=at_most,
            )

    addresses = (services.gateway, *services.further)

    async def listed() -> list[Failure]:
        found = await asyncio.gather(*(of(address, at_most=limit) for address in addresses))
        return sorted((one for some in found for one in some), key=lambda one: -one.at_unix_seconds)[:limit]

    async def followed() -> None:
        last = {address: max((one.number for one in await of(address, at_most=1)), default=0) for address in addresses}
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            for address in addresses:
                new = await of(address, after=last[address], at_most=MAX_NEW)
                for one in reversed(new):
                    last[address] = one.number
                    echo(json.dumps(plain(one)) if as_json else _line(one))

    if follow:
        run(followed(), until_signalled=True)
        return
    failures = run(listed())
    if as_json:
        print_json(failures)
    else:
        _print(failures)


def _print(failures: Sequence[Failure]) -> None:
    if not failures:
        stdout().print("no failures")
        return
    tenants = len({one.tenant for one in failures}) > 1
    names = ("whose", "cause", "status", "path", "model", "workers", "request", "message")
    table = columns("time", *(["tenant"] if tenants else []), *names)
    for one in failures:
        table.add_row(
            _time(one),
            *([one.tenant or "–"] if tenants else []),
            Text(one.owner or "?", style="" if one.owner is FaultOwner.CALLER else "red"),
            one.cause,
            _status(one),
            one.front,
            one.model or "–",
            ", ".join(one.worker_ids) or "–",
            one.request_id or "–",
            one.message,
        )
    stdout().print(table)


def _line(one: Failure) -> str:
    fields = (
        *(_time(one), one.owner or "?", one.cause, _status(one), one.front, one.model or "–"),
        *(", ".join(one.worker_ids) or "–", one.request_id or "–"),
    )
    return f"{'  '.join(fields)}  {one.message}"


def _time(one: Failure) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(one.at_unix_seconds))


def _status(one: Failure) -> str:
    return "answered" if one.answered else one.status or "–"
