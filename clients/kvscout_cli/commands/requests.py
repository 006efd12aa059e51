"""`kvscout requests`: what is booked now."""

from __future__ import annotations

import click

from kvscout_cli.connection import Connection, connection_flags, json_flag, option
from kvscout_cli.lifetime import run
from kvscout_cli.output import print_json
from kvscout_cli.tables import columns, stdout
from kvscout_client import ActiveRequest
from kvscout_common.settings.flags import SectionedCommand


@click.command(name="requests", cls=SectionedCommand)
@option("--model", default="", help="Only of this model.")
@option("--worker-id", default="", help="Only on this worker.")
@option("--limit", default=1_000, show_default=True, type=click.IntRange(min=1), help="Largest number of requests.")
@json_flag
@connection_flags
def command(connection: Connection, model: str, worker_id: str, limit: int, as_json: bool) -> None:
    """List the requests that are booked, whoever booked them."""

    async def fetch() -> list[ActiveRequest]:
        async with connection.router() as router:
            return await router.active_requests(model=model, worker_id=worker_id, limit=limit)

    requests = run(fetch())
    if as_json:
        print_json(requests)
        return
    numbers = ("blocks", "output blocks", "uncached tokens", "age")
    table = columns("request", "model", "role", "worker", "phase", *numbers, right=numbers)
    for one in requests:
        table.add_row(
            *(one.request_id, one.model, one.role.value, f"{one.worker.worker_id}/{one.worker.dp_rank}"),
            "–" if one.phase is None else f"{one.phase.value}{' (estimated)' if one.phase_estimated else ''}",
            *(str(one.blocks), str(one.output_blocks), str(one.uncached_tokens), f"{one.age_seconds:.1f} s"),
        )
    stdout().print(table)
