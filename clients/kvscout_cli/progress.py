"""Live progress of a replay: a bar on a terminal, a line every few seconds else. Both on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvscout_cli.output import echo
from kvscout_cli.tables import stderr
from kvscout_lab.real_time.record import RequestRecord

LINE_SECONDS = 5.0
"""Time between lines where there is no terminal."""


class ReplayProgress(Protocol):
    """Shows one replay."""

    def status(self, text: str) -> None:
        """Report progress while no requests are sent."""
        ...

    def record(self, record: RequestRecord) -> None:
        """Take in one more finished request; quick."""
        ...


class Tally:
    """Totals so far, as one short text."""

    def __init__(self) -> None:
        self.requests = self.errors = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._ttft_seconds = 0.0
        self._ttfts = 0

    def add(self, record: RequestRecord) -> None:
        """Take in one more request."""
        self.requests += 1
        self.errors += bool(record.error)
        if record.cached_tokens is not None:
            self._prompt_tokens += record.prompt_tokens
            self._cached_tokens += record.cached_tokens
        if record.ttft_seconds is not None:
            self._ttft_seconds += record.ttft_seconds
            self._ttfts += 1

    def __str__(self) -> str:
        hit_rate = 100 * self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0
        ttft = 1000 * self._ttft_seconds / self._ttfts if self._ttfts else 0.0
        return f"hit rate {hit_rate:.1f} %, TTFT {ttft:.0f} ms, {self.errors} errors"


@contextmanager
def replay_progress(label: str, total: int) -> Iterator[ReplayProgress]:
    """Show a replay of `total` requests while the block runs."""
    if sys.stderr.isatty():
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", style="dim"),
        )
        with Progress(*columns, console=stderr(), refresh_per_second=5) as progress:
            yield _Bar(progress, label, total)
    else:
        yield _Lines(label, total)


class _Bar:
    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=total, text="")
        self._tally = Tally()

    def status(self, text: str) -> None:
        self._progress.update(self._task, text=text)

    def record(self, record: RequestRecord) -> None:
        self._tally.add(record)
        self._progress.update(self._task, completed=self._tally.requests, text=str(self._tally))


class _Lines:
    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._tally = Tally()
        self._next_line = time.monotonic() + LINE_SECONDS

    def status(self, text: str) -> None:
        echo(f"{self._label}: {text}", err=True)

    def record(self, record: RequestRecord) -> None:
        self._tally.add(record)
        now = time.monotonic()
        if now >= self._next_line or self._tally.requests == self._total:
            self._next_line = now + LINE_SECONDS
            self.status(f"{self._tally.requests}/{self._total} requests, {self._tally}")
