"""Cells → tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from kvscout_bench.laboratory.cells import Cell
from kvscout_bench.laboratory.measures import Measures

_COLUMNS = (
    "policy",
    "TTFT mean",
    "p50",
    "p90",
    "p99",
    "ITL mean",
    "p99",
    "goodput/s",
    "hit rate",
    "hottest",
    "batch",
    "errors",
)


def title(cell: Cell) -> str:
    """What a cell is, in one line."""
    workers = f"{cell.workers} workers"
    if cell.prefill_workers:
        workers = f"{cell.prefill_workers} prefill and {cell.workers} decode workers"
    load = "" if cell.load is None else f" = {cell.load:.0%} of where kv saturates"
    requests = cell.results[0].measures.requests if cell.results else 0
    return (
        f"{cell.workload}: {requests:,} requests, {workers}, {cell.kv_tokens:,} tokens of KV each, "
        f"{cell.rate:.3g} flows/s{load}"
    )


def table(cell: Cell) -> Table:
    """The policies of a cell side by side."""
    shown = Table(box=None, pad_edge=False, header_style="bold", title=title(cell), title_justify="left")
    for column in _COLUMNS:
        shown.add_column(column, justify="left" if column == "policy" else "right")
    for label, measures in cell.results:
        shown.add_row(label, *row(measures))
    if cell.results:
        first = cell.results[0].measures
        shown.add_row("bound", _ms(first.bound_ttft_mean), *[""] * 6, f"{first.bound_hit_rate:.1%}", style="dim")
    return shown


def row(measures: Measures) -> list[str]:
    """What a table shows of a policy."""
    return [
        *(_ms(value) for value in measures.ttft),
        _ms(measures.itl.mean),
        _ms(measures.itl.p99),
        f"{measures.goodput:.2f}",
        f"{measures.hit_rate:.1%}",
        f"{measures.hottest:.2f}×",
        str(measures.largest_batch),
        str(measures.errors),
    ]


def as_json(cell: Cell) -> dict[str, Any]:
    """A cell as JSON fields."""
    return {
        **{name: value for name, value in cell._asdict().items() if name != "results"},
        "results": [{"policy": label, **measures.as_json()} for label, measures in cell.results],
    }


def markdown(cells: Sequence[Cell]) -> str:
    """Cells as a table of a page, a row each: per policy mean and p99 of TTFT, mean ITL, goodput and hit rate."""
    labels = list(dict.fromkeys(result.label for cell in cells for result in cell.results))
    head = ["workers", "KV tokens", "load", "flows/s", "bound", *labels]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for cell in cells:
        found = dict(cell.results)
        bound = next(iter(found.values())).bound_ttft_mean if found else 0.0
        texts = [
            str(cell.workers) if not cell.prefill_workers else f"{cell.prefill_workers} + {cell.workers}",
            f"{cell.kv_tokens:,}",
            "" if cell.load is None else f"{cell.load:.0%}",
            f"{cell.rate:.3g}",
            f"{bound:.3f}",
            *(_short(found[label]) if label in found else "" for label in labels),
        ]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _short(measures: Measures) -> str:
    ttft, itl = measures.ttft, 1000 * measures.itl.mean
    return f"{ttft.mean:.3f} / {ttft.p99:.2f} / {itl:.0f} / {measures.goodput:.1f} / {measures.hit_rate:.0%}"


def _ms(value: float) -> str:
    return f"{1000 * value:,.0f} ms" if value >= 0.1 else f"{1000 * value:.1f} ms"
