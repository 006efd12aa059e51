"""Names of environment variables, and those that nobody reads.

The rule: `kvscout_` and what the variable says, in lower case. In upper case the names are not ours alone: Kubernetes
sets `KVSCOUT_GATEWAY_PORT=tcp://...` and its like in every container for a Service `kvscout-gateway`, and any flag that
ends in "port" has a Service that would name it. What Kubernetes makes has no lower case letter, and POSIX keeps such
names for applications.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping

import click

PREFIX = "kvscout_"
NATIVE = PREFIX + "native"
"""0 = run without the extension."""
REQUIRE_NATIVE = PREFIX + "require_native"
"""1 = a missing extension is an error."""
SWITCHES = frozenset({NATIVE, REQUIRE_NATIVE})
"""Variables that are no program's flags."""

_OF_KUBERNETES = re.compile(
    r"[A-Z0-9_]*[A-Z0-9]_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


def warn_of_variables(log: logging.Logger) -> None:
    """Log the `warnings` of the running program, if it is a click command."""
    context = click.get_current_context(silent=True)
    if context is not None:
        for warning in warnings(context.command, os.environ):
            log.warning("%s", warning)


def warnings(command: click.Command, environment: Mapping[str, str]) -> list[str]:
    """One sentence for each variable that looks like one of kvscout's and is read by none of its programs.

    Args:
        command: The program that asks; the others are looked at only where a variable is not its own.
        environment: Names and values.
    """
    unknown = [
        name
        for name, value in environment.items()
        if name.upper().startswith(PREFIX.upper()) and not of_kubernetes(name, value)
    ]
    known = set(SWITCHES).union(_variables(command))
    if not known.issuperset(unknown):
        known.update(name for program in _programs() for name in _variables(program))
    found = []
    for name in sorted(set(unknown) - known):
        nearest = difflib.get_close_matches(name.lower(), sorted(known), n=1)
        found.append(f"nothing reads the variable {name}" + (f"; is it {nearest[0]}?" if nearest else ""))
    return found


def of_kubernetes(name: str, value: str) -> bool:
    """Return whether Kubernetes makes such a variable for a Service; it may have been set by others all the same."""
    return bool(_OF_KUBERNETES.fullmatch(name)) or (name.endswith("_PORT") and "://" in value)


def _programs() -> Iterator[click.Command]:
    from importlib.metadata import entry_points

    for script in entry_points(group="console_scripts"):
        if script.dist is not None and script.dist.name == "kvscout":
            yield script.load()


def _variables(command: click.Command) -> Iterator[str]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (inner := command.get_command(context, name)) is not None:
                yield from _variables(inner)
    for parameter in command.params:
        names: str | Iterable[str] = parameter.envvar or ()
        yield from (names,) if isinstance(names, str) else names
