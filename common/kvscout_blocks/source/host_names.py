"""Host names in ZMQ addresses → IP addresses.

libzmq looks names up in its I/O thread: one name server that does not answer would hold up every socket of the process.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Final

_TCP: Final = "tcp://"


def host_name(endpoint: str) -> str:
    """Return the name that has to be looked up before an address can be connected to; "" = none."""
    if not endpoint.startswith(_TCP):
        return ""
    host = endpoint.removeprefix(_TCP).rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host
    return ""


async def resolved(endpoint: str) -> str:
    """Return an address with an IP address in its host name's place.

    Raises:
        OSError: The name is unknown, or nobody answers for it.
    """
    host = host_name(endpoint)
    if not host:
        return endpoint
    port = endpoint.rpartition(":")[2]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise OSError(f"host name {host!r} cannot be resolved: {error}") from error
    # Engines that bind to all addresses do so over IPv4, whichever one a name like localhost is said to have first.
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    ip = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
    return f"{_TCP}{ip}:{port}"
