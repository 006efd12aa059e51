"""The flags by which commands find a gateway, or schedulers, and what they make of them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from google.protobuf.message import Message

from kvscout.v1 import scheduler_pb2_grpc
from kvscout_cli import completion
from kvscout_client import ClientSecurity, NotGrpc, NotSecured, Router
from kvscout_common.doctor.collection import NamedService
from kvscout_common.doctor.gathering import Gathering
from kvscout_common.doctor.snapshot import ServiceKind, Snapshot
from kvscout_common.errors import NotFound, Unavailable
from kvscout_common.rpc.channel import call, open_channel
from kvscout_common.settings.flags import SectionedOption, client_flags, flag
from kvscout_common.worker import ALL_TENANTS, DEFAULT_TENANT

CONNECTION = "Connection"


@dataclass(frozen=True, slots=True)
class Connection:
    """Connection settings of a gateway."""

    gateway: str
    tenant: str
    timeout_seconds: float
    security: ClientSecurity

    @property
    def services(self) -> Services:
        """Return the gateway as a root of discovery, whose upstreams are queried, too."""
        return Services(self.gateway, (), self.tenant, self.timeout_seconds, self.security)

    def router(self) -> Router:
        """Return a client; use it as a context manager."""
        return Router(self.gateway, tenant=self.tenant, security=self.security, timeout_seconds=self.timeout_seconds)


Command = Callable[..., Any]


def _flags(make: Callable[[dict[str, Any], ClientSecurity], Any], *declared: Callable[[Command], Command]) -> Any:
    """Return a decorator that gives a command some flags and those of a client.

    Args:
        make: Takes the values of the flags that it reads out of a mapping, and gives the command's first argument.
        declared: The flags, the last one first in --help.
    """

    def decorate(command: Command) -> Command:
        decorated: Command

        @functools.wraps(command)
        def connected(**values: Any) -> Any:
            security = ClientSecurity.from_flags(*(values.pop(name) for name in _SECURITY))
            return command(make(values, security), **values)

        decorated = client_flags(CONNECTION)(connected)
        for declare in declared:
            decorated = declare(decorated)
        return decorated

    return decorate


_SECURITY = ("tls_ca", "tls_client_cert", "tls_client_key", "token_file")


def _timeout_flag(default: float, text: str) -> Callable[[Command], Command]:
    kind = click.FloatRange(min=0, min_open=True)
    return flag("--timeout", section=CONNECTION, default=default, type=kind, help=text)


class Address(click.ParamType[str]):
    """host:port of a gRPC server; the scheme that people copy from a URL is left out."""

    name = "host:port"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return host:port."""
        scheme, separator, rest = value.partition("://")
        if not separator:
            return value
        if scheme.lower() not in ("http", "grpc"):
            self.fail(f"{value!r} is a URL: give host:port, and --tls-ca for TLS", param, ctx)
        return rest.rstrip("/")


_gateway_flag = flag(
    "--gateway", section=CONNECTION, default="localhost:7050", type=Address(), help="host:port of the gateway."
)


def connection_flags(command: Command) -> Command:
    """Add the connection flags to a command; it gets a `Connection` as its first argument."""

    @functools.wraps(command)
    def reaching(connection: Connection, **values: Any) -> Any:
        try:
            return command(connection, **values)
        except Unavailable as error:
            if error.answered or isinstance(error, NotGrpc | NotSecured):
                raise
            raise Unavailable(
                f"no gateway answers at {connection.gateway}; `kvscout up` starts one on this machine"
            ) from error

    decorate = _flags(
        lambda values, security: Connection(
            values.pop("gateway"), values.pop("tenant"), values.pop("timeout"), security
        ),
        _timeout_flag(30.0, "Longest wait for an answer, in seconds; of `generate`, for its first token."),
        flag("--tenant", section=CONNECTION, default=DEFAULT_TENANT, help="Tenant."),
        _gateway_flag,
    )
    decorated: Command = decorate(reaching)
    return decorated


@dataclass(frozen=True, slots=True)
class Services:
    """Addresses from which all services are discovered."""

    gateway: str
    further: tuple[str, ...]
    tenant: str
    timeout_seconds: float
    security: ClientSecurity

    @property
    def named(self) -> list[NamedService]:
        """Return the services that are queried first."""
        return [NamedService(self.gateway, ServiceKind.GATEWAY), *(NamedService(address) for address in self.further)]

    @property
    def gathering(self) -> Gathering:
        """Return the client of the services."""
        return Gathering(self.security, tenant=self.tenant, timeout_seconds=self.timeout_seconds)

    async def snapshot(self, *, engines: bool, proxies: Sequence[str] = ()) -> Snapshot:
        """Return the current statuses.

        Args:
            engines: Ask the workers' engines, too.
            proxies: Base URLs of the admin interfaces of Envoys to ask.
        """
        return await self.gathering.snapshot(self.named, engines=engines, proxies=proxies)


def services_flags(command: Command) -> Command:
    """Add the flags of all services to a command; it gets `Services` as its first argument."""
    decorate = _flags(
        lambda values, security: Services(
            values.pop("gateway"), values.pop("addresses"), values.pop("tenant"), values.pop("timeout"), security
        ),
        _timeout_flag(5.0, "Longest wait for each answer, in seconds."),
        flag("--tenant", section=CONNECTION, default=ALL_TENANTS, help="Tenant; * = all that the token may see."),
        _gateway_flag,
        click.argument("addresses", nargs=-1, type=Address(), metavar="[ADDRESS]..."),
    )
    decorated: Command = decorate(command)
    return decorated


@dataclass(frozen=True, slots=True)
class Schedulers:
    """Connection settings of schedulers."""

    addresses: tuple[str, ...]
    timeout_seconds: float
    security: ClientSecurity

    async def call(self, method: str, request: Message) -> dict[str, Any]:
        """Return their answers to a call, by address.

        Raises:
            KvscoutError: One does not answer, or refuses.
        """
        answers = await asyncio.gather(*(self._call(address, method, request) for address in self.addresses))
        return dict(zip(self.addresses, answers, strict=True))

    async def _call(self, address: str, method: str, request: Message) -> Any:
        channel = open_channel(address, self.security)
        try:
            stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
            return await call(getattr(stub, method), request, timeout=self.timeout_seconds)
        finally:
            await channel.close()


def scheduler_flags(command: Command) -> Command:
    """Add the flags of a connection to schedulers to a command; it gets a `Schedulers` as its first argument."""
    decorate = _flags(
        lambda values, security: Schedulers(values.pop("scheduler"), values.pop("timeout"), security),
        _timeout_flag(5.0, "Longest wait for each answer, in seconds."),
        flag(
            "--scheduler",
            multiple=True,
            default=("localhost:7052",),
            type=Address(),
            section=CONNECTION,
            help="host:port of a scheduler; repeat to ask several.",
        ),
    )
    decorated: Command = decorate(command)
    return decorated


option = functools.partial(click.option, cls=SectionedOption, section="Options")
"""A command's own option: no environment variable, it belongs to one call."""

json_flag = option("--json", "as_json", is_flag=True, help="Print JSON.")

model_flag = flag(
    "--model",
    section="Options",
    default="",
    shell_complete=completion.models,
    help="Model; default: the only one that has workers.",
)

of_model_flag = option("--model", default="", shell_complete=completion.models, help="Only this model.")


async def chosen_model(router: Router, model: str) -> str:
    """Return the model that a command means.

    Args:
        router: A client.
        model: As given; "" = the only one there is.

    Raises:
        NotFound: None was given, and there is none or more than one.
    """
    if model:
        return model
    models = sorted({record.spec.model for record in await router.list_workers()})
    if not models:
        raise NotFound("the gateway knows no workers", field="--model")
    if len(models) > 1:
        raise NotFound(f"there are several models, name one: {', '.join(models)}", field="--model")
    return models[0]
