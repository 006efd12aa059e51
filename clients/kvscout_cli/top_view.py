"""Frames of `kvscout top`, from the services' statuses now and a moment ago. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvscout.v1 import scheduler_pb2
from kvscout_cli.output import age
from kvscout_cli.tables import columns
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.overview import SourceRow, overview, seen_by_gateways
from kvscout_common.doctor.snapshot import RankName
from kvscout_common.plain_text import printable


def frame(now: Moment, before: Moment | None, decisions: Iterable[scheduler_pb2.WatchDecisionsResponse]) -> Group:
    """Contents of a frame.

    Args:
        now: Current statuses.
        before: Statuses of a moment ago; None = rates are unknown.
        decisions: The last ones, the newest first.
    """
    return Group(_totals(now, before), Text(), _workers(now), Text(), _decisions(decisions))


def _totals(now: Moment, before: Moment | None) -> Text:
    rate = now.requests_per_second(before)
    shown = overview(now.snapshot)
    ill = sum(not row.well for row in shown.services) + sum(not row.well for row in shown.sources)
    parts = (
        f"requests {now.requests:,} ({'–' if rate is None else f'{rate:.1f}/s'})",
        f"in flight {now.in_flight:,}",
        f"failed {now.failures:,}",
        f"queued {now.queued:,}",
        f"hit rate {_percent(now.hit_rate(before))} now, {_percent(now.hit_rate(None))} in all",
        "all well" if not ill else f"{ill} in trouble: see kvscout doctor",
    )
    return Text(" · ".join(parts), style="bold")


def _workers(now: Moment) -> Table:
    names = ("active", "prefill tokens", "decode blocks", "cached blocks", "hit rate", "event age")
    table = columns("worker", "model", *names, "events", "load", right=names)
    seen = seen_by_gateways(now.snapshot)
    rows: dict[RankName, SourceRow] = {}
    for row in overview(now.snapshot).sources:
        # Of several indexers, one that has trouble, else the one with the most.
        name = RankName(row.tenant, row.worker_id, row.dp_rank)
        rows[name] = min(row, rows.get(name, row), key=lambda one: (one.well, -one.blocks))
    for name, row in rows.items():
        load, one = now.loads.get(name), seen.get(name)
        hit = one.cached_tokens / one.prompt_tokens if one is not None and one.prompt_tokens else None
        decode = "–"
        if load is not None:
            total = f" / {load.total_kv_blocks:,}" if load.total_kv_blocks else ""
            decode = f"{load.active_decode_blocks:,}{total}"
        cells = (
            str(name),
            row.model,
            "–" if load is None else f"{load.active_requests:,}",
            "–" if load is None else f"{load.active_prefill_tokens:,}",
            decode,
            f"{row.blocks:,}",
            _percent(hit),
            age(row.last_event_age_seconds),
        )
        table.add_row(*cells, _events(row), Text(_load(load)))
    return table


def _events(row: SourceRow) -> Text:
    return Text(row.state, style="" if row.well else "red")


def _load(load: scheduler_pb2.WorkerLoad | None) -> str:
    if load is None:
        return "–"
    states = (
        (load.draining, "draining"),
        (load.cooldown_seconds > 0, f"cools down {load.cooldown_seconds:.0f} s"),
        (load.busy, "busy"),
    )
    return ", ".join(text for applies, text in states if applies) or "ok"


def _decisions(decisions: Iterable[scheduler_pb2.WatchDecisionsResponse]) -> Table:
    table = columns(
        "last decisions", "model", "tokens", "worker", "overlap", "cost", right=("tokens", "overlap", "cost")
    )
    for one in decisions:
        request, decision = one.request, one.decision
        where = f"{decision.worker.worker_id}/{decision.worker.dp_rank}" if not one.code else printable(one.message)
        overlap = "–" if one.code else f"{decision.overlap_blocks:,}"
        cost = "–" if one.code else f"{decision.cost:.1f}"
        cells = (request.request_id or "query", request.model, f"{one.isl_tokens:,}", where, overlap, cost)
        table.add_row(*cells)
    return table


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"
