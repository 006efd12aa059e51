"""Workers as the page shows them: one row a rank, one entry a pool. Pure."""

from __future__ import annotations

from typing import Any, Final

from kvscout.v1 import scheduler_pb2
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.overview import Overview, SourceRow, seen_by_gateways
from kvscout_common.doctor.snapshot import RankName
from kvscout_common.doctor.worker_health import health_of, load_healths, worst
from kvscout_common.plain_text import printable
from kvscout_common.registry.registry import WorkerName
from kvscout_common.registry.worker_proto import role_from_proto

MAX_WORKERS: Final = 1_000
"""Worker ranks that are sent, those in trouble first; of more, the number."""
_COLUMNS: Final = (
    *("pool", "worker", "rank", "well", "word", "cause"),
    *("cached", "blocks", "running", "waiting", "hit", "requests", "failures"),
)


def worker_table(now: Moment, shown: Overview) -> dict[str, Any]:
    """Return the pools and the worker ranks, as columns: a thousand rows that repeat no names."""
    seen, specs = seen_by_gateways(now.snapshot), now.snapshot.workers
    by_rank: dict[RankName, list[SourceRow]] = {}
    for row in shown.sources:
        by_rank.setdefault(RankName(row.tenant, row.worker_id, row.dp_rank), []).append(row)
    pools: dict[tuple[str, str, str], int] = {}
    rows: list[tuple[Any, ...]] = []
    for name, sources in by_rank.items():
        load, one, worker = now.loads.get(name), seen.get(name), specs.get(WorkerName(name.tenant, name.worker_id))
        role = role_from_proto(worker.role).value if worker is not None else ""
        pool = pools.setdefault((name.tenant, sources[0].model, role), len(pools))
        well, word, cause = _state(sources, load)
        rows.append(
            (
                *(pool, printable(name.worker_id, 300), name.dp_rank, well, word, printable(cause, 500)),
                max(row.blocks for row in sources),
                load.total_kv_blocks if load is not None else 0,
                load.active_requests if load is not None else None,
                load.active_prefill_tokens if load is not None else None,
                one.cached_tokens / one.prompt_tokens if one is not None and one.prompt_tokens else None,
                one.requests if one is not None else 0,
                one.failures if one is not None else 0,
            )
        )
    ill = sum(not row[3] for row in rows)
    if len(rows) > MAX_WORKERS:
        rows.sort(key=lambda row: bool(row[3]))
    return {
        "pools": [
            {"tenant": printable(tenant), "model": printable(model, 300), "role": role} for tenant, model, role in pools
        ],
        "columns": _COLUMNS,
        "rows": rows[:MAX_WORKERS],
        "total": len(rows),
        "ill": ill,
    }


def _state(sources: list[SourceRow], load: scheduler_pb2.WorkerLoad | None) -> tuple[bool, str, str]:
    """Return whether a rank is well, its state in a word or two, and the cause: the gateways' judgement, or where they
    have nothing against it, that of its events."""
    health = sources[0].health
    if load is not None:
        health = worst(health, *map(health_of, load_healths(load)))
    ill = next((row for row in sources if not row.well), None)
    if health.well and ill is not None:
        return False, f"events {printable(ill.state)}", ill.reason
    return health.well, health.state, health.why
