"""`kvscout replay --matrix`: all cells, in processes, with what was run before taken from a file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvscout_cli.output import stderr, stdout
from kvscout_lab.cells import Contender
from kvscout_lab.matrix import matrix
from kvscout_lab.matrix_report import Verdict, as_json, markdown, percent, summary, verdicts
from kvscout_lab.matrix_run import MatrixPlan, run_matrix

POLICIES = ("kv-time", "kv", "kv-balance", "lmetric", "least-loaded")
SEEDS = 3


@dataclass(frozen=True, slots=True)
class MatrixOptions:
    """What the command line says of a matrix."""

    pattern: str
    jobs: int
    scale: float
    seeds: int
    out: Path | None
    again: tuple[str, ...]
    trace: Path | None
    as_json: bool
    as_markdown: bool

    def command(self, contenders: Sequence[Contender]) -> str:
        """The command line that says it, without what changes no number."""
        words = ["kvscout", "replay", "--matrix"]
        if self.pattern != "*":
            words += ["--cells", self.pattern]
        if self.seeds != SEEDS:
            words += ["--seeds", str(self.seeds)]
        if self.scale != 1.0:
            words += ["--scale", f"{self.scale:g}"]
        if self.trace is not None:
            words += ["--trace", self.trace.name]
        if tuple(contender.label for contender in contenders) != POLICIES:
            for contender in contenders:
                words += ["--policy", contender.label]
        return shlex.join([*words, "--markdown"])


def show_matrix(contenders: Sequence[Contender], options: MatrixOptions) -> None:
    """Runs the cells, and prints what became of the first policy in each.

    Raises:
        ConfigError: No cell matches, or an option is out of range.
    """
    cells = matrix(pattern=options.pattern, trace=options.trace is not None)
    plan = MatrixPlan(tuple(cells), tuple(contenders), options.seeds, options.scale, options.trace).validate()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=stderr(), transient=True, disable=not stderr().is_terminal
    ) as progress:
        task = progress.add_task("", total=None)

        def on_done(done: int, of: int, what: str) -> None:
            progress.update(task, completed=done, total=of, description=what)

        results = run_matrix(plan, jobs=options.jobs, path=options.out, again=options.again, on_done=on_done)
    found = verdicts(plan, results)
    if options.as_json:
        for each in found:
            click.echo(json.dumps(as_json(each)))
    elif options.as_markdown:
        click.echo(markdown(found, plan, options.command(contenders)))
    else:
        stdout().print(_table(found, plan))
        stdout().print(summary(found, plan.contenders[0].label))


def _table(found: Sequence[Verdict], plan: MatrixPlan) -> Table:
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
            f"{each.failed:,} failed" if each.failed else percent(ttft),
            f"{each.goodput[ours].mean:.1%}",
            each.best_goodput,
            percent(goodput),
            style="bold red" if each.lost else "",
        )
    return table
