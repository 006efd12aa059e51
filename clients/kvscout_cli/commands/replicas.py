"""`kvscout replicas`: do the schedulers share their bookings, and do they agree?"""

from __future__ import annotations

from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.table import Table
from rich.text import Text

from kvscout.v1 import scheduler_pb2
from kvscout_cli.connection import Schedulers, json_flag, scheduler_flags
from kvscout_cli.lifetime import run
from kvscout_cli.output import print_json
from kvscout_cli.tables import columns, stderr, stdout
from kvscout_common.settings.flags import SectionedCommand

COLUMNS = ("seen by", "replica", "state")
NUMBERS = ("requests", "sequence", "heard", "lag", "divergences", "gaps", "snapshots")


@click.command(cls=SectionedCommand)
@json_flag
@scheduler_flags
def command(schedulers: Schedulers, *, as_json: bool) -> None:
    """Show the replicas of the scheduler: their state, the requests each owns, lag and divergence.

    \b
        kvscout replicas
        kvscout replicas --scheduler 10.0.0.5:7052 --scheduler 10.0.0.6:7052 --json
    """
    answers: dict[str, scheduler_pb2.GetReplicasResponse] = run(
        schedulers.call("GetReplicas", scheduler_pb2.GetReplicasRequest())
    )
    if as_json:
        print_json({address: _plain(answer) for address, answer in answers.items()})
        return
    stdout().print(_table(answers))
    for address, answer in answers.items():
        if answer.problem:
            stderr().print(f"{address} works alone: {answer.problem}", style="yellow")


def _plain(answer: scheduler_pb2.GetReplicasResponse) -> dict[str, Any]:
    """Return an answer with all its fields; numbers as numbers."""
    plain = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    for replica in plain["replicas"]:
        for field, value in replica.items():
            if isinstance(value, str) and field != "replica_id":
                replica[field] = int(value)
    return {field: int(value) if field in ("forwarded", "taken_over") else value for field, value in plain.items()}


def _table(answers: dict[str, scheduler_pb2.GetReplicasResponse]) -> Table:
    table = columns(*COLUMNS, *NUMBERS, right=NUMBERS)
    for address, answer in answers.items():
        for replica in answer.replicas:
            lag = f"{replica.lag_events} events, {replica.lag_seconds:.1f} s" if replica.lag_events else "–"
            table.add_row(
                *(address, replica.replica_id, _state(replica)),
                *(str(replica.owned_requests), str(replica.sequence)),
                "–" if replica.self else f"{replica.silent_seconds:.1f} s ago",
                *(lag, str(replica.divergences), str(replica.gaps), str(replica.snapshots)),
            )
    return table


def _state(replica: scheduler_pb2.Replica) -> str | Text:
    if replica.self:
        return "itself"
    if replica.diverged:
        return Text("diverged", style="red")
    return "live" if replica.live else Text("silent", style="yellow")
