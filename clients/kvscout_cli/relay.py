"""The services' own flags, offered by a command that starts the services and passed on to them.

They are read from the services' commands, so that a flag declared there is taken here, with its type and its help.
Environment variables need no relay: the processes inherit them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import click
from click.core import ParameterSource

from kvscout_common.settings.flags import SERVER, SectionedOption

SERVICES = ("scheduler", "indexer", "gateway")

_OWNED = frozenset({"indexer", "no_indexer", "scheduler", "tls_ca", "tls_client_cert", "tls_client_key", "token_file"})
"""Flags that the stack sets itself: addresses and transports."""


@dataclass(frozen=True, slots=True)
class RelayedFlag:
    """A flag and the services that have it."""

    name: str
    """Name of the command's parameter."""
    option: SectionedOption
    services: tuple[str, ...]

    def words(self, value: Any) -> tuple[str, ...]:
        """Return the flag with a value, as a service takes it on its command line."""
        if self.option.is_flag:
            if value:
                return (self.option.opts[0],)
            return tuple(self.option.secondary_opts[:1])
        values = value if self.option.multiple else [value]
        return tuple(word for item in values for word in (self.option.opts[0], _word(item)))


def relayed_flags() -> list[RelayedFlag]:
    """Return every behaviour and performance flag of the services."""
    found: dict[str, RelayedFlag] = {}
    for service in SERVICES:
        main: click.Command = import_module(f"kvscout_{service}.main").main
        for option in main.params:
            if not isinstance(option, SectionedOption) or option.section == SERVER or option.name in _OWNED:
                continue
            name = option.human_readable_name
            if name in found:
                known = found[name]
                found[name] = replace(known, services=(*known.services, service))
            else:
                section = f"{service.capitalize()} {option.section.lower()}"
                found[name] = RelayedFlag(name, _copy(option, section), (service,))
    return list(found.values())


def relay(flags: Iterable[RelayedFlag]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the flags to a command, among its other values."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        parameters: list[click.Parameter] = command.__dict__.setdefault("__click_params__", [])
        parameters.extend(reversed([flag.option for flag in flags]))  # click collects from the last to the first
        return command

    return decorate


def given_words(context: click.Context, flags: Iterable[RelayedFlag], *services: str) -> tuple[str, ...]:
    """Return the flags of these services that the user gave, each once, as a command line; defaults stay theirs."""
    words: list[str] = []
    for flag in flags:
        given = context.get_parameter_source(flag.name) is ParameterSource.COMMANDLINE
        if given and not set(services).isdisjoint(flag.services):
            words.extend(flag.words(context.params[flag.name]))
    return tuple(words)


def _word(value: Any) -> str:
    # One service may call a number of seconds a float and another an integer.
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _copy(option: SectionedOption, section: str) -> SectionedOption:
    first, *others = option.opts
    names = ["/".join([first, *option.secondary_opts]), *others]
    return SectionedOption(
        [option.human_readable_name, *names],
        type=None if option.is_flag else option.type,
        is_flag=option.is_flag or None,
        multiple=option.multiple,
        default=option.default,
        show_default=option.show_default,
        help=option.help,
        envvar=option.envvar,
        show_envvar=True,
        section=section,
        shell_complete=lambda context, _, incomplete: option.shell_complete(context, incomplete),
    )
