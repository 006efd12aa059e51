"""`kvscout loads`: how much do the workers have to do?"""

from __future__ import annotations

from dataclasses import asdict

import click

from kvscout_cli.connection import Connection, chosen_model, connection_flags, json_flag, model_flag, option
from kvscout_cli.lifetime import run
from kvscout_cli.output import age, print_json
from kvscout_cli.tables import columns, stdout
from kvscout_client import WorkerLoad
from kvscout_common.settings.flags import SectionedCommand, ValueOf
from kvscout_common.worker import Role

NUMBERS = ("active requests", "prefill tokens", "decode blocks", "KV blocks")


@click.command(cls=SectionedCommand)
@model_flag
@option("--role", type=ValueOf(Role), help="Only workers of this role; unset = all roles.")
@json_flag
@connection_flags
def command(connection: Connection, model: str, role: Role | None, as_json: bool) -> None:
    """Show the load of each worker rank, as the deciding scheduler knows it, and its state."""

    async def fetch() -> list[tuple[Role, WorkerLoad]]:
        async with connection.router() as router:
            chosen = await chosen_model(router, model)
            roles = (role,) if role else tuple(Role)
            return [(one, load) for one in roles for load in await router.potential_loads(model=chosen, role=one)]

    loads = run(fetch())
    if as_json:
        print_json([{"role": one} | asdict(load) for one, load in loads])
        return
    table = columns("worker", "role", *NUMBERS, "state", "since", "cause", right=NUMBERS)
    for one, load in loads:
        cells = (
            f"{load.worker.worker_id}/{load.worker.dp_rank}",
            str(one),
            *(f"{load.active_requests:,}", f"{load.active_prefill_tokens:,}", f"{load.active_decode_blocks:,}"),
            f"{load.total_kv_blocks:,}" if load.total_kv_blocks else "–",
            *(load.health.state or "unknown", age(load.health.age_seconds), load.health.cause),
        )
        table.add_row(*cells)
    stdout().print(table)
