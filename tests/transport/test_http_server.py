"""The HTTP server: what clients may send, and what becomes of those that dawdle, flood or vanish."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import pytest
import trustme
from support.http_peers import TRANSPORTS, echo, exchange, get, made_of, served
from support.processes import eventually

from kvscout_common.errors import ConfigError
from kvscout_common.http.byte_budget import make_budget
from kvscout_common.http.factory import connect
from kvscout_common.http.http import Charge, HttpCall, HttpLimits, HttpRefused, HttpRequest, SinkStalled
from kvscout_common.identity.pem import Pem
from kvscout_common.transport import Transport


@pytest.fixture(autouse=True, params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    with made_of(request.param):
        yield request.param


def post(body: bytes, *headers: str) -> bytes:
    lines = ("POST /x?y=%20z HTTP/1.1", "Host: a", "Connection: close", *headers, "", "")
    return "\r\n".join(lines).encode() + body


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


async def test_a_request_is_answered() -> None:
    async with served(echo) as (_, port):
        for request in (
            post(b"abc", "Content-Length: 3"),
            post(chunked(b"ab", b"c"), "Transfer-Encoding: chunked"),
        ):
            answer = await exchange(port, request)
            assert (status(answer), body_of(answer)) == (200, b"abc")
            assert b"x-path: /x\r\n" in answer.lower()
            assert b"x-query: y=%20z\r\n" in answer.lower()


async def test_who_expects_a_go_ahead_gets_one() -> None:
    async with served(echo) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"", "Content-Length: 3", "Expect: 100-continue"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await reader.read(-1)).endswith(b"\r\n\r\nabc")
        writer.close()


async def test_requests_on_one_connection_are_answered_in_turn() -> None:
    async def slowly(call: HttpCall) -> None:
        await asyncio.sleep(0.02 if call.path == "/0" else 0)
        await echo(call)

    requests = b"".join(b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n%d" % (i, i) for i in range(9))
    async with served(slowly) as (_, port):
        answer = await exchange(port, requests + get("/end"))
    assert [line for line in answer.lower().split(b"\r\n") if line.startswith(b"x-path")] == [
        *(b"x-path: /%d" % i for i in range(9)),
        b"x-path: /end",
    ]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX : 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: %s\r\n" % (b"a" * 100_000) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * 10_000 + b"\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\nabc\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nabc\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
    ],
)
async def test_what_two_readers_may_take_for_two_things_is_refused(request_bytes: bytes) -> None:
    async with served(echo) as (_, port):
        answer = await exchange(port, request_bytes + get("/smuggled"))
    assert 400 <= status(answer) < 500
    assert b"/smuggled" not in answer


async def test_a_body_that_is_too_long_is_refused_before_it_comes() -> None:
    limits = HttpLimits(body_bytes=10)
    async with served(echo, limits) as (_, port):
        for request in (
            post(b"", "Content-Length: 11", "Expect: 100-continue"),
            post(chunked(b"a" * 6, b"b" * 6), "Transfer-Encoding: chunked"),
        ):
            assert status(await exchange(port, request)) == 413
        assert status(await exchange(port, post(b"a" * 10, "Content-Length: 10"))) == 200


async def test_who_dawdles_is_sent_away() -> None:
    limits = HttpLimits(idle_seconds=0.2, body_seconds=0.2)
    async with served(echo, limits) as (_, port):
        assert await exchange(port) in (b"",)
        assert status(await exchange(port, b"GET / HTTP/1.1\r\nHo")) in (0, 408)
        assert status(await exchange(port, post(b"a", "Content-Length: 3"))) == 408


async def test_a_handler_is_cancelled_when_its_client_goes() -> None:
    cancelled = asyncio.Event()

    async def wait(call: HttpCall) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    begun = asyncio.Event()
    async with served(wait) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get())
        await begun.wait()
        writer.close()
        async with asyncio.timeout(30):
            await cancelled.wait()


async def test_a_client_that_reads_nothing_holds_no_handler() -> None:
    stalled = asyncio.Event()

    async def flood(call: HttpCall) -> None:
        await call.start(200, [])
        try:
            while True:
                await call.write(b"x" * 100_000)
        except SinkStalled:
            stalled.set()
            raise

    async with served(flood, HttpLimits(write_seconds=0.1)) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get())
        async with asyncio.timeout(30):
            await stalled.wait()
        writer.close()


async def test_what_a_handler_refuses_or_breaks_off_is_told() -> None:
    async def handle(call: HttpCall) -> None:
        if call.path == "/refused":
            raise HttpRefused(418, "a teapot")
        if call.path == "/defect":
            raise ValueError("secret")
        await call.start(200, [("X", "1")])
        if call.path == "/instead":
            await call.respond(503, [], b"sorry")
            return
        await call.write(b"abc")
        if call.path == "/ended":
            await call.end()

    async with served(handle) as (_, port):
        answer = await exchange(port, get("/refused"))
        assert (status(answer), body_of(answer)) == (418, b"a teapot\n")
        answer = await exchange(port, get("/defect"))
        assert (status(answer), b"secret" in answer) == (500, False)
        answer = await exchange(port, get("/instead"))
        assert (status(answer), body_of(answer)) == (503, b"sorry")
        assert (await exchange(port, get("/ended"))).endswith(b"3\r\nabc\r\n0\r\n\r\n")
        assert not (await exchange(port, get("/cut"))).endswith(b"0\r\n\r\n")


async def test_a_server_that_stops_lets_answers_end() -> None:
    async def slowly(call: HttpCall) -> None:
        begun.set()
        await asyncio.sleep(0.1)
        await echo(call)

    begun = asyncio.Event()
    async with served(slowly) as (server, port):
        asking = asyncio.create_task(exchange(port, get()))
        await begun.wait()
        await server.stop(5)
        assert status(await asking) == 200
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_tls_is_served_and_its_certificates_are_renewed() -> None:
    old, new = trustme.CA(), trustme.CA()

    def pem(ca: trustme.CA) -> Pem:
        certificate = ca.issue_cert("127.0.0.1")
        chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
        return Pem(chain, certificate.private_key_pem.bytes(), None)

    from kvscout_common.http.factory import serve_http

    server = serve_http(echo)
    port = await server.listen("127.0.0.1", 0, pem(old))
    for ca, other in ((old, new), (new, old)):
        trusting, doubting = connect(ca=ca.cert_pem.bytes()), connect(ca=other.cert_pem.bytes())
        answer = await trusting.send(HttpRequest(f"https://127.0.0.1:{port}/", body=b"abc"), connect_seconds=5)
        assert await answer.read(10) == b"abc"
        with suppress(Exception):
            await doubting.send(HttpRequest(f"https://127.0.0.1:{port}/"), connect_seconds=5)
            raise AssertionError("a certificate of somebody else was taken")
        await trusting.close()
        await doubting.close()
        server.renew(pem(new))
    with pytest.raises(ConfigError):
        server.renew(Pem(b"no", b"certificate", None))
    await server.stop(0)


async def test_a_body_that_comes_too_slowly_ends_and_one_that_comes_steadily_does_not(transport: Transport) -> None:
    if transport is not Transport.NATIVE:
        pytest.skip("aiohttp limits the time of the whole body alone")
    limits = HttpLimits(body_window_seconds=1.0, body_window_bytes=1000)

    async def send(port: int, chunk: bytes, times: int) -> tuple[int, int]:
        """So many chunks, every 50 ms: the status, and how many were sent until then."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"", f"Content-Length: {len(chunk) * times}"))
        answering = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        sent = 0
        with suppress(ConnectionError):
            while sent < times and not answering.done():
                writer.write(chunk)
                await writer.drain()
                sent += 1
                await asyncio.sleep(0.05)
        answer = await answering
        writer.close()
        return status(answer), sent

    async with served(echo, limits) as (_, port):
        (slow, sent), (steady, _) = await asyncio.gather(send(port, b"x", 400), send(port, b"x" * 500, 60))
    assert slow == 408
    assert sent < 400
    assert steady == 200


@pytest.mark.parametrize("with_length", [True, False])
async def test_a_body_is_charged_as_it_comes_and_refused_where_there_is_no_room(with_length: bool) -> None:
    budget, charges = make_budget(400_000), list[Charge]()

    async def hold(call: HttpCall) -> None:
        charge = budget.charge("a", 2)
        charges.append(charge)
        await call.body(charge)
        await call.respond(200, [], b"%d" % charge.bytes)

    async with served(hold) as (_, port):
        for length, expected in ((10, 200), (90_000, 200), (150_000, 429)):
            body = b"x" * length
            request = post(body, f"Content-Length: {length}")
            if not with_length:
                chunks = (body[at : at + 1000] for at in range(0, length, 1000))
                request = post(chunked(*chunks), "Transfer-Encoding: chunked")
            answer = await exchange(port, request)
            assert status(answer) == expected
            assert expected != 200 or body_of(answer) == b"%d" % (2 * length)
            assert charges[-1].bytes == budget.held <= 200_000
            charges.pop()
            assert budget.held == 0


async def test_what_is_charged_for_a_body_whose_client_goes_is_given_back() -> None:
    budget = make_budget(1 << 20)

    async def read(call: HttpCall) -> None:
        await call.body(budget.charge())

    async with served(read) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"x" * 200_000, "Content-Length: 300000"))
        await eventually(lambda: budget.held == 200_000)
        writer.transport.abort()
        await eventually(lambda: budget.held == 0)


async def test_of_what_a_client_sends_past_its_answer_not_much_is_read(transport: Transport) -> None:
    async def refuse(call: HttpCall) -> None:
        await call.respond(401, [], b"who are you?")

    async with served(refuse) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.set_write_buffer_limits(high=1)
        writer.write(post(b"", "Content-Length: 200000000"))
        answer, sent = await reader.readuntil(b"who are you?"), 0
        assert status(answer) == 401
        with suppress(ConnectionError):
            while sent < 200_000_000:
                writer.write(bytes(1 << 18))
                await writer.drain()
                sent += 1 << 18
        writer.transport.abort()
    if transport is Transport.NATIVE:  # aiohttp reads for a second, and keeps nothing
        assert sent < 20_000_000


async def test_heads_that_never_end_are_refused_when_there_are_too_many(transport: Transport) -> None:
    if transport is not Transport.NATIVE:
        pytest.skip("aiohttp has a bound for each connection, and none for all of them")
    peers, writers, refused = 3000, list[asyncio.StreamWriter](), 0
    async with served(echo) as (_, port):

        async def peer() -> None:
            nonlocal refused
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(b"GET / HTTP/1.1\r\nX: " + b"y" * 31_000)
            if (await reader.read(100)).startswith(b"HTTP/1.1 503 "):
                refused += 1

        peering = [asyncio.create_task(peer()) for _ in range(peers)]
        await eventually(lambda: bool(refused))
        assert status(await exchange(port, get())) == 200
        for task in peering:
            task.cancel()
        for writer in writers:
            writer.transport.abort()
