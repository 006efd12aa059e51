"""Cells → tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rich.table import Table

from kvscout_lab.cells.cells import Cell
from kvscout_lab.cells.measures import Measures
from kvscout_lab.statistics import Estimate, estimate, percent_apart

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
    "bound at its times",
)
_LATER = ("later turns: TTFT", "p99", "hit rate")
"""Columns of workloads whose flows have several turns."""


def title(cell: Cell) -> str:
    """Return the title of a cell, in one line."""
    workers = f"{cell.workers} workers"
    if cell.prefill_workers:
        workers = f"{cell.prefill_workers} prefill and {cell.workers} decode workers"
    if cell.replicas > 1:
        workers += f", {cell.replicas} schedulers {cell.sync_ms:g} ms apart"
    load = "" if cell.load is None else f" = {cell.load:.0%} of where kv saturates"
    requests = cell.results[0].measures.requests if cell.results else 0
    return (
        f"{cell.workload}: {requests:,} requests, {workers}, {cell.kv_tokens:,} tokens of KV each, "
        f"{cell.rate:.3g} flows/s{load}"
    )


def table(cell: Cell) -> Table:
    """Return the policies of a cell side by side."""
    shown = Table(box=None, pad_edge=False, header_style="bold", title=title(cell), title_justify="left")
    has_later = any(measures.later_ttft.mean for _, measures in cell.results)
    for column in (*_COLUMNS, *(_LATER if has_later else ())):
        shown.add_column(column, justify="left" if column == "policy" else "right")
    for label, measures in cell.results:
        later = (_ms(measures.later_ttft.mean), _ms(measures.later_ttft.p99), f"{measures.later_hit_rate:.1%}")
        shown.add_row(label, *row(measures), *(later if has_later else ()))
    if cell.results:
        first = cell.results[0].measures
        shown.add_row("bound", _ms(first.bound_ttft_mean), *[""] * 6, f"{first.bound_hit_rate:.1%}", style="dim")
    return shown


def row(measures: Measures) -> list[str]:
    """Return the row of a policy."""
    return [
        *(_ms(value) for value in measures.ttft),
        _ms(measures.itl.mean),
        _ms(measures.itl.p99),
        f"{measures.goodput:.2f}",
        f"{measures.hit_rate:.1%}",
        f"{measures.hottest:.2f}×",
        str(measures.largest_batch),
        str(measures.errors),
        _ms(measures.pooled_bound_ttft_mean),
    ]


def as_json(cell: Cell) -> dict[str, Any]:
    """Return a cell as JSON fields."""
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
            _workers(cell),
            f"{cell.kv_tokens:,}",
            "" if cell.load is None else f"{cell.load:.0%}",
            f"{cell.rate:.3g}",
            f"{bound:.3f}",
            *(_short(found[label]) if label in found else "" for label in labels),
        ]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


class _Over(NamedTuple):
    """A policy in one cell, over seeds."""

    label: str
    ttft: Estimate
    """Mean TTFT in seconds."""
    ttft_percent: Estimate
    """Above the policy with the least, seed by seed."""
    goodput: Estimate
    """Share of the requests that met the objective."""
    goodput_percent: Estimate
    """Above the policy with the most, seed by seed."""
    itl: Estimate
    hit_rate: Estimate
    ttft_p99: Estimate
    hottest: Estimate
    """Mean batch of the fullest worker, in those of the mean worker."""
    later_ttft: Estimate
    """Mean TTFT of turns that are not the first of their flow, in seconds; 0 where there are none."""
    later_ttft_p99: Estimate
    later_hit_rate: Estimate


def _over(group: Sequence[Cell]) -> list[_Over]:
    runs = {
        result.label: [each.results[place].measures for each in group] for place, result in enumerate(group[0].results)
    }
    ttft = {label: [each.ttft.mean for each in found] for label, found in runs.items()}
    goodput = {label: [each.well_served for each in found] for label, found in runs.items()}
    least = min(ttft, key=lambda label: fmean(ttft[label]))
    most = max(goodput, key=lambda label: fmean(goodput[label]))
    return [
        _Over(
            label,
            estimate(ttft[label]),
            percent_apart(ttft[label], ttft[least]),
            estimate(goodput[label]),
            percent_apart(goodput[label], goodput[most]),
            estimate([each.itl.mean for each in found]),
            estimate([each.hit_rate for each in found]),
            estimate([each.ttft.p99 for each in found]),
            estimate([each.hottest for each in found]),
            estimate([each.later_ttft.mean for each in found]),
            estimate([each.later_ttft.p99 for each in found]),
            estimate([each.later_hit_rate for each in found]),
        )
        for label, found in runs.items()
    ]


def seeds_table(group: Sequence[Cell]) -> Table:
    """Return the policies of a cell side by side, over seeds, of which each is a cell of its own."""
    heading = f"{title(group[0])}, {len(group)} seeds"
    shown = Table(box=None, pad_edge=False, header_style="bold", title=heading, title_justify="left")
    columns = ("policy", "TTFT mean", "above the least", "p99", "ITL mean", "well served", "above the most", "hit rate",
               "hottest")  # fmt: skip
    rows = _over(group)
    has_later = any(each.later_ttft.mean for each in rows)
    for column in (*columns, *(_LATER if has_later else ())):
        shown.add_column(column, justify="left" if column == "policy" else "right")
    for each in rows:
        later = (
            _plus_minus(each.later_ttft, 1e3, " ms"),
            _plus_minus(each.later_ttft_p99, 1e3, " ms"),
            _plus_minus(each.later_hit_rate, 100.0, " %"),
        )
        shown.add_row(
            each.label,
            _plus_minus(each.ttft, 1e3, " ms"),
            _plus_minus(each.ttft_percent, 1.0, " %"),
            _plus_minus(each.ttft_p99, 1e3, " ms"),
            _plus_minus(each.itl, 1e3, " ms"),
            _plus_minus(each.goodput, 100.0, " %"),
            _plus_minus(each.goodput_percent, 1.0, " %"),
            _plus_minus(each.hit_rate, 100.0, " %"),
            f"{each.hottest.mean:.2f}×",
            *(later if has_later else ()),
        )
    return shown


def seeds_json(group: Sequence[Cell]) -> dict[str, Any]:
    """Return a cell over seeds as JSON fields: of each policy means and half their 95 % intervals."""
    results = [
        {
            name: value._asdict() if isinstance(value, Estimate) else value
            for name, value in zip(("policy", *_Over._fields[1:]), each, strict=True)
        }
        for each in _over(group)
    ]
    first = {name: value for name, value in group[0]._asdict().items() if name != "results"}
    return {**first, "seeds": len(group), "results": results}


def seeds_markdown(groups: Sequence[Sequence[Cell]]) -> str:
    """Cells over seeds as a table of a page: per policy mean TTFT, what that is above the least, and the share
    of the requests that met the objective."""
    labels = list(dict.fromkeys(result.label for group in groups for result in group[0].results))
    head = ["workers", "KV tokens", "load", "flows/s", *labels]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for group in groups:
        cell, found = group[0], {each.label: each for each in _over(group)}
        texts = [_workers(cell), f"{cell.kv_tokens:,}", "" if cell.load is None else f"{cell.load:.0%}"]
        texts.append(f"{cell.rate:.3g}")
        for label in labels:
            each = found[label]
            texts.append(
                f"{_plus_minus(each.ttft, 1e3, ' ms')} / {_plus_minus(each.ttft_percent, 1.0, ' %')} / "
                f"{_plus_minus(each.goodput, 100.0, ' %')}"
            )
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _plus_minus(value: Estimate, scale: float, unit: str) -> str:
    half = "" if value.half is None else f" ± {scale * value.half:.1f}"
    return f"{scale * value.mean:,.1f}{half}{unit}"


def _workers(cell: Cell) -> str:
    return str(cell.workers) if not cell.prefill_workers else f"{cell.prefill_workers} + {cell.workers}"


def _short(measures: Measures) -> str:
    ttft, itl = measures.ttft, 1000 * measures.itl.mean
    return f"{ttft.mean:.3f} / {ttft.p99:.2f} / {itl:.0f} / {measures.goodput:.1f} / {measures.hit_rate:.0%}"


def _ms(value: float) -> str:
    return f"{1000 * value:,.0f} ms" if value >= 0.1 else f"{1000 * value:.1f} ms"
