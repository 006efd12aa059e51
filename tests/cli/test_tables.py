"""Tables of the command line: as Rich lays them out, at a fraction of the work where every row fits into one line."""

from __future__ import annotations

import io
import random
import re
import sys
from collections.abc import Sequence

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from support.seeds import test_seed

from kvscout_cli import tables
from kvscout_cli.commands import status
from kvscout_common.doctor.overview import Overview, SourceRow
from kvscout_common.doctor.worker_health import Health

Cell = str | Text


def printed(table: Table, width: int) -> list[tuple[str, str]]:
    """Each character and how it is styled; of spaces nobody sees that."""
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False, force_terminal=True, color_system="standard").print(
        table
    )
    found, style = [], ""
    for code, character in re.findall(r"(\x1b\[[\d;]*m)|(.)", out.getvalue(), re.DOTALL):
        if code:
            style = "" if code == "\x1b[0m" else style + code
        else:
            found.append((character, "" if character == " " else style))
    return found


def by_rich(names: Sequence[str], right: set[str], rows: Sequence[Sequence[Cell]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*row)
    return table


def test_a_table_reads_as_rich_would_lay_it_out_whether_or_not_it_fits() -> None:
    seed = test_seed()
    rng = random.Random(seed)
    words = ["", "a", "worker-1", "日本語", "e\u0301té", "[red]x[/red]", "a longer text of words", "  led", "1,234"]
    for _ in range(100):
        names = [f"{rng.choice(words)}{number}" for number in range(rng.randint(1, 5))]
        right = {name for name in names if rng.random() < 0.5}
        rows: list[list[Cell]] = [
            [
                Text(rng.choice(words), style="red") if rng.random() < 0.2 else rng.choice(words)
                for _ in range(rng.randint(1, len(names)))
            ]
            for _ in range(rng.randint(0, 6))
        ]
        ours = tables.columns(*names, right=right)
        for row in rows:
            ours.add_row(*row)
        for width in (30, 200):
            assert printed(ours, width) == printed(by_rich(names, right, rows), width), (names, right, rows, width)


def overview_of(ranks: int) -> Overview:
    row = SourceRow(
        *("default", "worker", 0, "llama", "127.0.0.1:7051", "disconnected", "nothing answers at tcp://127.0.0.1:5557"),
        *(False, "tcp://127.0.0.1:5557", None, 0, 0, None, Health("left out", "fails what others run", 7.0)),
    )
    return Overview((), tuple(row for _ in range(ranks)))


def calls_while(ranks: int) -> int:
    """Python functions that are called to print the status of a fleet."""
    count = 0

    def seen(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        status._print(overview_of(ranks))
    finally:
        sys.setprofile(None)
    return count


def test_a_row_of_the_status_is_not_laid_out_cell_by_cell(capsys: pytest.CaptureFixture[str]) -> None:
    calls_while(1)
    a_row = (calls_while(600) - calls_while(100)) / 500
    assert capsys.readouterr().out.count("disconnected") == 701
    # Rich makes about forty calls for each of its eleven cells.
    assert a_row < 300


def test_ten_times_the_workers_are_ten_times_the_calls_to_print(capsys: pytest.CaptureFixture[str]) -> None:
    calls_while(1)
    assert calls_while(2_000) < calls_while(200) * 11
    capsys.readouterr()
