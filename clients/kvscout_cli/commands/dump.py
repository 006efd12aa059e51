"""`kvscout dump`: what does the index hold?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO

import click
from google.protobuf import proto
from google.protobuf.json_format import MessageToJson
from rich.table import Table

from kvscout.v1 import events_pb2
from kvscout_cli.connection import Connection, connection_flags, option
from kvscout_cli.lifetime import run
from kvscout_cli.output import echo
from kvscout_cli.tables import columns, stdout
from kvscout_common.settings.flags import SectionedCommand


@dataclass(slots=True)
class _Total:
    """Counts of one worker rank's dump."""

    model: str
    last_event_id: int | None
    history_incomplete: bool
    blocks: int = 0
    holes: int = 0
    orphans: int = 0
    bytes: int = 0


@click.command(cls=SectionedCommand)
@option("--model", default="", help="Only this model.")
@option("--json", "as_json", is_flag=True, help="Print every state chunk as one line of JSON.")
@option(
    "--output",
    type=click.File("wb"),
    help="Write every state chunk to a file: KvEventBatch messages, each after its length as a varint.",
)
@connection_flags
def command(connection: Connection, *, model: str, as_json: bool, output: IO[bytes] | None) -> None:
    """Dump the state of the index: one consistent snapshot per worker rank.

    \b
        kvscout dump
        kvscout dump --json | head -1
        kvscout dump --output state.bin
    """

    async def read() -> dict[tuple[str, int], _Total]:
        totals: dict[tuple[str, int], _Total] = {}
        async with connection.router() as router:
            async for batch in router.dump(model=model):
                _count(totals, batch)
                if as_json:
                    echo(MessageToJson(batch, preserving_proto_field_name=True, indent=None))
                if output is not None:
                    proto.serialize_length_prefixed(batch, output)  # type: ignore[arg-type]  # any binary file
        return totals

    totals = run(read())
    if not as_json:
        stdout().print(_table(totals))


def _count(totals: dict[tuple[str, int], _Total], batch: events_pb2.KvEventBatch) -> None:
    (event,) = batch.events
    last_event_id = batch.event_id if batch.HasField("event_id") else None
    total = totals.setdefault(
        (batch.worker_id, batch.dp_rank), _Total(batch.model, last_event_id, event.state.history_incomplete)
    )
    for run_of_blocks in event.state.runs:
        holes = sum(copies == 0 for copies in run_of_blocks.copies)
        total.blocks += len(run_of_blocks.local_hashes) - holes
        total.holes += holes
    total.orphans += len(event.state.orphans)
    total.bytes += batch.ByteSize()


def _table(totals: dict[tuple[str, int], _Total]) -> Table:
    counted = ("blocks", "holes", "orphans", "last event", "bytes")
    table = columns("worker", "rank", "model", *counted, "history", right=("rank", *counted))
    for (worker_id, dp_rank), total in totals.items():
        counts = (total.blocks, total.holes, total.orphans)
        table.add_row(
            worker_id,
            str(dp_rank),
            total.model,
            *(f"{count:,}" for count in counts),
            "–" if total.last_event_id is None else str(total.last_event_id),
            f"{total.bytes:,}",
            "incomplete" if total.history_incomplete else "complete",
        )
    return table
