"""The native transport and peers that break, dawdle, lie or go away."""

import asyncio
import json
import resource
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
import trustme
from support.http2_resets import (
    ACK,
    DATA,
    EMPTY_MESSAGE,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    SETTINGS,
    attacking,
    frame,
    headers_of,
    resets,
)
from support.processes import eventually
from support.tcp_relay import tcp_relay
from transport.echo_service import MAX_MESSAGE_BYTES, SERVICE, grpcio_channel, native, native_channel

from kvscout_common.hashing import native_available
from kvscout_common.identity.pem import Pem

pytestmark = pytest.mark.skipif(not native_available(), reason="the extension is not built: it is what is tested")

UNARY = f"/{SERVICE}/Unary"
BOTH = f"/{SERVICE}/Both"
DOWNLOAD = f"/{SERVICE}/Download"


def orders(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


async def until(condition: Callable[[], object], what: str) -> None:
    await eventually(condition, what=what)


async def refused(awaited: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await awaited
    return failed.value


@asynccontextmanager
async def raw(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A socket that may say anything."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 1000,
        PREFACE + b"\xff" * 100,
        PREFACE + frame(SETTINGS, 0, 0) + frame(1, 4, 1, b"\xff\xff\xff\xff"),
        PREFACE + frame(SETTINGS, 0, 0) + frame(1, 4, 2, b"\x82"),
        PREFACE + frame(SETTINGS, 0, 0) + frame(0, 0, 7, b"data of no stream"),
    ],
)
async def test_a_peer_that_talks_nonsense_is_cut_off_and_others_are_not(said: bytes) -> None:
    async with native() as served, native_channel(served.port) as channel, raw(served.port) as (reader, writer):
        assert await channel.unary_unary(UNARY)(orders())
        writer.write(said)
        with suppress(ConnectionResetError):  # it closes what it has not read to the end
            async with asyncio.timeout(30):
                while await reader.read(4096):
                    pass
        assert await channel.unary_unary(UNARY)(orders())


async def test_a_connection_that_never_says_anything_is_closed() -> None:
    from kvscout_native import Rpc

    rpc = Rpc(handshake_seconds=0.05)
    _, port = rpc.listen("127.0.0.1", 0, [(UNARY, False, False)])
    async with raw(port) as (reader, writer):
        writer.write(PREFACE[:10])
        await writer.drain()

        async def closed() -> bool:
            rpc.poll()
            rpc.tick()
            return reader.at_eof()

        reading = asyncio.create_task(reader.read())
        await eventually(closed)
        await reading
    assert rpc.stats()["connections"] == 0


async def test_headers_without_end_are_refused() -> None:
    async with native() as served, native_channel(served.port) as channel:
        error = await refused(channel.unary_unary(UNARY)(orders(), metadata=[("long", "x" * 100_000)]))
        assert error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN)
        assert await channel.unary_unary(UNARY)(orders())


async def test_metadata_that_no_header_can_carry_is_an_error_that_names_it() -> None:
    async with native() as served, native_channel(served.port) as channel:
        for name, value in (("grpc-status", "0"), ("bad name", "x"), ("line", "a\nb")):
            error = await refused(channel.unary_unary(UNARY)(orders(), metadata=[(name, value)], timeout=10))
            assert error.code() is grpc.StatusCode.INTERNAL
            assert name in str(error.details())
        assert await channel.unary_unary(UNARY)(orders())


async def test_a_flood_of_resets_costs_its_own_connection_only() -> None:
    async with native() as served, native_channel(served.port) as channel, attacking(served.port, UNARY, 3_000):
        for _ in range(50):
            assert await channel.unary_unary(UNARY)(orders(), timeout=20)
        await until(lambda: served.server.stats()["connections_refused"], "the flood is noticed")
        await until(lambda: served.echo.running == 0, "nothing of the flood is left")


async def test_a_caller_that_gives_a_hundred_calls_up_at_once_keeps_its_connection() -> None:
    given_up, asked = 300, 601
    async with native() as served, raw(served.port) as (reader, writer):
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0) + resets(UNARY, given_up))
        writer.write(frame(HEADERS, END_HEADERS, asked, headers_of(UNARY)))
        writer.write(frame(DATA, END_STREAM, asked, EMPTY_MESSAGE))
        async with asyncio.timeout(20):
            answered = False
            while not answered:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                assert head[3] != GOAWAY
                answered = head[3] == HEADERS and int.from_bytes(head[5:], "big") == asked
        assert served.server.stats()["connections_refused"] == 0


async def test_a_caller_that_does_not_read_stops_the_handler_and_holds_no_more_than_its_window() -> None:
    async with native() as served, native_channel(served.port) as channel:
        stream = channel.unary_stream(DOWNLOAD)(orders(count=2_000, bytes=100_000))
        assert (await stream.read()).startswith(b"0")
        produced = served.server.stats()["queued_bytes"]
        assert produced < MAX_MESSAGE_BYTES
        assert served.echo.running == 1
        numbers = [int((await stream.read()).rstrip(b"\0")) for _ in range(1_999)]
        assert numbers == list(range(1, 2_000))
        assert await stream.read() is grpc.aio.EOF


@pytest.mark.parametrize("method", [DOWNLOAD, UNARY])
async def test_calls_that_last_leave_the_window_of_their_connection_to_others(method: str) -> None:
    count, request = 100, orders(fail="hang") + bytes(100_000)  # more than a connection's window by far
    async with native() as served, native_channel(served.port) as channel:
        open_call: Any = channel.unary_stream(method) if method == DOWNLOAD else channel.unary_unary(method)
        calls = [open_call(request) for _ in range(count)]
        await until(lambda: served.echo.running == count, "all handlers run")
        await until(lambda: served.server.stats()["queued_bytes"] == 0, "what handlers have read counts no more")
        for one in calls:
            one.cancel()
        await until(lambda: served.echo.running == 0, "the handlers are cancelled")
        assert await channel.unary_unary(UNARY)(orders(), timeout=10)


async def test_a_server_that_does_not_read_stops_the_writer() -> None:
    async with native() as served, native_channel(served.port) as channel:
        stream = channel.stream_stream(BOTH)()
        await stream.write(orders(fail="hang"))
        written = 0

        async def write() -> None:
            nonlocal written
            while True:
                await stream.write(orders() + bytes(100_000))
                written += 1

        writing = asyncio.create_task(write())
        await until(lambda: written > 3, "something is written")
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.2)
        assert written * 100_000 < 8 * MAX_MESSAGE_BYTES
        writing.cancel()
        stream.cancel()
        await until(lambda: served.echo.running == 0, "the handler is cancelled")


async def test_a_lost_peer_is_noticed_on_both_sides() -> None:
    async with native() as served, tcp_relay(f"127.0.0.1:{served.port}") as relay:
        async with native_channel(int(relay.address.rpartition(":")[2])) as channel:
            stream = channel.stream_stream(BOTH)()
            await stream.write(orders())
            assert await stream.read()
            relay.swallow()
            error = await refused(stream.read())
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            await until(lambda: served.echo.running == 0, "the handler is cancelled")
            relay.heal()
            assert await channel.unary_unary(UNARY)(orders(), timeout=10)


async def test_a_channel_comes_back_with_its_server_and_fails_at_once_without() -> None:
    async with native() as served:
        port = served.port
        channel = native_channel(port)
        assert await channel.unary_unary(UNARY)(orders())
    for _ in range(3):
        error = await refused(channel.unary_unary(UNARY)(orders(), timeout=10))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert f"127.0.0.1:{port}" in str(error.details())
    async with native(port=port) as served:

        async def answers() -> bool:
            try:
                return bool(await channel.unary_unary(UNARY)(orders(), timeout=10))
            except grpc.aio.AioRpcError:
                return False

        await eventually(answers, what="the channel is back")
        assert served.echo.running == 0
    await channel.close()


@pytest.mark.parametrize("connect", [native_channel, grpcio_channel])
async def test_calls_that_wait_for_a_server_outlast_attempts_that_fail_but_not_their_deadline(connect: Any) -> None:
    async with native() as served:
        port = served.port
    async with connect(port) as channel:
        call = channel.unary_unary(UNARY)
        late = await refused(call(orders(), timeout=0.3, wait_for_ready=True))
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        patient = [asyncio.ensure_future(call(orders(), timeout=60, wait_for_ready=True)) for _ in range(3)]
        # While they wait, others are told at once.
        assert (await refused(call(orders(), timeout=10))).code() is grpc.StatusCode.UNAVAILABLE
        async with native(port=port):
            assert len(await asyncio.gather(*patient)) == 3
            streamed = channel.unary_stream(DOWNLOAD)(orders(count=2), timeout=60, wait_for_ready=True)
            assert [answer async for answer in streamed] == [b"0", b"1"]


async def test_an_option_that_calls_do_not_have_is_refused() -> None:
    async with native() as served, native_channel(served.port) as channel:
        with pytest.raises(TypeError, match="compression"):
            channel.unary_unary(UNARY)(orders(), compression=grpc.Compression.Gzip)


@pytest.mark.parametrize("connect", [native_channel, grpcio_channel])
async def test_a_server_that_stops_lets_running_calls_end_and_takes_no_new_ones(connect: Any) -> None:
    async with native() as served, connect(served.port) as channel:
        stream = channel.stream_stream(BOTH)()
        await stream.write(orders())
        assert await stream.read()
        stopping = asyncio.create_task(served.server.stop(20))
        for number in range(5):
            await stream.write(orders(number=number))
            assert json.loads(await stream.read()) == {"number": number}

        async def is_refused() -> bool:
            try:
                await channel.unary_unary(UNARY)(orders(), timeout=5)
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.UNAVAILABLE
            return False

        await eventually(is_refused, what="new calls go elsewhere")
        assert not stopping.done()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        await channel.close()
        async with asyncio.timeout(30):
            await stopping


async def test_what_runs_when_the_grace_is_over_is_cut_and_cancelled() -> None:
    async with native() as served, native_channel(served.port) as channel:
        stream = channel.unary_stream(DOWNLOAD)(orders(count=1, fail="hang"))
        assert await stream.read()
        await served.server.stop(0)
        assert served.echo.cancelled == 1
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()


async def test_more_calls_than_a_connection_may_have_wait_for_one_another() -> None:
    async with native(max_streams=4) as served, native_channel(served.port) as channel:
        answers = await asyncio.gather(*(channel.unary_unary(UNARY)(orders(), timeout=20) for _ in range(100)))
        assert len(answers) == 100
        assert served.echo.running == 0


async def test_out_of_descriptors_connections_wait_and_nobody_ends() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with native() as served, native_channel(served.port) as channel:
        assert await channel.unary_unary(UNARY)(orders())
        waiting = asyncio.open_connection("127.0.0.1", served.port)
        reader, writer = await waiting
        await until(lambda: served.server.stats()["connections"] >= 2, "both are there")
        taken = [open("/dev/null", "rb") for _ in range(3)]  # noqa: SIM115, ASYNC230 - descriptors, nothing is read
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(file.fileno() for file in taken) + 1, hard))
            with pytest.raises(OSError, match="Too many open files"):
                open("/dev/null", "rb")  # noqa: SIM115, ASYNC230
            assert await channel.unary_unary(UNARY)(orders())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for file in taken:
                file.close()
        writer.transport.abort()
        async with native_channel(served.port) as another:
            assert await another.unary_unary(UNARY)(orders(), timeout=10)
        del reader


async def test_tls_and_client_certificates_are_checked_and_renewed_under_a_running_server() -> None:
    from kvscout_common.rpc.native_channel import client_tls

    first, second = trustme.CA(), trustme.CA()

    def pem(ca: trustme.CA) -> Pem:
        leaf = ca.issue_cert("127.0.0.1", "localhost")
        chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
        return Pem(chain, leaf.private_key_pem.bytes(), first.cert_pem.bytes())

    own = first.issue_cert("client@example.org")
    own_chain = own.cert_chain_pems[0].bytes()

    def channel(ca: trustme.CA, *, certificate: bool = True) -> Any:
        tls = client_tls(
            ca.cert_pem.bytes(),
            own_chain if certificate else None,
            own.private_key_pem.bytes() if certificate else None,
        )
        return native_channel(served.port, host="localhost", tls=tls)

    async with native(pem(first)) as served:
        async with channel(first) as trusted:
            assert await trusted.unary_unary(UNARY)(orders(), timeout=10)
            served.server.renew(pem(second))
            assert await trusted.unary_unary(UNARY)(orders(), timeout=10), "what is open stays"
        async with channel(second) as renewed, channel(first) as outdated, channel(second, certificate=False) as nobody:
            assert await renewed.unary_unary(UNARY)(orders(), timeout=10)
            for wrong in (outdated, nobody):
                error = await refused(wrong.unary_unary(UNARY)(orders(), timeout=10))
                assert error.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection("127.0.0.1", served.port, ssl=ssl.create_default_context())
