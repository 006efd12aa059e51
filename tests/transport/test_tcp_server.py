"""The servers of tests: what they accepted is closed when they are, and what went wrong in them is told."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, suppress

import pytest
from support.tcp_server import tcp_server


async def say_and_wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"x" * 10_000_000)  # more than a client that does not read takes
    await asyncio.Event().wait()


@pytest.mark.parametrize("turns", range(6))
async def test_a_server_that_ends_closes_what_it_has_and_what_it_is_just_taking(turns: int) -> None:
    loop = asyncio.get_running_loop()
    with ExitStack() as clients:
        async with tcp_server(say_and_wait) as port:
            served = clients.enter_context(socket.create_connection(("127.0.0.1", port)))
            served.setblocking(False)
            assert await loop.sock_recv(served, 1) == b"x"
            others = [clients.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(20)]
            # After one of these turns they are accepted, and known to nobody yet.
            for _ in range(turns):
                await asyncio.sleep(0)
        assert [each for each in loop._transports.values() if each._sock is not None] == []  # type: ignore[attr-defined]  # no public list of them
        for other in others:
            other.settimeout(30)
            with suppress(ConnectionError):
                while other.recv(1 << 20):
                    pass


async def test_a_client_that_goes_is_no_failure_of_a_server_and_a_defect_is() -> None:
    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)

    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise ValueError("a defect")

    async with tcp_server(read) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await writer.wait_closed()
    with pytest.raises(ExceptionGroup) as failed:
        async with tcp_server(fail) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b""
            writer.close()
    assert [str(each) for each in failed.value.exceptions] == ["a defect"]
