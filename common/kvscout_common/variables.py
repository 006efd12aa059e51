"""Names of environment variables, whose values count, and those that nobody reads.

The rule: `KVSCOUT_` and what the variable says, in upper case. The names are not ours alone: in every container
Kubernetes sets `KVSCOUT_GATEWAY_PORT=tcp://10.96.0.7:7050` and its like for a Service `kvscout-gateway`. Such variables
are told by their names or values, and ignored. The lower case names of 0.2 are read where the new name is not set.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping

import click

PREFIX = "KVSCOUT_"
NATIVE = PREFIX + "NATIVE"
"""0 = run without the extension."""
REQUIRE_NATIVE = PREFIX + "REQUIRE_NATIVE"
"""1 = a missing extension is an error."""
SWITCHES = frozenset({NATIVE, REQUIRE_NATIVE})
"""Variables that are no program's flags."""

_NAMED = 3
"""Variables of Kubernetes that a warning names."""
_SERVICE_NAME = re.compile(
    r"[A-Z0-9_]*[A-Z0-9]_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


def value_of(name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the value of a variable; None = it is unset or empty, or Kubernetes made it for a Service.

    Args:
        name: As programs declare it, in upper case where it is kvscout's.
        environment: Names and values; None = those of this process.
    """
    environment = os.environ if environment is None else environment
    value = environment.get(name)
    if value and not of_kubernetes(name, value):
        return value
    return environment.get(name.lower()) or None if name.startswith(PREFIX) else None


def warn_of_variables(log: logging.Logger) -> None:
    """Log the `warnings` of the running program, if it is a click command."""
    context = click.get_current_context(silent=True)
    if context is not None:
        for warning in warnings(context.command, os.environ):
            log.warning("%s", warning)


def warnings(command: click.Command, environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable under an outdated name or a name that no program reads, and one for all that
    Kubernetes made.

    Args:
        command: The program that asks; the others are looked at only where a variable is not its own.
        environment: Names and values.
    """
    ours = {name: value for name, value in environment.items() if name.upper().startswith(PREFIX)}
    made = sorted(name for name, value in ours.items() if of_kubernetes(name, value))
    others = sorted(ours.keys() - set(made))
    known = set(SWITCHES).union(_variables(command))
    if not known.issuperset(name.upper() if name.islower() else name for name in others):
        known.update(name for program in _programs() for name in _variables(program))
    found = []
    if made:
        named = ", ".join(made[:_NAMED]) + (f" and {len(made) - _NAMED} more" if len(made) > _NAMED else "")
        found.append(
            f"ignored what Kubernetes sets for Services: {named}; `enableServiceLinks: false` in the pod omits them"
        )
    found += outdated(command, environment, known)
    for name in others:
        if name in known or (name.islower() and name.upper() in known):
            continue
        nearest = difflib.get_close_matches(name.upper(), sorted(known), n=1)
        found.append(f"nothing reads the variable {name}" + (f"; is it {nearest[0]}?" if nearest else ""))
    return found


def outdated(command: click.Command, environment: Mapping[str, str], known: Iterable[str] = ()) -> list[str]:
    """Return a sentence for each variable that a program reads under its lower case name of 0.2.

    Args:
        command: The program.
        environment: Names and values.
        known: Further variables that are read, such as those of other programs.
    """
    names = sorted({name.lower() for name in (*_variables(command), *known, *SWITCHES) if name.startswith(PREFIX)})
    return [
        f"the variable {name} is called {name.upper()} now; the old name is deprecated"
        for name in names
        if name in environment
    ]


def of_kubernetes(name: str, value: str) -> bool:
    """Return whether Kubernetes makes such a variable for a Service; it may have been set by others all the same."""
    if _SERVICE_NAME.fullmatch(name):
        return True
    return name.endswith("_PORT") and name.isupper() and _SERVICE_ADDRESS.fullmatch(value) is not None


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
