"""Binding a ZMQ socket to an address that another one had a moment ago."""

from __future__ import annotations

import time
from typing import Any

import zmq

from support.processes import DEADLINE_SECONDS

PAUSE_SECONDS = 0.01


def bind(socket: zmq.Socket[Any], endpoint: str = "") -> str:
    """Bind a socket to an address, or to any free port of 127.0.0.1, and return the address; blocks.

    libzmq closes in a thread of its own: an address is free a moment after `close` has returned.
    """
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            socket.bind(endpoint or "tcp://127.0.0.1:*")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_SECONDS)
        else:
            return str(socket.get_string(zmq.LAST_ENDPOINT))
