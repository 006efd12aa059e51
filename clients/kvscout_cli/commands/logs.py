"""`kvscout logs`: what the processes of `kvscout up` have logged."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TextIO

import click

from kvscout_cli.commands.up import NAME_WIDTH, complete_process, state_dir_flag
from kvscout_cli.connection import option
from kvscout_cli.output import echo
from kvscout_cli.state import StateDirectory
from kvscout_common.errors import FailedPrecondition, NotFound
from kvscout_common.known_names import or_known
from kvscout_common.settings.flags import SectionedCommand

POLL_SECONDS: Final = 0.2


@click.command(cls=SectionedCommand)
@click.argument("service", default="", shell_complete=complete_process)
@option("--lines", default=100, show_default=True, type=click.IntRange(min=0), help="Last lines to print.")
@option("--follow", "-f", is_flag=True, help="Continue with new lines, until Ctrl-C or the end of `kvscout up`.")
@state_dir_flag
def command(service: str, lines: int, follow: bool, state_dir: Path) -> None:
    """Print the log of `kvscout up`, or of one of its processes.

    \b
        kvscout logs gateway --follow
        kvscout logs mocker-0
    """
    state = StateDirectory(state_dir)
    known = state.read().get("processes", {})
    if service and known and service not in (*known, "up"):
        raise NotFound(f"there is no process {service!r}{or_known(service, known)}")
    try:
        log = state.log_file.open(errors="replace")
    except FileNotFoundError:
        raise FailedPrecondition(f"there is no log in {state_dir}: `kvscout up` writes one") from None
    with log:
        for line in deque(_of(log, service), maxlen=lines):
            echo(line)
        if not follow:
            return
        try:
            for line in _of(_following(log, state), service):
                echo(line)
        except KeyboardInterrupt:
            return


def _of(lines: Iterable[str], service: str) -> Iterator[str]:
    """Yield the lines of a process; "" = of all."""
    for line in lines:
        if not service or line[:NAME_WIDTH].rstrip() == service:
            yield line.rstrip("\n")


def _following(log: TextIO, state: StateDirectory) -> Iterator[str]:
    """Yield new lines as they are written, until the stack has ended."""
    pending = ""
    while True:
        is_up = state.is_held()
        while piece := log.readline():
            pending += piece
            if pending.endswith("\n"):
                yield pending
                pending = ""
        if not is_up:
            return
        time.sleep(POLL_SECONDS)
