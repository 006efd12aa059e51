"""Cells → a picture. Needs matplotlib, which the extra `lab` installs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvscout_common.errors import ConfigError
from kvscout_lab.cells.cells import Cell
from kvscout_lab.cells.plan import Change, Outcome


def plot(cells: Sequence[Cell], path: Path) -> None:  # one panel after the other
    """Draw TTFT by policy: against the load where cells differ in it, else as bars.

    Args:
        cells: At least one.
        path: A .png, .svg or .pdf.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    pyplot = _pyplot()
    from matplotlib.ticker import FuncFormatter

    groups: dict[tuple[str, int, int], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.workload, cell.workers, cell.kv_tokens].append(cell)
    figure, axes = pyplot.subplots(
        2, len(groups), figsize=(4.2 * len(groups) + 1.2, 6.4), squeeze=False, layout="constrained"
    )
    for column, ((workload, workers, kv_tokens), members) in enumerate(groups.items()):
        labels = [result.label for result in members[0].results]
        for line, (name, pick) in enumerate((("mean", 0), ("p99", 3))):
            shown = axes[line][column]
            for number, label in enumerate(labels):
                values = [cell.results[number].measures.ttft[pick] for cell in members]
                if len(members) > 1:
                    shown.plot([_at(cell) for cell in members], values, marker="o", markersize=3, label=label)
                else:
                    shown.bar(label, values[0])
                    shown.tick_params(axis="x", rotation=60)
            if len(members) > 1:
                bound = [cell.results[0].measures.bound_ttft_mean for cell in members]
                if pick == 0:
                    shown.plot([_at(cell) for cell in members], bound, color="black", linestyle=":", label="bound")
                shown.set_xlabel("flows a second" if members[0].load is None else "load, of where kv saturates")
            shown.set_yscale("log")
            for axis in (shown.yaxis.set_major_formatter, shown.yaxis.set_minor_formatter):
                axis(FuncFormatter(lambda value, _: f"{value:g}"))
            shown.tick_params(labelsize=7, which="both")
            shown.set_ylabel(f"TTFT {name}, seconds")
            if not line:
                shown.set_title(f"{workload}\n{workers} workers, {kv_tokens:,} KV tokens", fontsize=9)
    if any(len(members) > 1 for members in groups.values()):
        axes[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(pyplot, figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("needs matplotlib: pip install 'kvscout[lab]'", field="plot") from error
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "kvscout"
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    return pyplot


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}", field="plot") from error
    finally:
        pyplot.close(figure)


def _at(cell: Cell) -> float:
    return cell.rate if cell.load is None else cell.load


def plot_plan(recorded: Outcome, outcomes: Sequence[tuple[Change, Outcome]], path: Path) -> None:
    """Draw hit rate over the size of the caches, and TTFT over the number of workers, of the set-ups that differ there.

    Args:
        recorded: What was recorded.
        outcomes: Set-ups, today's first.
        path: A .png, .svg or .pdf.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    pyplot = _pyplot()
    today, _ = outcomes[0]
    figure, (caches, workers) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    alike = [(change, outcome) for change, outcome in outcomes if change.contender is today.contender]
    sizes = sorted(
        (change.cluster.engine.kv_tokens, outcome.hit_rate)
        for change, outcome in alike
        if replace(change.cluster, engine=today.cluster.engine) == today.cluster
        and change.cluster.engine.offload_tokens == today.cluster.engine.offload_tokens
    )
    caches.plot(*zip(*sizes, strict=True), marker="o", markersize=3, label="replayed")
    caches.axhline(recorded.hit_rate, color="black", linestyle=":", label="recorded")
    caches.set_xscale("log")
    caches.set_ylim(0, 1)
    caches.set_xlabel("KV tokens of a worker")
    caches.set_ylabel("hit rate")
    counts = sorted(
        (change.cluster.workers, outcome.ttft_mean, outcome.ttft_p99)
        for change, outcome in alike
        if replace(change.cluster, workers=today.cluster.workers) == today.cluster
    )
    for name, place, of_recorded in (("mean", 1, recorded.ttft_mean), ("p99", 2, recorded.ttft_p99)):
        (drawn,) = workers.plot(
            [row[0] for row in counts], [row[place] for row in counts], marker="o", markersize=3, label=name
        )
        workers.axhline(of_recorded, color=drawn.get_color(), linestyle=":", label=f"{name}, recorded")
    workers.set_yscale("log")
    workers.set_xlabel("workers")
    workers.set_ylabel("TTFT, seconds")
    for shown in (caches, workers):
        shown.legend(fontsize=7)
        shown.grid(visible=True, alpha=0.3)
    _save(pyplot, figure, path)
