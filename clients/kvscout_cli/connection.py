"""The flags by which commands find a gateway, or schedulers, and what they make of them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from google.protobuf.message import Message

from kvscout.v1 import scheduler_pb2_grpc
from kvscout_client import ClientSecurity, Router
from kvscout_common.channel import call, open_channel
from kvscout_common.errors import NotFound, Unavailable
from kvscout_common.flags import SectionedOption, client_flags, flag
from kvscout_common.worker import DEFAULT_TENANT

CONNECTION = "Connection"

_NOT_CONNECTED = "failed to connect"
"""How grpc begins the message of a connection that could not be made."""


@dataclass(frozen=True, slots=True)
class Connection:
    """How to talk to a gateway."""

    gateway: str
    tenant: str
    timeout_seconds: float
    security: ClientSecurity

    def router(self) -> Router:
        """A client; use it as a context manager."""
        return Router(self.gateway, tenant=self.tenant, security=self.security, timeout_seconds=self.timeout_seconds)


def connection_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the connection flags; it gets a `Connection` as its first argument."""

    @functools.wraps(command)
    def connected(
        *,
        gateway: str,
        tenant: str,
        timeout: float,
        tls_ca: Path | None,
        tls_client_cert: Path | None,
        tls_client_key: Path | None,
        token_file: Path | None,
        **values: Any,
    ) -> Any:
        security = ClientSecurity.from_flags(tls_ca, tls_client_cert, tls_client_key, token_file)
        try:
            return command(Connection(gateway, tenant, timeout, security), **values)
        except Unavailable as error:
            if not error.message.startswith(_NOT_CONNECTED):
                raise
            raise Unavailable(f"no gateway answers at {gateway}; `kvscout up` starts one on this machine") from error

    decorated = client_flags(CONNECTION)(connected)
    for declare in (
        flag(
            "--timeout",
            section=CONNECTION,
            default=30.0,
            type=click.FloatRange(min=0, min_open=True),
            help="Longest wait for an answer, in seconds; of `generate`, for its first token.",
        ),
        flag("--tenant", section=CONNECTION, default=DEFAULT_TENANT, help="Tenant."),
        flag("--gateway", section=CONNECTION, default="localhost:7050", help="host:port of the gateway."),
    ):
        decorated = declare(decorated)
    return decorated


@dataclass(frozen=True, slots=True)
class Schedulers:
    """How to talk to schedulers."""

    addresses: tuple[str, ...]
    timeout_seconds: float
    security: ClientSecurity

    async def ask(self, method: str, request: Message) -> dict[str, Any]:
        """Their answers to a call, by address.

        Raises:
            KvscoutError: One does not answer, or refuses.
        """
        answers = await asyncio.gather(*(self._ask(address, method, request) for address in self.addresses))
        return dict(zip(self.addresses, answers, strict=True))

    async def _ask(self, address: str, method: str, request: Message) -> Any:
        channel = open_channel(address, self.security)
        try:
            stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
            return await call(getattr(stub, method), request, timeout=self.timeout_seconds)
        finally:
            await channel.close()


def scheduler_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the flags of a connection to schedulers; it gets a `Schedulers` as its first argument."""

    @functools.wraps(command)
    def connected(
        *,
        scheduler: tuple[str, ...],
        timeout: float,
        tls_ca: Path | None,
        tls_client_cert: Path | None,
        tls_client_key: Path | None,
        token_file: Path | None,
        **values: Any,
    ) -> Any:
        security = ClientSecurity.from_flags(tls_ca, tls_client_cert, tls_client_key, token_file)
        return command(Schedulers(scheduler, timeout, security), **values)

    decorated = client_flags(CONNECTION)(connected)
    for declare in (
        flag(
            "--timeout",
            section=CONNECTION,
            default=5.0,
            type=click.FloatRange(min=0, min_open=True),
            help="Seconds.",
        ),
        flag(
            "--scheduler",
            multiple=True,
            default=("localhost:7052",),
            section=CONNECTION,
            help="host:port of a scheduler; repeat to ask several.",
        ),
    ):
        decorated = declare(decorated)
    return decorated


option = functools.partial(click.option, cls=SectionedOption, section="Options")
"""A command's own option: no environment variable, it belongs to one call."""

json_flag = option("--json", "as_json", is_flag=True, help="Print JSON.")

model_flag = flag("--model", section="Options", default="", help="Default: the only one that has workers.")


async def chosen_model(router: Router, model: str) -> str:
    """The model that a command means.

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
