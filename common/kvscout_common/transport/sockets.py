"""Options of TCP sockets that asyncio has no word for."""

from __future__ import annotations

import socket
from typing import Any

PROBE_AFTER_SECONDS = 15
"""Silence after which the kernel asks a peer whether it is there."""
PROBE_AGAIN_SECONDS = 5


def end_when_unacknowledged(connection: Any, seconds: float) -> None:
    """Has the kernel end a connection whose peer acknowledges nothing for so long: neither data nor probes.

    A peer that lost its power or its network says nothing of it; without this its connection lasts for a quarter of
    an hour while something is to be sent, and for ever while nothing is.

    Args:
        connection: A TCP socket, or what asyncio gives away in its place.
        seconds: A peer that is there but takes nothing, its window closed, is given up after it, too.
    """
    quarter = max(1, int(seconds / 4))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(PROBE_AFTER_SECONDS, quarter))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, min(PROBE_AGAIN_SECONDS, quarter))
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
