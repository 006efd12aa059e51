"""Peers that lose their power or their network, and say nothing of it: the kernel is told when to give them up."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.http_peers import TRANSPORTS, echo, made_of, raw_engine, says_and_waits

from kvscout_common.hashing import native_available
from kvscout_common.http import aiohttp_client, aiohttp_server
from kvscout_common.http.factory import connect, serve_http
from kvscout_common.http.http import FailureKind, HttpCall, HttpFailed, HttpLimits, HttpRequest
from kvscout_common.transport import Transport

Address = tuple[str, int]


@pytest.fixture(autouse=True, params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    with made_of(request.param):
        yield request.param


def options_of(ours: Address, theirs: Address) -> tuple[int, int, int, int]:
    """What the socket of this process that connects these has: keepalive, its times in s, the time-out in ms."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            copy = socket.socket(fileno=os.dup(number))
        except OSError:
            continue
        with copy:
            try:
                if (copy.getsockname(), copy.getpeername()) != (ours, theirs):
                    continue
            except OSError:
                continue
            return (
                copy.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
            )
    raise AssertionError(f"no socket connects {ours} and {theirs}")


async def test_the_connection_of_a_client_ends_when_it_acknowledges_nothing() -> None:
    for write_seconds, milliseconds in ((1.0, 60_000), (300.0, 300_000)):
        server = serve_http(echo, HttpLimits(write_seconds=write_seconds))
        port = await server.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        client: Address = writer.get_extra_info("sockname")
        assert options_of(("127.0.0.1", port), client) == (1, 15, 5, milliseconds)
        writer.close()
        await server.stop(0)


async def test_the_connection_to_an_engine_ends_when_it_acknowledges_nothing() -> None:
    client = connect()
    async with raw_engine(says_and_waits(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")) as engine:
        answer = await client.send(HttpRequest(engine.url), connect_seconds=5)
        address = ("127.0.0.1", int(engine.url.rpartition(":")[2]))
        ours = [
            connection.getpeername() for connection in (writer.get_extra_info("socket") for writer in engine.writers)
        ]
        assert options_of(ours[0], address) == (1, 15, 5, 60_000)
        answer.abort()
    await client.close()


def test_the_connections_of_a_grpc_server_and_its_clients_end_when_nothing_is_acknowledged() -> None:
    if not native_available():
        pytest.skip("grpcio sets its own")
    from kvscout_native import Rpc

    core = Rpc()
    _, port = core.listen("127.0.0.1", 0, [])
    with socket.create_connection(("127.0.0.1", port)) as client:
        core.poll()
        assert options_of(("127.0.0.1", port), client.getsockname()) == (1, 15, 5, 60_000)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        core.connect("127.0.0.1", listener.getsockname()[1], "a")
        server, address = listener.accept()
        with server:
            assert options_of(address, listener.getsockname()) == (1, 15, 5, 60_000)


SPACE, OUTSIDE, INSIDE = (f"kvs-{end}-{os.getpid()}" for end in ("s", "o", "i"))
HERE, THERE = (f"10.213.{os.getpid() % 256}.{host}" for host in (1, 2))
CLIENT = f"""
import socket, time
connection = socket.create_connection(({HERE!r}, int(input())))
connection.sendall(b"GET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
time.sleep(1000)
"""
ENGINE = f"""
import socket, time
listener = socket.create_server(({THERE!r}, 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
connection.recv(1000)
print("asked", flush=True)
time.sleep(1000)
"""


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True)


@contextmanager
def another_machine() -> Iterator[None]:
    """A network namespace with one cable to this one; skips where that may not be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    try:
        ip("netns", "add", SPACE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", OUTSIDE, "type", "veth", "peer", "name", INSIDE, "netns", SPACE)
        ip("address", "add", f"{HERE}/30", "dev", OUTSIDE)
        ip("link", "set", OUTSIDE, "up")
        ip("-n", SPACE, "address", "add", f"{THERE}/30", "dev", INSIDE)
        ip("-n", SPACE, "link", "set", INSIDE, "up")
        yield
    finally:
        # The namespace itself may last a little longer than its name.
        subprocess.run(("ip", "link", "delete", OUTSIDE), check=False, capture_output=True)
        ip("netns", "delete", SPACE)


def pull_the_plug() -> None:
    """From here on nothing comes from the other machine, and nothing gets there."""
    ip("-n", SPACE, "link", "set", INSIDE, "down")


async def runs_there(program: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        "ip", "netns", "exec", SPACE, sys.executable, "-c", program,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are given up after two seconds."""
    modules: list[object] = [aiohttp_client, aiohttp_server]
    if native_available():
        from kvscout_common.http import native_http

        modules.append(native_http)
    for module in modules:
        monkeypatch.setattr(module, "VANISHED_SECONDS", 2.0)


@pytest.mark.usefixtures("soon")
async def test_a_client_whose_machine_is_gone_holds_no_handler() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(call: HttpCall) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with another_machine():
        server = serve_http(wait, HttpLimits(write_seconds=2.0))
        port = await server.listen(HERE, 0)
        client = await runs_there(CLIENT)
        assert client.stdin is not None
        client.stdin.write(b"%d\n" % port)
        async with asyncio.timeout(60):
            await begun.wait()
            pull_the_plug()
            await cancelled.wait()
        client.kill()
        await client.communicate()
        await server.stop(0)


@pytest.mark.usefixtures("soon")
async def test_an_engine_whose_machine_is_gone_fails_what_waits_for_it() -> None:
    with another_machine():
        engine = await runs_there(ENGINE)
        assert engine.stdout is not None
        client = connect()
        async with asyncio.timeout(60):
            port = int(await engine.stdout.readline())
            asking = asyncio.create_task(client.send(HttpRequest(f"http://{THERE}:{port}/"), connect_seconds=5))
            assert await engine.stdout.readline() == b"asked\n"
            pull_the_plug()
            with pytest.raises(HttpFailed) as failed:
                await asking
        assert failed.value.kind is FailureKind.BROKEN
        engine.kill()
        await engine.communicate()
        await client.close()
