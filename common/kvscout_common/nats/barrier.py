"""Knowing that NATS has what was published: a message to oneself comes back after everything before it was taken.

The client's own `flush` does not suffice: its PING overtakes what the client still holds, and after a reconnect it says
nothing of what went down with the former connection.
"""

from __future__ import annotations

import asyncio
import itertools

import nats.aio.client
import nats.aio.msg
import nats.errors


class NatsBarrier:
    """Waits until the server has taken everything that this client published before.

    Args:
        client: Connected or not; the subscription is made with the first `wait` and kept over reconnects.
    """

    def __init__(self, client: nats.aio.client.Client) -> None:
        self._client = client
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[None]] = {}
        self._inbox = ""

    @property
    def generation(self) -> int:
        """Return the number of the connection; read it before the first publish."""
        return self._client.stats["reconnects"]

    async def wait(self, generation: int, *, seconds: float) -> None:
        """Return when the server has everything published since `generation` was taken.

        Raises:
            ConnectionReconnectingError: The connection was lost since then: some of it may be lost.
            TimeoutError: The server is silent.
            nats.errors.Error, OSError: The client is closed, or its connection was lost.
        """
        if not self._inbox:
            self._inbox = self._client.new_inbox()
            await self._client.subscribe(self._inbox, cb=self._on_echo)
        token = str(next(self._numbers)).encode()
        echo = self._waiting[token] = asyncio.get_running_loop().create_future()
        try:
            await self._client.publish(self._inbox, token)
            async with asyncio.timeout(seconds):
                await echo
        finally:
            del self._waiting[token]
        if self.generation != generation or not self._client.is_connected:
            raise nats.errors.ConnectionReconnectingError

    async def _on_echo(self, message: nats.aio.msg.Msg) -> None:
        echo = self._waiting.get(message.data)
        if echo is not None and not echo.done():
            echo.set_result(None)
