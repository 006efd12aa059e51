"""Verdicts of a matrix on one policy: in each cell against the best of all, with intervals over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from rich.table import Table

from kvscout_lab.matrix.run import MatrixPlan, Results, RunKey
from kvscout_lab.matrix.setups import MatrixCell
from kvscout_lab.statistics import Estimate, estimate, percent_apart

TTFT_PERCENT: Final = 2.0
"""So much above the best, and beyond its interval, is lost."""
GOODPUT_PERCENT: Final = 3.0
"""So much below the best is lost."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A policy in a cell against the others."""

    cell: MatrixCell
    requests: int
    """Requests of a run."""
    ttft: dict[str, Estimate]
    """Mean TTFT in seconds, by policy."""
    goodput: dict[str, Estimate]
    """Share of the requests that met the objective, by policy: all get the same requests at the same times."""
    hit_rate: dict[str, float]
    errors: dict[str, int]
    """Requests that failed in all runs, by policy: one that fails some is quick with the others."""
    best_ttft: str
    """The other policy of the least mean TTFT."""
    ttft_percent: Estimate
    """Above that one, seed by seed; negative = better."""
    best_goodput: str
    """The other policy of the most goodput."""
    goodput_percent: Estimate
    """Above that one; negative = worse."""

    @property
    def ttft_lost(self) -> bool:
        """Return whether TTFT is worse than that of another by more than `TTFT_PERCENT`, and by more than chance."""
        return self.ttft_percent.mean > TTFT_PERCENT and self.ttft_percent.low > 0

    @property
    def goodput_lost(self) -> bool:
        """Return whether goodput is below that of another by more than `GOODPUT_PERCENT`."""
        return self.goodput_percent.mean < -GOODPUT_PERCENT

    @property
    def lost(self) -> bool:
        """Either, or requests failed."""
        return self.ttft_lost or self.goodput_lost or self.failed > 0

    @property
    def failed(self) -> int:
        """Return requests of the policy itself that failed."""
        return next(iter(self.errors.values()))


def verdicts(plan: MatrixPlan, results: Results) -> list[Verdict]:
    """Return those of the plan's first policy, cell by cell."""
    return [verdict(cell, plan, results) for cell in plan.cells]


def verdict(cell: MatrixCell, plan: MatrixPlan, results: Results) -> Verdict:
    """That of the plan's first policy in a cell."""
    labels = [contender.label for contender in plan.contenders]
    runs = {label: [results[RunKey(cell.name, label, seed)] for seed in range(plan.seeds)] for label in labels}
    ttft = {label: [run["ttft"]["mean"] for run in found] for label, found in runs.items()}
    goodput = {label: [run["well_served"] for run in found] for label, found in runs.items()}
    errors = {label: sum(run["errors"] for run in found) for label, found in runs.items()}
    ours, others = labels[0], [label for label in labels[1:] if not errors[label]] or labels[:1]
    best_ttft = min(others, key=lambda label: fmean(ttft[label]))
    best_goodput = max(others, key=lambda label: fmean(goodput[label]))
    return Verdict(
        cell,
        runs[ours][0]["requests"],
        {label: estimate(values) for label, values in ttft.items()},
        {label: estimate(values) for label, values in goodput.items()},
        {label: fmean(run["hit_rate"] for run in found) for label, found in runs.items()},
        errors,
        best_ttft,
        percent_apart(ttft[ours], ttft[best_ttft]),
        best_goodput,
        percent_apart(goodput[ours], goodput[best_goodput]),
    )


def as_json(found: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON fields."""
    return {
        "cell": found.cell.name,
        "rate": found.cell.rate,
        "load": found.cell.load,
        "requests": found.requests,
        "ttft": {label: value._asdict() for label, value in found.ttft.items()},
        "goodput": {label: value._asdict() for label, value in found.goodput.items()},
        "hit_rate": found.hit_rate,
        "errors": found.errors,
        "best_ttft": found.best_ttft,
        "ttft_percent": found.ttft_percent._asdict(),
        "best_goodput": found.best_goodput,
        "goodput_percent": found.goodput_percent._asdict(),
        "lost": found.lost,
    }


def summary(found: Sequence[Verdict], policy: str) -> str:
    """Return the numbers of cells won, within tolerance, and lost, as a sentence."""
    lost = [each for each in found if each.lost]
    won = sum(each.ttft_percent.high < 0 and not each.failed for each in found)
    text = (
        f"{len(found)} cells: {policy} has the significantly lowest mean TTFT in {won}; it is within "
        f"{TTFT_PERCENT:g} % or its interval in TTFT and {GOODPUT_PERCENT:g} % in goodput in {len(found) - len(lost)}"
    )
    return f"{text}, and outside in {len(lost)}." if lost else f"{text}."


def markdown(found: Sequence[Verdict], plan: MatrixPlan, command: str) -> str:
    """Return a page's part: the command, how many are won and lost, and a table a group.

    Args:
        found: The verdicts.
        plan: Plan of the run.
        command: That makes it.
    """
    labels = [contender.label for contender in plan.contenders]
    ours = labels[0]
    lines = [
        "```",
        command,
        "```",
        "",
        summary(found, ours),
        "",
        f"Mean TTFT in ms over {plan.seeds} {'seed' if plan.seeds == 1 else 'seeds'} ± its 95 % interval, and the "
        f"paired difference of `{ours}` to the best of the others. **Bold** marks losses: more than "
        f"{TTFT_PERCENT:g} % of TTFT and more than its interval, or more than {GOODPUT_PERCENT:g} % of goodput "
        "(the share of all requests that had their first token within 2 s and 75 ms between tokens).",
    ]
    group = None
    for each in found:
        name, _, rest = each.cell.name.partition("/")
        if name != group:
            group = name
            head = ["cell", "flows/s", *labels, "TTFT against the best", f"goodput of `{ours}`", "against the best"]
            lines += ["", f"### {name}", "", "| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
        lines.append("| " + " | ".join(_row(each, rest, labels)) + " |")
    return "\n".join(lines)


def table(found: Sequence[Verdict], plan: MatrixPlan) -> Table:
    """Return a table of the verdicts, a row each."""
    ours = plan.contenders[0].label
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (
        ("cell", "left"),
        (f"{ours}, ms", "right"),
        ("best other", "left"),
        ("ms", "right"),
        ("TTFT", "right"),
        ("well served", "right"),
        ("best other", "left"),
        ("goodput", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]  # one of both
    for each in found:
        ttft, goodput = each.ttft_percent, each.goodput_percent
        table.add_row(
            each.cell.name,
            f"{1e3 * each.ttft[ours].mean:,.1f}",
            each.best_ttft,
            f"{1e3 * each.ttft[each.best_ttft].mean:,.1f}",
            f"{each.failed:,} failed" if each.failed else _percent(ttft),
            f"{each.goodput[ours].mean:.1%}",
            each.best_goodput,
            _percent(goodput),
            style="bold red" if each.lost else "",
        )
    return table


def _row(found: Verdict, name: str, labels: Sequence[str]) -> list[str]:
    served = [label for label in labels if not found.errors[label]]
    best = min(served, key=lambda label: found.ttft[label].mean, default="")
    against = f"{_percent(found.ttft_percent)} `{found.best_ttft}`"
    if found.failed:
        against = f"{found.failed:,} requests failed"
    return [
        f"**{name}**" if found.lost else name,
        f"{found.cell.rate:,.4g}",
        *(f"{_ms(found.ttft[label])}{' ✓' if label == best else ''}" for label in labels),
        _bold(against, found.ttft_lost or found.failed > 0),
        f"{found.goodput[labels[0]].mean:.1%}",
        _bold(f"{_percent(found.goodput_percent)} `{found.best_goodput}`", found.goodput_lost),
    ]


def _bold(text: str, lost: bool) -> str:
    return f"**{text}**" if lost else text


def _ms(value: Estimate) -> str:
    mean = 1e3 * value.mean
    digits = 0 if mean >= 100 else 1
    half = "" if value.half is None else f" ± {1e3 * value.half:.{digits}f}"
    return f"{mean:,.{digits}f}{half}"


def _percent(value: Estimate) -> str:
    half = "" if value.half is None else f" ± {value.half:.1f}"
    return f"{value.mean:+.1f}{half} %"
