"""`kvscout requests`: what is booked now."""

from __future__ import annotations

from collections.abc import Iterable

import click
from rich.table import Table

from kvscout_cli import completion
from kvscout_cli.connection import Connection, connection_flags, json_flag, of_model_flag, option
from kvscout_cli.lifetime import run
from kvscout_cli.output import print_json
from kvscout_cli.tables import columns, session_name, stdout
from kvscout_client import ActiveRequest
from kvscout_common.settings.flags import SectionedCommand


@click.command(name="requests", cls=SectionedCommand)
@of_model_flag
@option("--worker-id", default="", shell_complete=completion.workers, help="Only requests on this worker.")
@option("--limit", default=1_000, show_default=True, type=click.IntRange(min=1), help="Largest number of requests.")
@option("--by-session", is_flag=True, help="Print one line per session instead of per request.")
@json_flag
@connection_flags
def command(connection: Connection, model: str, worker_id: str, limit: int, by_session: bool, as_json: bool) -> None:
    """List the booked requests of all callers."""

    async def fetch() -> list[ActiveRequest]:
        async with connection.router() as router:
            return await router.active_requests(model=model, worker_id=worker_id, limit=limit)

    requests = run(fetch())
    if as_json:
        print_json(requests)
        return
    if by_session:
        stdout().print(_by_session(requests))
        return
    numbers = ("blocks", "output blocks", "uncached tokens", "age")
    table = columns("request", "model", "role", "worker", "phase", *numbers, "session", right=numbers)
    for one in requests:
        table.add_row(
            *(one.request_id, one.model, one.role.value, f"{one.worker.worker_id}/{one.worker.dp_rank}"),
            "–" if one.phase is None else f"{one.phase.value}{' (estimated)' if one.phase_estimated else ''}",
            *(str(one.blocks), str(one.output_blocks), str(one.uncached_tokens), f"{one.age_seconds:.1f} s"),
            session_name(one.session),
        )
    stdout().print(table)


def _by_session(requests: Iterable[ActiveRequest]) -> Table:
    numbers = ("requests", "blocks", "output blocks", "age")
    table = columns("session", "model", "workers", *numbers, right=numbers)
    groups: dict[tuple[int, str], list[ActiveRequest]] = {}
    for one in requests:
        groups.setdefault((one.session, one.model), []).append(one)
    for (session, model), group in groups.items():
        workers = sorted({f"{one.worker.worker_id}/{one.worker.dp_rank}" for one in group if one.worker.worker_id})
        sums = (len(group), sum(one.blocks for one in group), sum(one.output_blocks for one in group))
        oldest = max(one.age_seconds for one in group)
        table.add_row(session_name(session), model, ", ".join(workers) or "–", *map(str, sums), f"{oldest:.1f} s")
    return table
