"""Output of commands: results on stdout as text or JSON, everything else on stderr.

What services say is theirs: none of it moves a cursor, changes a colour, hides text or is a link, and none of it is
longer than a person would read. All that commands print goes through here.
"""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata
from collections.abc import Container, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kvscout_common.plain_text import printable

MAX_CHARACTERS: Final = 20_000
"""Characters of one printed text."""
MAX_CELL_CHARACTERS: Final = 400
"""Characters of one cell of a table, which is one line."""
_GAP: Final = "  "
"""Between the columns of a table."""
_JOINERS: Final = "\n\t\u200c\u200d"
"""Not printable by themselves, but parts of texts and of scripts."""
_UNSEEN_IN_JSON: Final = re.compile(r"[^\n -~]")


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


def shown(text: str, *, limit: int | None = MAX_CHARACTERS) -> str:
    """Return a text of a service as a terminal may have it: in lines, with what it would obey escaped.

    Args:
        text: Any.
        limit: Characters of it, about; None = all.
    """
    if limit is not None and len(text) > limit:
        text = f"{text[: limit * 3 // 4]} …({len(text):,} characters)… {text[-limit // 4 :]}"
    return "".join(one if _is_seen(one) else printable(one) for one in text) if not text.isprintable() else text


def _is_seen(character: str) -> bool:
    return character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs"


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


def echo(text: str = "", *, err: bool = False, nl: bool = True, limit: int | None = MAX_CHARACTERS) -> None:
    """Print a text.

    Args:
        text: Any.
        err: On stderr.
        nl: With the end of a line.
        limit: See `shown`.
    """
    click.echo(shown(text, limit=limit), err=err, nl=nl)


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


def age(seconds: float | None) -> str:
    """Return a time span as people say it; None = "–"."""
    if seconds is None:
        return "–"
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def print_json(value: Any) -> None:
    """Print results as one JSON document."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False)
    click.echo(_UNSEEN_IN_JSON.sub(lambda found: found[0] if _is_seen(found[0]) else json.dumps(found[0])[1:-1], text))


def plain(value: Any) -> Any:
    """Return dataclasses, named tuples and enums as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
