"""`kvscout break`: let a simulated engine of `kvscout up` fail, to see what follows."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Final

import aiohttp
import click

from kvscout_cli.commands.up import RunningStack, complete_engine, state_dir_flag
from kvscout_cli.connection import option
from kvscout_cli.lifetime import run
from kvscout_cli.output import echo
from kvscout_common.errors import FailedPrecondition, Unavailable
from kvscout_common.settings.flags import SectionedCommand

SLOWDOWN: Final = 10.0
TIMEOUT_SECONDS: Final = 5.0
_FAULTS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "slow": ({"slowdown": SLOWDOWN}, f"takes {SLOWDOWN:g} times as long for each step"),
    "mute-events": ({"drop_events": 1.0}, "publishes no events any more"),
}
"""Faults by name: the request to a simulated engine, and their effect."""
_MENDED: Final = {"slowdown": 1.0, "drop_events": 0.0}


@click.command(cls=SectionedCommand)
@click.argument("worker", shell_complete=complete_engine)
@option("--kill", "fault", flag_value="kill", help="End it as SIGKILL does; `kvscout up` starts it again.")
@option("--hang", "fault", flag_value="hang", help="Stop it (SIGSTOP): its sockets stay open, but it does not answer.")
@option("--slow", "fault", flag_value="slow", help=f"Make each step {SLOWDOWN:g} times as long.")
@option("--mute-events", "fault", flag_value="mute-events", help="Stop publishing KV events.")
@option("--mend", "fault", flag_value="mend", help="Undo --hang, --slow and --mute-events.")
@state_dir_flag
def command(worker: str, fault: str | None, state_dir: Path) -> None:
    """Make a simulated engine of `kvscout up` fail, and mend it.

    \b
        kvscout break mocker-0 --hang
        kvscout doctor
        kvscout break mocker-0 --mend
    """
    if fault is None:
        raise click.UsageError("Give one of --kill, --hang, --slow, --mute-events, --mend.")
    stack = RunningStack.of(state_dir)
    url, pid = stack.engine(worker)
    undo = f"`kvscout break {worker} --mend` undoes it"
    match fault:
        case "kill":
            _signal(worker, pid, signal.SIGKILL)
            echo(f"{worker} is killed (pid {pid}); `kvscout up` starts it again")
        case "hang":
            _signal(worker, pid, signal.SIGSTOP)
            echo(f"{worker} hangs (pid {pid}); {undo}")
        case "mend":
            _signal(worker, pid, signal.SIGCONT)
            run(_tell(worker, url, _MENDED))
            echo(f"{worker} is well")
        case _:
            body, effect = _FAULTS[fault]
            run(_tell(worker, url, body))
            echo(f"{worker} {effect}; {undo}")


def _signal(worker: str, pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise FailedPrecondition(f"{worker} does not run now; `kvscout logs` says why") from None


async def _tell(worker: str, url: str, body: dict[str, Any]) -> None:
    """Set faults of a simulated engine.

    Raises:
        Unavailable: It does not answer.
    """
    timeout = aiohttp.ClientTimeout(TIMEOUT_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http, http.post(f"{url}/mock/faults", json=body) as answer:
            answer.raise_for_status()
    except (TimeoutError, aiohttp.ClientError) as error:
        raise Unavailable(f"{worker} does not answer at {url}: {str(error) or 'it hangs'}") from error
