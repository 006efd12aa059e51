"""What commands print: results on stdout as text or JSON, everything else on stderr."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Mapping
from enum import Enum
from typing import Any

import click
from rich.console import Console
from rich.table import Table


def stdout() -> Console:
    """For results."""
    return _console(stderr=False)


def stderr() -> Console:
    """For progress and remarks."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    """Not wrapped when piped, so that lines stay lines."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=240)


def columns(*names: str, right: Container[str] = ()) -> Table:
    """An empty table without lines.

    Args:
        names: Its columns.
        right: Those that hold numbers.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left")
    return table


def age(seconds: float | None) -> str:
    """A time span as people say it; None = "–"."""
    if seconds is None:
        return "–"
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def print_json(value: Any) -> None:
    """Prints results as one JSON document."""
    click.echo(json.dumps(plain(value), indent=2, ensure_ascii=False))


def plain(value: Any) -> Any:
    """Dataclasses, named tuples and enums as JSON values."""
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
