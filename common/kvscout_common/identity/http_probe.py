"""Why a gRPC call failed at a port that speaks HTTP/1.1: it is the service's other port.

gRPC says of it that it could not parse what came. One request distinguishes the two.
"""

from __future__ import annotations

import asyncio
from typing import Final

PROBE_SECONDS: Final = 2.0
"""Longest time for it; who waits for an answer has waited already."""
GRPC_PORT: Final = 7050
"""A gateway's default."""
_REQUEST: Final = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def http_trouble(address: str) -> str:
    """Return that a port is one of HTTP, in a few words that follow its address; "" = it is not.

    Args:
        address: host:port.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return ""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            if not await _speaks_http(host.strip("[]"), int(port)):
                return ""
            is_open = int(port) != GRPC_PORT and await _listens(host.strip("[]"), GRPC_PORT)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return ""  # nobody is there, or says anything
    other = f"try {host}:{GRPC_PORT}" if is_open else "gRPC has a port of its own (--port)"
    return f"is an HTTP port: {other}"


async def _speaks_http(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(_REQUEST)
        return await reader.readexactly(7) == b"HTTP/1."
    finally:
        writer.transport.abort()


async def _listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.transport.abort()
    return True
