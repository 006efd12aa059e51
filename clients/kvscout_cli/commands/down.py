"""`kvscout down`: stop what `kvscout up` started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click

from kvscout_cli.commands.up import state_dir_flag
from kvscout_cli.output import echo
from kvscout_cli.state import StateDirectory
from kvscout_common.settings.flags import SectionedCommand

STOP_SECONDS = 60.0


@click.command(cls=SectionedCommand)
@state_dir_flag
def command(state_dir: Path) -> None:
    """Stop what `kvscout up` started from this directory."""
    state = StateDirectory(state_dir)
    pid = state.read().get("pid") if state.is_held() else None
    if pid is None:
        echo("kvscout is not up")
        return
    os.kill(pid, signal.SIGTERM)
    state.wait_until_free(STOP_SECONDS)
    echo("kvscout is down")
