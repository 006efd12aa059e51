"""Waiting for a port that is taken for a moment only."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time

log = logging.getLogger("kvscout.serving")

BIND_SECONDS = 3.0
"""Longest wait: connections of a process that was killed, and others' that were given the port, are gone by then."""
RETRY_SECONDS = 0.1


async def wait_for_port(host: str, port: int, flag: str = "--port") -> None:
    """Return once a port can be listened at.

    Args:
        host: Address or name to bind.
        port: 0 = any, which is always free.
        flag: What the port is set with, for the error.

    Raises:
        OSError: It cannot; if it is taken, after a wait.
    """
    deadline = time.monotonic() + BIND_SECONDS
    warned = False
    while port:
        try:
            _listen_once(host, port)
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise OSError(f"cannot bind {host}:{port} ({flag}): {error.strerror}") from error
            if not warned:
                log.warning("%s:%d (%s) is in use; retrying for %g s", host, port, flag, BIND_SECONDS)
                warned = True
            await asyncio.sleep(RETRY_SECONDS)


def _listen_once(host: str, port: int) -> None:
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
            probe.listen()
