"""Tables and styled text of commands, by Rich; see `output` for what holds for all that is printed."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kvscout_cli.output import shown
from kvscout_common.plain_text import printable

MAX_CELL_CHARACTERS: Final = 400
"""Characters of one cell of a table, which is one line."""
_GAP: Final = "  "
"""Between the columns of a table."""


class _Console(Console):
    """Prints texts as they read: no markup, nothing that a terminal obeys."""

    def print(self, *objects: Any, **options: Any) -> None:
        """See `Console.print`."""
        super().print(*map(_shown, objects), **options)


class _Table(Table):
    """The same for the cells of a table; of texts, each in one line, see `columns`."""

    def __init__(self, names: Sequence[str], right: Container[str]) -> None:
        super().__init__(box=None, pad_edge=False, header_style="bold")
        self._right = [name in right for name in names]
        self._lines: list[tuple[str | Text, ...]] = [tuple(Text(name, style="bold") for name in names)]
        for name, is_right in zip(names, self._right, strict=True):
            self.add_column(name, justify="right" if is_right else "left")

    def add_row(self, *cells: Any, **options: Any) -> None:
        """See `Table.add_row`."""
        plain = tuple(map(_cell, cells))
        self._lines.append(plain + ("",) * (len(self._right) - len(plain)))
        super().add_row(*plain, **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay the rows out; where each fits into a line, without Rich, which takes some thousand calls for a row."""
        texts = [[cell.plain if isinstance(cell, Text) else cell for cell in line] for line in self._lines]
        sizes = [[cell_len(text) for text in line] for line in texts]
        widths = [max(column) for column in zip(*sizes, strict=True)]
        if sum(widths) + len(_GAP) * (len(widths) - 1) > options.max_width:
            yield from super().__rich_console__(console, options)
            return
        for line, line_texts, line_sizes in zip(self._lines, texts, sizes, strict=True):
            row: list[Segment] = []
            for cell, text, size, width, right in zip(line, line_texts, line_sizes, widths, self._right, strict=True):
                room = " " * (width - size)
                style = console.get_style(cell.style) if isinstance(cell, Text) and cell.style else None
                row.append(Segment(room + text if right else text + room, style))
                row.append(Segment(_GAP))
            row[-1] = Segment.line()
            yield from row


def _shown(value: Any) -> Any:
    return _with_text(value, shown(value.plain if isinstance(value, Text) else value)) if _is_text(value) else value


def _cell(value: Any) -> Any:
    if not _is_text(value):
        return value
    return _with_text(value, printable(value.plain if isinstance(value, Text) else value, MAX_CELL_CHARACTERS))


def _is_text(value: Any) -> bool:
    return isinstance(value, str | Text)


def _with_text(value: str | Text, text: str) -> str | Text:
    """Return the same in other words; what is styled within it stays so where the words stay."""
    if isinstance(value, str):
        return text
    return value if value.plain == text else Text(text, style=value.style)


def stdout() -> Console:
    """For results."""
    return _console(stderr=False)


def stderr() -> Console:
    """For progress and remarks."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    """Not wrapped when piped, so that lines stay lines."""
    console = _Console(stderr=stderr, highlight=False, markup=False)
    return console if console.is_terminal else _Console(stderr=stderr, highlight=False, markup=False, width=240)


def columns(*names: str, right: Container[str] = ()) -> Table:
    """Return an empty table without lines.

    Args:
        names: Its columns.
        right: Those that hold numbers.
    """
    return _Table(names, right)


def session_name(session: int) -> str:
    """Return how a session is shown: the first half of its number, which tells those of one screen apart."""
    return f"{session:016x}"[:8] if session else "–"
