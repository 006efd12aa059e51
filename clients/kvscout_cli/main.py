"""`kvscout`: the command line. Each command is one module in `commands`, imported when it is used.

Exit codes: 0 done · 1 the call or a process failed · 2 wrong usage or configuration · 3 the gateway cannot be reached
or nothing can serve the request now · 128 + n ended by signal n (Ctrl-C: 130).
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import click

from kvscout_cli.output import echo
from kvscout_cli.process import ProcessFailed
from kvscout_common.errors import DeadlineExceeded, InvalidArgument, KvscoutError, Unavailable
from kvscout_common.settings.flags import SectionedGroup
from kvscout_common.variables import outdated

COMMANDS = (
    "demo",
    "up",
    "down",
    "logs",
    "break",
    "load",
    "status",
    "health",
    "doctor",
    "top",
    "shadow",
    "route",
    "generate",
    "workers",
    "loads",
    "requests",
    "failures",
    "why",
    "replicas",
    "serve",
    "dump",
    "record",
    "replay",
    "plan",
    "bench",
)
"""In the order of --help; command x is `commands.x.command`."""
LOGS_ITSELF = ("serve", "bench")
"""Commands that are programs of their own."""


class CliError(click.ClickException):
    """A kvscout error as a message and an exit code instead of a traceback."""

    exit_code = 1

    def __init__(self, error: KvscoutError) -> None:
        super().__init__(str(error))
        self.tail = error.tail if isinstance(error, ProcessFailed) else ()

    def show(self, file: Any = None) -> None:
        """Print the message and, for a process, the last lines it wrote."""
        if self.tail:
            echo("last lines of its log:", err=True)
            for line in self.tail:
                echo(f"  {line}", err=True)
        echo(f"error: {self.message}", err=True)


class WrongUsage(CliError):
    """The arguments of a command make no sense."""

    exit_code = 2


class OutOfReach(CliError):
    """Nothing can serve the call now."""

    exit_code = 3


def cli_error(error: KvscoutError) -> CliError:
    """Return the exit code and message of an error."""
    match error:
        case ProcessFailed():
            return CliError(error)
        case InvalidArgument():
            return WrongUsage(error)
        case Unavailable() | DeadlineExceeded():
            return OutOfReach(error)
        case _:
            return CliError(error)


class Commands(SectionedGroup):
    """The command group; turns kvscout errors into messages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"kvscout_cli.commands.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command, and print which variables have outdated names; services log it themselves."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name not in LOGS_ITSELF and not ctx.resilient_parsing:
            for warning in outdated(command, os.environ):
                echo(f"warning: {warning}", err=True)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KvscoutError as error:
            raise cli_error(error) from error


@click.group(cls=Commands)
def main() -> None:
    """KV-aware routing of LLM requests: try it, run it, talk to it."""


if __name__ == "__main__":
    main(prog_name="kvscout")
