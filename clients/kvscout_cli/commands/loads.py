"""`kvscout loads`: how much do the workers have to do?"""

from __future__ import annotations

import click
from rich.text import Text

from kvscout_cli.connection import Connection, chosen_model, connection_flags, json_flag, model_flag, option
from kvscout_cli.lifetime import run
from kvscout_cli.output import columns, print_json, stdout
from kvscout_client import WorkerLoad
from kvscout_common.flags import SectionedCommand, ValueOf
from kvscout_common.worker import Role

NUMBERS = ("active requests", "prefill tokens", "decode blocks", "KV blocks")


@click.command(cls=SectionedCommand)
@model_flag
@option("--role", default=Role.AGGREGATED.value, show_default=True, type=ValueOf(Role), help="Role.")
@json_flag
@connection_flags
def command(connection: Connection, model: str, role: Role, as_json: bool) -> None:
    """Show the load of each worker rank, as the scheduler that decides has it."""

    async def ask() -> list[WorkerLoad]:
        async with connection.router() as router:
            return await router.potential_loads(model=await chosen_model(router, model), role=role)

    loads = run(ask())
    if as_json:
        print_json(loads)
        return
    table = columns("worker", *NUMBERS, "state", right=NUMBERS)
    for load in loads:
        states = [name for name in ("draining", "busy") if getattr(load, name)]
        if load.cooldown_seconds:
            states.append(f"cools down {load.cooldown_seconds:.0f} s")
        cells = (
            f"{load.worker.worker_id}/{load.worker.dp_rank}",
            *(f"{load.active_requests:,}", f"{load.active_prefill_tokens:,}", f"{load.active_decode_blocks:,}"),
            f"{load.total_kv_blocks:,}" if load.total_kv_blocks else "–",
            ", ".join(states) or "ok",
        )
        table.add_row(*map(Text, cells))
    stdout().print(table)
