"""Frames of `kvscout top`, from rows, decisions and the view that keys have chosen. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvscout.v1 import scheduler_pb2
from kvscout_cli.output import age
from kvscout_cli.tables import columns, session_name
from kvscout_cli.top_keys import View
from kvscout_cli.top_rows import MAX_CHARACTERS, Totals, WorkerRow, totals, worker_rows
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.overview import QueueRow, overview
from kvscout_common.plain_text import printable

DECISION_LINES: Final = 10
"""Decisions below the workers; a worker's own page has as many as fit."""
SHOWN_CALLERS: Final = 3
"""Callers, with their fairness ids, whose requests wait."""
CALLER_CHARACTERS: Final = 40
HELP: Final = """\
q        quit
s        sort by the next column
/        show only workers and models whose names contain a text:
         Enter keeps it, Esc drops it
↑ ↓      select a worker (also k and j)
Enter    show the selected worker and its decisions; Esc goes back
?        show this help; any key leaves it

req/s, hit rate and TTFT are those of the last 10 seconds. A worker without
requests in that time shows hit rate and TTFT since the gateways' start.
Hit rate: cached / prompt tokens, as engines report them."""

EVERYTHING: Final = View()
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_BAR_CELLS: Final = 8
_GAP: Final = 2
_ORDER: Final[dict[str, Callable[[WorkerRow], Any]]] = {
    "worker": lambda row: 0,
    "req/s": lambda row: -(row.requests_per_second or 0.0),
    "active": lambda row: -(row.active_requests or 0),
    "hit rate": lambda row: -(row.hit_rate or 0.0),
    "TTFT": lambda row: -(row.ttft_seconds or 0.0),
    "state": lambda row: (row.well, row.state == "ok"),
}


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a table that leaves out what does not fit."""

    name: str
    cells: Sequence[Text]
    importance: int
    """Columns of lower importance are left out first; those of 0 stay."""
    right: bool = True


def frame(
    now: Moment,
    before: Moment | None,
    decisions: Iterable[scheduler_pb2.WatchDecisionsResponse],
    view: View = EVERYTHING,
    *,
    width: int = 80,
    height: int | None = None,
) -> Group:
    """Return the contents of a frame.

    Args:
        now: Current statuses.
        before: Statuses of a moment ago; None = rates are unknown.
        decisions: The last ones, the newest first.
        view: What is selected, sorted, filtered.
        width: Columns of the terminal.
        height: Its lines; None = as many as there are.
    """
    services = overview(now.snapshot)
    every = worker_rows(now, before, services)
    rows = _shown(every, view)
    head = _totals(totals(now, before, services, every), services.queue, width)
    if view.is_help:
        return Group(*head, Text(), Text(HELP))
    room = height - len(head) - 2 if height is not None else None
    parts: list[RenderableType] = [*head, Text()]
    if view.is_opened and (row := next((row for row in rows if row.name == view.selected), None)) is not None:
        page = _page(row)
        own = [one for one in decisions if _worker(one) == (row.name.worker_id, row.name.dp_rank)]
        parts += [*page, Text(), _decisions(own[: room and max(0, room - len(page) - 2)], width)]
    else:
        made = list(decisions)[:DECISION_LINES]
        lines = room and max(1, room - (len(made) + 2) - 1)
        parts += [_workers(_around(rows, view, lines), view, width), Text(), _decisions(made, width)]
    if height is not None:
        parts.append(_foot(view, len(rows)))
    return Group(*parts)


_SEE_DOCTOR = ": see kvscout doctor"


def shown_rows(now: Moment, before: Moment | None, view: View) -> list[WorkerRow]:
    """Return the worker ranks that pass the filter, sorted."""
    return _shown(worker_rows(now, before, overview(now.snapshot)), view)


def _shown(rows: Iterable[WorkerRow], view: View) -> list[WorkerRow]:
    passing = (row for row in rows if view.shows(row.name, row.model))
    return sorted(passing, key=lambda row: (_ORDER[view.sort](row), row.name))


def _totals(found: Totals, queue: Sequence[QueueRow], width: int) -> list[Text]:
    """Return them in one line, or two where they do not fit; then whether all is well."""
    parts = [
        f"{_rate(found.requests_per_second)} req/s",
        f"TTFT {_time(found.ttft_seconds)}",
        f"hit rate {_percent(found.hit_rate)} now, {_percent(found.hit_rate_since_start)} since start",
        f"in flight {found.in_flight:,}",
        f"queued {found.queued:,}{_callers(queue)}",
        f"requests {found.requests:,}",
        f"failed {found.failures:,} ({_rate(found.failures_per_second)}/s)",
        *([f"callers' mistakes {found.callers_mistakes:,}"] if found.callers_mistakes else []),
    ]
    lines: list[str] = [""]
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if cell_len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return [*(Text(line, style="bold") for line in lines), _verdict(found, width)]


def _verdict(found: Totals, width: int) -> Text:
    """Return whether all is well, in one line."""
    ill = found.in_trouble
    wrong = "; ".join((*([f"{ill} in trouble"] if ill else []), *found.troubles[:1]))
    if not wrong:
        return Text("all well", style="green")
    room = max(20, width - len(_SEE_DOCTOR))
    shown = wrong if len(wrong) <= room else f"{wrong[: room - 1]}…"
    return Text(f"{shown}{_SEE_DOCTOR}", style="red")


def _callers(queue: Sequence[QueueRow]) -> str:
    """Return whose requests wait, the largest shares only."""
    waiting: Counter[str] = Counter()
    for row in queue:
        name = row.caller or row.tenant
        waiting[f"{name}/{row.fairness_id}" if row.fairness_id else name] += row.waiting
    most = waiting.most_common(SHOWN_CALLERS)
    named = ", ".join(f"{printable(name, CALLER_CHARACTERS)} {count:,}" for name, count in most)
    return f" ({named}{', …' if len(waiting) > len(most) else ''})" if named else ""


def _workers(rows: Sequence[WorkerRow], view: View, width: int) -> Table:
    def each(text: Callable[[WorkerRow], str], style: Callable[[WorkerRow], str] = lambda row: "") -> list[Text]:
        return [Text(text(row), style=style(row)) for row in rows]

    mark = [row.name == view.selected for row in rows]
    names = [
        Text(("› " if chosen else "  ") + str(row.name), style="reverse" if chosen else "")
        for row, chosen in zip(rows, mark, strict=True)
    ]
    found = [
        _Column("worker", names, 0, right=False),
        _Column("state", each(lambda row: row.state, _state_style), 0, right=False),
        _Column("req/s", each(lambda row: _rate(row.requests_per_second)), 8),
        _Column("active", each(lambda row: _count(row.active_requests)), 6),
        _Column("hit rate", each(lambda row: _bar(row.hit_rate), lambda row: _hit_style(row.hit_rate)), 9),
        _Column("TTFT", each(lambda row: _time(row.ttft_seconds)), 7),
        _Column("prefill tokens", each(lambda row: _count(row.prefill_tokens)), 3),
        _Column("decode blocks", each(_blocks), 2),
        _Column("cached blocks", each(lambda row: f"{row.cached_blocks:,}"), 4),
        _Column("event age", each(lambda row: age(row.event_age_seconds)), 1),
    ]
    if len({row.model for row in rows}) > 1:
        found.insert(1, _Column("model", each(lambda row: row.model), 5, right=False))
    return _fitting(found, width)


def _page(row: WorkerRow) -> list[Text]:
    """Return a worker rank's numbers, a line each."""
    lines = [Text(str(row.name), style="bold"), Text(f"model          {row.model}")]
    lines.append(Text(f"state          {row.state}{f': {row.reason}' if row.reason else ''}", style=_state_style(row)))
    for name, text in (
        ("requests", f"{row.requests:,}, {_rate(row.requests_per_second)}/s; {row.failures:,} failed"),
        ("hit rate", _bar(row.hit_rate).strip()),
        ("TTFT", _time(row.ttft_seconds)),
        ("active", f"{_count(row.active_requests)} requests, {_count(row.prefill_tokens)} prefill tokens"),
        ("decode blocks", _blocks(row)),
        ("cached blocks", f"{row.cached_blocks:,}, the last event {age(row.event_age_seconds)} ago"),
    ):
        lines.append(Text(f"{name:<14} {text}"))
    return lines


def _decisions(decisions: Sequence[scheduler_pb2.WatchDecisionsResponse], width: int) -> Table:
    if not decisions:
        return columns("no decisions yet")

    def each(text: Callable[[scheduler_pb2.WatchDecisionsResponse], str]) -> list[Text]:
        return [Text(text(one)[:MAX_CHARACTERS], style="red" if one.code else "") for one in decisions]

    def of_winner(text: Callable[[scheduler_pb2.SelectResponse], str]) -> list[Text]:
        return each(lambda one: "–" if one.code else text(one.decision))

    hits = [_hit(one) for one in decisions]
    found = [
        _Column("last decisions", each(_where), 0, right=False),
        _Column("cached", [Text(_bar(hit), style=_hit_style(hit)) for hit in hits], 9),
        _Column("tokens", each(lambda one: f"{one.isl_tokens:,}"), 8),
        _Column("overlap", of_winner(lambda winner: f"{winner.overlap_blocks:,}"), 3),
        _Column("cost", of_winner(_cost), 5),
        _Column("session", each(lambda one: session_name(one.session)), 6, right=False),
        _Column("request", each(lambda one: one.request.request_id or "query"), 4, right=False),
    ]
    if len({one.request.model for one in decisions} - {""}) > 1:
        found.insert(1, _Column("model", each(lambda one: one.request.model), 2, right=False))
    return _fitting(found, width)


def _cost(winner: scheduler_pb2.SelectResponse) -> str:
    """Return the cost of a decision with its unit; the number, where the scheduler does not say the unit."""
    texts = (each.cost_text for each in winner.explanation.candidates if each.worker == winner.worker)
    return next(filter(None, texts), f"{winner.cost:.1f}")


def _fitting(found: Sequence[_Column], width: int) -> Table:
    """Return a table of the columns that fit, the most important ones; names of workers are never cut for others."""
    sizes = {
        one.name: max([cell_len(one.name), *(cell_len(printable(cell.plain)) for cell in one.cells)]) for one in found
    }
    kept = list(found)
    while sum(sizes[one.name] + _GAP for one in kept) - _GAP > width and any(one.importance for one in kept):
        kept.remove(min((one for one in kept if one.importance), key=lambda one: one.importance))
    table = columns(*(one.name for one in kept), right=[one.name for one in kept if one.right])
    for cells in zip(*(one.cells for one in kept), strict=True):
        table.add_row(*cells)
    return table


def _around(rows: Sequence[WorkerRow], view: View, lines: int | None) -> Sequence[WorkerRow]:
    """Return as many rows as there are lines, with the selected one among them."""
    if lines is None or len(rows) <= lines:
        return rows
    chosen = next((place for place, row in enumerate(rows) if row.name == view.selected), 0)
    first = max(0, min(chosen - lines // 2, len(rows) - lines))
    return rows[first : first + lines]


def _foot(view: View, count: int) -> Text:
    if view.is_typing:
        return Text(f"/{view.filter}▏", style="bold")
    filtered = f" · only {view.filter!r}" if view.filter else ""
    return Text(
        f"{count:,} workers by {view.sort}{filtered} · q quit  s sort  / filter  Enter decisions  ? help", style="dim"
    )


def _worker(one: scheduler_pb2.WatchDecisionsResponse) -> tuple[str, int]:
    return one.decision.worker.worker_id, one.decision.worker.dp_rank


def _where(one: scheduler_pb2.WatchDecisionsResponse) -> str:
    if one.code:
        return printable(one.message, MAX_CHARACTERS)
    return f"{one.decision.worker.worker_id}/{one.decision.worker.dp_rank}"


def _hit(one: scheduler_pb2.WatchDecisionsResponse) -> float | None:
    if one.code or not one.isl_tokens:
        return None
    return min(1.0, one.decision.overlap_blocks * one.decision.block_size / one.isl_tokens)


def _bar(share: float | None) -> str:
    if share is None:
        return "–"
    eighths = round(min(1.0, share) * _BAR_CELLS * 8)
    bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return f"{bar:<{_BAR_CELLS}} {100 * share:>3.0f} %"


def _hit_style(share: float | None) -> str:
    if share is None:
        return "dim"
    return "green" if share >= 0.5 else "yellow" if share >= 0.1 else ""


def _state_style(row: WorkerRow) -> str:
    return "red" if not row.well else "" if row.state in ("ok", "live") else "yellow"


def _blocks(row: WorkerRow) -> str:
    if row.decode_blocks is None:
        return "–"
    return f"{row.decode_blocks:,}{f' / {row.total_blocks:,}' if row.total_blocks else ''}"


def _count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def _rate(number: float | None) -> str:
    return "–" if number is None else f"{number:.1f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"
