"""A relay in front of a TCP server that can delay, and swallow: a partition or a lost node, no FIN and no RST."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from support.tcp_server import TcpServer


class TcpRelay:
    """One relay; `address` is where clients connect to.

    Swallowed bytes are acknowledged by TCP, which a real partition would not do: whoever relies on the kernel to notice
    does not. Connections made meanwhile are accepted, and lead nowhere.

    Args:
        target: host:port of the server.
        delay_seconds: What each way takes.
    """

    def __init__(self, target: str, *, delay_seconds: float = 0.0) -> None:
        self.address = ""
        self.connections = 0
        """That were made."""
        self.deaf: set[asyncio.StreamWriter] = set()
        """Clients whose connection has missed something, and who have not closed it."""
        self._target = target
        self._delay_seconds = delay_seconds
        self._swallows = {"up": False, "down": False}
        self._server = TcpServer(self._serve)

    async def start(self) -> None:
        """Listens on a free port."""
        await self._server.start()
        self.address = f"127.0.0.1:{self._server.port}"

    def swallow(self, *directions: str) -> None:
        """Loses what goes to the server ("up"), what comes from it ("down"), or both; what is lost stays lost."""
        for direction in directions or ("up", "down"):
            self._swallows[direction] = True

    def heal(self) -> None:
        """Connections that are made from now on work; the old ones have missed something, and stay deaf."""
        self._swallows = {"up": False, "down": False}

    async def close(self) -> None:
        """Ends every connection."""
        await self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        host, _, port = self._target.rpartition(":")
        try:
            upstream, onward = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        try:
            await asyncio.gather(self._pump(reader, onward, "up", writer), self._pump(upstream, writer, "down", writer))
        finally:
            onward.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str, client: asyncio.StreamWriter
    ) -> None:
        deaf = False
        try:
            while data := await reader.read(65_536):
                if self._swallows[direction] and not deaf:
                    deaf = True
                    if not client.is_closing():
                        self.deaf.add(client)
                if not deaf:
                    if self._delay_seconds:
                        await asyncio.sleep(self._delay_seconds)
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass
        finally:
            if direction == "up":
                client.close()
                self.deaf.discard(client)
        # An end that nobody hears of is part of it.
        if not (deaf or self._swallows[direction]):
            writer.close()


@asynccontextmanager
async def tcp_relay(target: str, *, delay_seconds: float = 0.0) -> AsyncIterator[TcpRelay]:
    """A relay for the length of a block."""
    relay = TcpRelay(target, delay_seconds=delay_seconds)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.close()
