"""A relay in front of NATS for one client: loses, repeats and reorders what that client publishes, when told to.

It reads the client's side of the protocol (https://docs.nats.io/reference/reference-protocols/nats-protocol) as far as
it must: `PUB` and `HPUB` lines are followed by a payload of a length that they name, everything else is one line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from support.tcp_server import TcpServer


class NatsRelay:
    """One relay; `url` is where the client connects to.

    Args:
        port: Of the server.
        seed: Of the faults.
        concerns: Which subjects are subject to faults.
    """

    def __init__(self, port: int, seed: int, concerns: Callable[[str], bool]) -> None:
        self.loss = self.repeats = self.reorder = 0.0
        """Probabilities."""
        self.lost = self.repeated = self.reordered = 0
        self.url = ""
        self.answers = asyncio.Event()
        """Cleared = connections are taken, and nothing comes of them."""
        self.answers.set()
        self._port = port
        self._rng = Random(seed)
        self._concerns = concerns
        self._server = TcpServer(self._serve)

    async def start(self) -> None:
        """Listens on a free port."""
        await self._server.start()
        self.url = f"nats://127.0.0.1:{self._server.port}"

    async def close(self) -> None:
        """Ends every connection."""
        await self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.answers.wait()
        upstream, onward = await asyncio.open_connection("127.0.0.1", self._port)
        back = asyncio.create_task(_copy(upstream, writer))
        try:
            await self._forward(reader, onward)
        finally:
            back.cancel()
            onward.close()

    async def _forward(self, reader: asyncio.StreamReader, onward: asyncio.StreamWriter) -> None:
        held = b""
        while line := await reader.readline():
            words = line.split()
            if words[0].upper() not in (b"PUB", b"HPUB"):
                onward.write(line)
                await onward.drain()
                continue
            message = line + await reader.readexactly(int(words[-1]) + 2)
            if not self._concerns(words[1].decode()):
                onward.write(message)
            elif self._rng.random() < self.loss:
                self.lost += 1
            elif not held and self._rng.random() < self.reorder:
                # It goes after the next one.
                self.reordered += 1
                held = message
            else:
                again = self._rng.random() < self.repeats
                self.repeated += again
                onward.write(message + message * again + held)
                held = b""
            await onward.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
