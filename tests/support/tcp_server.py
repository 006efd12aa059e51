"""Servers of tests on TCP, which leave no connection open when they end.

`asyncio.Server.close` ends listening alone. What it accepted stays open until the event loop is gone, and is then found
by a garbage collection in some later test, which fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeAlias

Serve: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

ACCEPTING_TURNS = 5
"""Turns of the loop from when a connection is taken until the server knows it."""


class Listening(Protocol):
    """A socket, or asyncio's view of one."""

    def fileno(self) -> int: ...


async def stop_accepting(listening: Listening) -> None:
    """Comes before a server ends: a connection that asyncio is just taking then would stay open, and nobody have it.

    Args:
        listening: Its socket.
    """
    asyncio.get_running_loop().remove_reader(listening.fileno())
    for _ in range(ACCEPTING_TURNS):
        await asyncio.sleep(0)


class TcpServer:
    """A server on a free port of loopback.

    Args:
        serve: Speaks on one connection, which is closed when this returns. It ends where the other side has gone, and
            is cancelled when the server is closed.
    """

    def __init__(self, serve: Serve) -> None:
        self.port = 0
        self._serve = serve
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        """Of every connection so far: what was written may still be on its way when its serving has ended."""
        self._failures: list[Exception] = []
        self._closed = False

    async def start(self) -> None:
        """Listens."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Resets every connection, and waits until it is closed.

        Raises:
            ExceptionGroup: What `serve` raised, apart from the other side's going.
        """
        assert self._server is not None
        await stop_accepting(self._server.sockets[0])
        self._server.close()
        self._closed = True
        for writer in self._writers:
            writer.transport.abort()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving)
        # What a connection ended with was its server's to see.
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)
        if self._failures:
            raise ExceptionGroup("a server of the test failed", self._failures)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self._writers.add(writer)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the other side has gone
        except asyncio.CancelledError:
            if not self._closed:
                raise
        except Exception as error:
            self._failures.append(error)
        finally:
            writer.close()
            self._serving.discard(task)


@asynccontextmanager
async def tcp_server(serve: Serve) -> AsyncIterator[int]:
    """A server for the length of a block; gives its port."""
    server = TcpServer(serve)
    await server.start()
    try:
        yield server.port
    finally:
        await server.close()
