"""Addresses in registrations: what each may be, in one place for the file, the rpcs, NATS, DNS, flags and engines.

Each check returns the end of a sentence that says what is wrong, "" = nothing; who asks knows the field.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

from kvscout_common.plain_text import printable, text_problem

WILDCARDS: Final = ("*", "0.0.0.0", "::")
"""Hosts that an engine binds where every address of its machine is meant; nobody can connect to one."""
GRPC_SCHEMES: Final = ("grpc://", "grpcs://")
"""Of engines whose events are a stream of theirs; the second one is over TLS."""
MAX_PORT: Final = 65_535
MAX_IPC_BYTES: Final = 107
"""Path of a socket, on Linux."""
_HOST: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")


class Allowed(StrEnum):
    """Kinds of event endpoints that an operator may allow beside TCP connections to the engine."""

    IPC = "ipc"
    """Sockets in the file system: whoever registers a worker names a path."""
    BIND = "bind"
    """Sockets of ours that engines connect to, beyond loopback: whoever registers a worker opens a port."""


def bracketed(host: str) -> str:
    """Return a host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_loopback(host: str) -> bool:
    """Return whether an address to bind can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_problem(host: str) -> str:
    """Return the problem of a host name, or of an IP address without brackets; "" = none."""
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return f"has no host, but {printable(host)}"
        return ""
    return "" if _HOST.fullmatch(host) else f"has no host, but {printable(host)}" if host else "has no host"


def address_problem(address: str) -> str:
    """Return the problem of host:port; "" = none."""
    host, _, port = address.rpartition(":")
    return _host_and_port_problem(host, port)


def url_problem(url: str) -> str:
    """Return the problem of a base URL of HTTP; "" = none."""
    if problem := text_problem(url):
        return problem
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        return f"is not a URL: {printable(str(error))}"
    if parts.scheme not in ("http", "https"):
        return f"is not an http(s) URL: {url}"
    if "@" in parts.netloc:
        return "must not name a user or a password: registrations are shown to everybody who may list workers"
    if parts.query or parts.fragment:
        return "must end with its path: it is what the engine's paths are added to"
    if problem := host_problem(host):
        return problem
    return "must have a port between 1 and 65535" if port == 0 else ""


def event_endpoint_problem(address: str, *, bind: bool = False) -> str:
    """Return the problem of a ZMQ address that we connect to, or bind; "" = none."""
    if problem := text_problem(address):
        return problem
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        return "" if 0 < len(path.encode()) <= MAX_IPC_BYTES else f"must have a path of at most {MAX_IPC_BYTES} bytes"
    if not address.startswith("tcp://"):
        return f"is not a ZMQ address such as tcp://HOST:PORT: {address}"
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if host.strip("[]") not in WILDCARDS:
        return _host_and_port_problem(host, port)
    if bind:
        return _port_problem(port)
    return f"{address} is what the engine binds: write tcp://HOST:{port}, the host as it is reached from here"


def is_grpc_endpoint(address: str) -> bool:
    """Return whether an event endpoint is a gRPC server's."""
    return address.startswith(GRPC_SCHEMES)


def grpc_endpoint_problem(address: str) -> str:
    """Return the problem of the address of an engine's stream of events; "" = none."""
    if problem := text_problem(address):
        return problem
    if not is_grpc_endpoint(address):
        return f"is not an address such as grpc://HOST:PORT or grpcs://HOST:PORT: {address}"
    return address_problem(address.partition("://")[2])


def event_endpoint_needs(address: str, *, bind: bool = False) -> Allowed | None:
    """Return what an operator must have allowed for an address without a problem; None = nothing."""
    if address.startswith("ipc://"):
        return Allowed.IPC
    host, _, _ = address.removeprefix("tcp://").rpartition(":")
    return Allowed.BIND if bind and not is_loopback(host) else None


def refusal(address: str, allowed: Collection[Allowed], *, bind: bool = False) -> str:
    """Return why an address without a problem is not opened here; "" = it is."""
    needed = event_endpoint_needs(address, bind=bind)
    if needed is None or needed in allowed:
        return ""
    what = "a path of this machine" if needed is Allowed.IPC else "a port that others reach"
    return f"{address} is {what}: this service opens those with --allow-event-endpoints {needed} only"


def _host_and_port_problem(host: str, port: str) -> str:
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare and bare == host:
        return "must have its IPv6 address in brackets"
    return host_problem(bare) or _port_problem(port)


def _port_problem(port: str) -> str:
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    return "" if 1 <= number <= MAX_PORT else "must have a port between 1 and 65535"
