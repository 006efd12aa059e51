"""Which NATS, whose part of it, and the flags that say so; the connection is made by `link`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvscout_common.errors import ConfigError
from kvscout_common.nats.names import NatsNames
from kvscout_common.settings.flags import BEHAVIOUR, flag, flag_group

if TYPE_CHECKING:
    from kvscout_common.nats.link import NatsLink

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_SERVER = "nats://localhost:4222"
DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True, slots=True)
class NatsConfig:
    """Servers of NATS, credentials and namespace."""

    servers: tuple[str, ...] = (DEFAULT_SERVER,)
    namespace: str = DEFAULT_NAMESPACE
    credentials: Path | None = None
    """User credentials file (JWT and seed)."""
    ca: Path | None = None
    """CA of the servers' certificates; turns TLS on."""
    replicas: int = 1
    """Copies that a cluster keeps of each stream and bucket made here."""

    @property
    def names(self) -> NatsNames:
        """Its names."""
        return NatsNames(self.namespace)

    def link(self, client: str) -> NatsLink:
        """Return a connection that is not made yet, of a client with this name."""
        # Imported here: the library, and what it needs, cost a process that uses none a third of its start.
        from kvscout_common.nats.link import NatsLink

        return NatsLink(self, client)

    @classmethod
    def from_flags(cls, values: Mapping[str, Any]) -> NatsConfig | None:
        """Take the values of `nats_flags`; None = no NATS was named.

        Raises:
            ConfigError: A server is no nats:// or tls:// URL, the namespace is empty, or the library is missing.
        """
        servers = tuple(url for given in values["nats_server"] for url in given.split(",") if url)
        for url in servers:
            if not url.startswith(("nats://", "tls://")):
                raise ConfigError(f"{url!r} is no nats:// or tls:// URL", field="nats_server")
        if not values["namespace"]:
            raise ConfigError("must not be empty", field="namespace")
        if not servers:
            return None
        return cls(servers, values["namespace"], values["nats_credentials"], values["nats_ca"], values["nats_replicas"])


def nats_flags(*, default: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Return the flags of everything that can use NATS; `NatsConfig.from_flags` reads them back.

    Args:
        default: Servers where none is given; () = run without NATS.
    """
    path = click.Path(exists=True, dir_okay=False, path_type=Path)
    declared = [
        flag(
            "--nats-server",
            multiple=True,
            default=default,
            envvar=["NATS_SERVER"],
            section=BEHAVIOUR,
            help=f"NATS server, such as {DEFAULT_SERVER}; repeat for the servers of a cluster.",
        ),
        flag(
            "--namespace",
            default=DEFAULT_NAMESPACE,
            section=BEHAVIOUR,
            help="Name that separates everything in NATS from other namespaces; a new one starts empty.",
        ),
        flag("--nats-credentials", type=path, section=BEHAVIOUR, help="NATS user credentials file."),
        flag("--nats-ca", type=path, section=BEHAVIOUR, help="CA of the NATS servers, PEM; enables TLS."),
        flag(
            "--nats-replicas",
            default=1,
            type=click.IntRange(1, 5),
            section=BEHAVIOUR,
            help="Copies that a NATS cluster stores of each stream and bucket; 3 survive the loss of a server.",
        ),
    ]
    return flag_group(*declared)
