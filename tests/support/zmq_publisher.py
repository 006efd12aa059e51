"""An engine's PUB socket that tests use without the event loop."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from support.recorded_engine import SEND_HWM
from support.zmq_bind import bind

DEADLINE_MS = 30_000


class Publisher:
    """An engine's PUB socket on a context of its own, used without the event loop: the loop stands still meanwhile."""

    def __init__(self, endpoint: str = "", *, connect: bool = False) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint = endpoint
        self._connects = connect
        self.open()

    def open(self) -> None:
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.set(zmq.XPUB_VERBOSE, 1)
        self._socket.set_hwm(SEND_HWM)
        self._socket.set(zmq.IPV6, int("[" in self.endpoint))
        if self._connects:
            self._socket.connect(self.endpoint)
            return
        self.endpoint = bind(self._socket, self.endpoint)

    def await_subscription(self) -> None:
        assert self._socket.poll(DEADLINE_MS), "no subscription came"
        self._socket.recv()

    def send(self, first: int, count: int) -> None:
        self.send_payloads(first, [b"payload"] * count)

    def send_payloads(self, first: int, payloads: Sequence[bytes]) -> None:
        for seq, payload in enumerate(payloads, first):
            self.send_frames([b"topic", seq.to_bytes(8, "big"), payload])

    def send_frames(self, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart(frames)

    def reopen(self) -> None:
        """The connection is lost, once all is sent; another one can be made."""
        self._socket.close(linger=DEADLINE_MS)
        self.open()

    def close(self) -> None:
        self._context.destroy(linger=0)
