"""Cells → a picture. Needs matplotlib, which the extra `lab` installs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from kvscout_common.errors import ConfigError
from kvscout_lab.cells.cells import Cell


def plot(cells: Sequence[Cell], path: Path) -> None:  # noqa: C901, PLR0912  # one panel after the other
    """Draw TTFT by policy: against the load where cells differ in it, else as bars.

    Args:
        cells: At least one.
        path: A .png, .svg or .pdf.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("needs matplotlib: pip install 'kvscout[lab]'", field="plot") from error
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "kvscout"
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot
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
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}", field="plot") from error
    finally:
        pyplot.close(figure)


def _at(cell: Cell) -> float:
    return cell.rate if cell.load is None else cell.load
