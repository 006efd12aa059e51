"""`kvscout workers`: which workers there are; register, drain and remove them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from kvscout.v1 import scheduler_pb2
from kvscout_cli import completion
from kvscout_cli.connection import (
    Connection,
    Schedulers,
    connection_flags,
    json_flag,
    of_model_flag,
    option,
    scheduler_flags,
)
from kvscout_cli.lifetime import run
from kvscout_cli.output import echo, plain, print_json
from kvscout_cli.tables import columns, stdout
from kvscout_client import RegisteredWorker, Router, WorkerRecord
from kvscout_common.doctor.overview import Overview, SourceRow, overview
from kvscout_common.errors import ConfigError, NotFound
from kvscout_common.known_names import or_known
from kvscout_common.registry.worker_proto import rank_from_proto
from kvscout_common.registry.workers_file import load_workers
from kvscout_common.settings.flags import SectionedCommand, SectionedGroup, ValueOf
from kvscout_common.worker import (
    DEFAULT_TENANT,
    REVISION,
    EngineKind,
    EventEndpoint,
    Role,
    WorkerSpec,
    transport_of,
)


@click.group(name="workers", cls=SectionedGroup)
def command() -> None:
    """List, register, drain and remove workers."""


@command.command("list", cls=SectionedCommand)
@of_model_flag
@json_flag
@connection_flags
def list_workers(connection: Connection, model: str, as_json: bool) -> None:
    """List the registered workers, their states, and the states of their events if an indexer reports them."""

    async def fetch() -> tuple[list[WorkerRecord], Overview]:
        async with connection.router() as router:
            records = await router.list_workers(model=model)
        return records, overview(await connection.services.snapshot(engines=False))

    records, shown = run(fetch())
    events = {record.spec.worker_id: _events(record, shown.sources) for record in records}
    if as_json:
        print_json([{**plain(record), "events": events[record.spec.worker_id]} for record in records])
        return
    numbers = ("ranks", "block size", "KV blocks")
    has_revisions = any(REVISION in record.spec.labels for record in records)
    names = ("worker", "model", "role", "engine", "endpoint", *([REVISION] if has_revisions else []))
    table = columns(*names, *numbers, "source", "lease", "state", "events", "cause", right=numbers)
    for record in records:
        spec, lease = record.spec, record.lease_remaining_seconds
        table.add_row(
            *(spec.worker_id, spec.model, spec.role.value, spec.engine.value, spec.http_endpoint or "–"),
            *((spec.labels.get(REVISION, "–"),) if has_revisions else ()),
            *(str(spec.dp_size), str(spec.block_size), str(spec.total_kv_blocks or "–")),
            *(record.source, "–" if lease is None else f"{lease:.0f} s", record.health.state or "unknown"),
            *(", ".join(events[spec.worker_id]) or "–", record.health.cause),
        )
    stdout().print(table)


def _events(record: WorkerRecord, sources: Iterable[SourceRow]) -> list[str]:
    """Return the states that the events of a worker's ranks are in, what is wrong first."""
    name = (record.spec.tenant, record.spec.worker_id)
    rows = [row for row in sources if (row.tenant, row.worker_id) == name]
    return list(dict.fromkeys(row.state for row in sorted(rows, key=lambda row: row.well)))


@command.command(cls=SectionedCommand)
@click.argument("worker_id", required=False)
@option(
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Register every worker of a workers file instead.",
)
@option("--model", default="", help="Model it serves.")
@option("--block-size", type=click.IntRange(min=1), help="Tokens per KV block.")
@option("--http-endpoint", default="", help="Base URL of its HTTP API.")
@option(
    "--event-endpoint",
    multiple=True,
    help="Event endpoint: ZMQ's, repeated for further ranks, or one grpc://HOST:PORT.",
)
@option("--replay-endpoint", multiple=True, help="ZMQ replay endpoint; repeat in the order of --event-endpoint.")
@option(
    "--engine",
    default=EngineKind.VLLM.value,
    show_default=True,
    type=ValueOf(EngineKind),
    help="Engine.",
)
@option("--role", default=Role.AGGREGATED.value, show_default=True, type=ValueOf(Role), help="Role.")
@option("--dp-size", default=1, show_default=True, type=click.IntRange(1, 1024), help="Data-parallel ranks.")
@option("--total-kv-blocks", default=0, type=click.IntRange(min=0), help="KV blocks of a rank; 0 = unknown.")
@option("--label", multiple=True, help="KEY=VALUE that requests can require; repeatable.")
@option(
    "--lease-seconds",
    default=0,
    type=click.IntRange(min=0),
    help="Lease of the registration; 0 = it stays until removed.",
)
@json_flag
@connection_flags
def register(
    connection: Connection,
    *,
    worker_id: str | None,
    path: Path | None,
    lease_seconds: int,
    as_json: bool,
    **values: Any,
) -> None:
    """Register a worker, or replace its registration.

    \b
        kvscout workers register vllm-0 --model llama --block-size 16 \\
            --http-endpoint http://10.0.0.5:8000 \\
            --event-endpoint tcp://10.0.0.5:5557 --replay-endpoint tcp://10.0.0.5:5657
    """
    if bool(worker_id) == bool(path):
        raise click.UsageError("Give a worker id or --file.")
    specs = load_workers(path) if path else [_spec(worker_id or "", connection.tenant, **values)]

    async def fetch() -> list[RegisteredWorker]:
        async with connection.router() as router:
            return [await router.register_worker(spec, lease_seconds=lease_seconds) for spec in specs]

    answers = run(fetch())
    if as_json:
        print_json(answers)
        return
    for answer in answers:
        echo(f"{answer.spec.worker_id} {'registered' if answer.created else 'replaced'}")


@command.command(cls=SectionedCommand)
@click.argument("worker_ids", nargs=-1, required=True, shell_complete=completion.workers)
@json_flag
@connection_flags
def remove(connection: Connection, worker_ids: tuple[str, ...], as_json: bool) -> None:
    """Remove workers with their blocks and bookings."""

    async def fetch() -> None:
        async with connection.router() as router:
            for worker_id in worker_ids:
                await router.remove_worker(worker_id)
                if not as_json:
                    echo(f"{worker_id} removed")

    run(fetch())
    if as_json:
        print_json({"removed": worker_ids})


@command.command(cls=SectionedCommand)
@click.argument("worker_ids", nargs=-1, shell_complete=completion.workers)
@option("--revision", default="", help="Also all workers with this revision label.")
@option("--undo", is_flag=True, help="End the drain: the workers get requests again.")
@json_flag
@connection_flags
def drain(connection: Connection, worker_ids: tuple[str, ...], revision: str, undo: bool, as_json: bool) -> None:
    """Stop new requests for workers; running requests continue."""
    if not worker_ids and not revision:
        raise click.UsageError("Name workers, or give --revision.")

    async def fetch() -> dict[str, int]:
        async with connection.router() as router:
            named = [*worker_ids, *(await _of_revision(router, revision) if revision else ())]
            drained = list(dict.fromkeys(named))
            active = await asyncio.gather(*(router.drain_worker(worker_id, undo=undo) for worker_id in drained))
        return dict(zip(drained, active, strict=True))

    answers = run(fetch())
    if as_json:
        print_json({"draining": not undo, "active_requests": answers})
        return
    for worker_id, active in answers.items():
        echo(f"{worker_id} {'takes requests again' if undo else f'drains, {active} requests active'}")


async def _of_revision(router: Router, revision: str) -> list[str]:
    """Return the ids of the workers of a revision.

    Raises:
        NotFound: There are none.
    """
    specs = [record.spec for record in await router.list_workers()]
    found = [spec.worker_id for spec in specs if spec.labels.get(REVISION) == revision]
    if not found:
        known = or_known(revision, {spec.labels[REVISION] for spec in specs if REVISION in spec.labels})
        raise NotFound(f"no worker has the label {REVISION}={revision}{known}")
    return found


@command.command("clear-cooldowns", cls=SectionedCommand)
@click.argument("worker_id", default="", shell_complete=completion.workers)
@of_model_flag
@option("--tenant", default=DEFAULT_TENANT, show_default=True, help="Tenant.")
@json_flag
@scheduler_flags
def clear_cooldowns(schedulers: Schedulers, worker_id: str, model: str, tenant: str, as_json: bool) -> None:
    """End cool-downs of workers that clients reported as failed; without a worker id, of all workers of the tenant.

    Replicas inform each other. Name each scheduler that is not a replica of another.
    """
    request = scheduler_pb2.ClearCooldownsRequest(tenant=tenant, worker_id=worker_id, model=model)
    answers: dict[str, scheduler_pb2.ClearCooldownsResponse] = run(schedulers.call("ClearCooldowns", request))
    cleared = sorted({rank_from_proto(rank) for answer in answers.values() for rank in answer.workers})
    if as_json:
        print_json({"cleared": cleared})
        return
    for rank in cleared:
        echo(f"{rank.worker_id}, rank {rank.dp_rank} takes requests again")
    if not cleared:
        echo("nobody cooled down")


def _spec(worker_id: str, tenant: str, **values: Any) -> WorkerSpec:
    if not values["model"] or not values["block_size"]:
        raise click.UsageError("--model and --block-size are needed.")
    events, replays = values["event_endpoint"], values["replay_endpoint"]
    if replays and len(replays) != len(events):
        raise ConfigError(f"{len(replays)} given for {len(events)} --event-endpoint", field="--replay-endpoint")
    endpoints = tuple(
        EventEndpoint(rank, endpoint, replays[rank] if replays else "") for rank, endpoint in enumerate(events)
    )
    labels = {}
    for label in values["label"]:
        key, separator, value = label.partition("=")
        if not separator or not key:
            raise ConfigError(f"{label!r} is not KEY=VALUE", field="--label")
        labels[key] = value
    return WorkerSpec(
        worker_id=worker_id,
        model=values["model"],
        tenant=tenant,
        block_size=values["block_size"],
        role=values["role"],
        engine=values["engine"],
        http_endpoint=values["http_endpoint"],
        dp_size=values["dp_size"],
        event_endpoints=endpoints,
        transport=transport_of(endpoints),
        total_kv_blocks=values["total_kv_blocks"],
        labels=labels,
    ).validate()
