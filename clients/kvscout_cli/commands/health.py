"""`kvscout health`: does a service take calls now? For the probes of containers; imports little, as they ask often."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvscout_cli.output import echo
from kvscout_common.errors import DeadlineExceeded, InvalidArgument, Unavailable
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.settings.flags import SectionedCommand, client_tls_flags, flag

HERE = ("localhost:7050", "localhost:7051", "localhost:7052", "localhost:7053", "http://localhost:8100/health")
"""Default addresses of gateway, indexer, scheduler, bridge and mocker."""
CONNECTION = "Connection"
WAIT_POLL_SECONDS = 0.2


@click.command(cls=SectionedCommand)
@click.argument("addresses", nargs=-1, metavar="[ADDRESS]...")
@flag("--service", section=CONNECTION, default="", help="Full name of a gRPC service; unset = the server as a whole.")
@flag(
    "--timeout",
    section=CONNECTION,
    default=3.0,
    type=click.FloatRange(min=0, min_open=True),
    help="Longest wait for an answer, in seconds.",
)
@flag(
    "--wait",
    section=CONNECTION,
    default=0.0,
    type=click.FloatRange(min=0),
    help="Repeat the check for up to this many seconds until all serve.",
)
@flag(
    "--tls-server-name",
    section=CONNECTION,
    default="",
    help="Name in the server's certificate, if its address is a different name.",
)
@client_tls_flags(CONNECTION)
def command(
    addresses: tuple[str, ...],
    *,
    service: str,
    timeout: float,
    wait: float,
    tls_server_name: str,
    tls_ca: Path | None,
    tls_client_cert: Path | None,
    tls_client_key: Path | None,
) -> None:
    """Check whether services serve; exit with 1 if one does not, with 3 if one does not answer.

    ADDRESS is host:port of a server of grpc.health.v1, or the URL of an HTTP health check, such as an engine's. Without
    one, every service on this machine's default ports is checked. No token is needed.

    \b
        kvscout health
        kvscout health 10.0.0.5:7050 http://10.0.0.9:8000/health --wait 60
    """
    security = ClientSecurity.from_flags(tls_ca, tls_client_cert, tls_client_key, None)
    deadline = time.monotonic() + wait
    while True:
        try:
            named = addresses or _listening()
            states = [(address, _state(address, service, timeout, security, tls_server_name)) for address in named]
        except (Unavailable, DeadlineExceeded):
            if time.monotonic() >= deadline:
                raise
        else:
            if all(state == "SERVING" for _, state in states) or time.monotonic() >= deadline:
                break
        time.sleep(WAIT_POLL_SECONDS)
    for address, state in states:
        echo(f"{address} {state}")
    if any(state != "SERVING" for _, state in states):
        raise SystemExit(1)


def _listening() -> list[str]:
    """Return the default addresses at which something listens."""
    found = [address for address in HERE if _accepts(address)]
    if not found:
        raise Unavailable(f"nothing listens at {', '.join(HERE)}; name the ADDRESS")
    return found


def _accepts(address: str) -> bool:
    host, port = address.removeprefix("http://").split("/")[0].split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def _state(address: str, service: str, timeout: float, security: ClientSecurity, server_name: str) -> str:
    if address.startswith(("http://", "https://")):
        return _http_state(address, timeout)
    options = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    with _channel(address, security, [*options, ("grpc.enable_http_proxy", 0)]) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        except grpc.RpcError as error:
            return _refusal(address, service, timeout, error)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _channel(address: str, security: ClientSecurity, options: list[tuple[str, Any]]) -> grpc.Channel:
    pems = security.pems()
    if pems is None:
        return grpc.insecure_channel(address, options)
    ca, certificate, key = pems
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    return grpc.secure_channel(address, credentials, options)


def _refusal(address: str, service: str, timeout: float, error: Any) -> str:
    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            raise InvalidArgument(f"{address} has no service {service!r}", field="service") from error
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            raise DeadlineExceeded(f"{address} does not answer within {timeout:g} s") from error
        case grpc.StatusCode.UNAVAILABLE:
            raise Unavailable(f"{address} does not answer: {error.details()}") from error
        case code:
            return f"{code.name}: {error.details()}"


def _http_state(url: str, timeout: float) -> str:
    # An engine is called directly: a proxy of the environment does not report its health.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as answer:
            return "SERVING" if answer.status == 200 else f"HTTP {answer.status}"
    except urllib.error.HTTPError as error:
        with error:
            return f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        raise Unavailable(f"{url} does not answer: {error}") from error
