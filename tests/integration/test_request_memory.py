"""What requests that are still coming cost a real gateway: bounded for all and each tenant; strangers cost nothing."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.http2_resets import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, headers_of
from support.process_metrics import scrape
from support.processes import Running, eventually, running

from kvscout_common.hashing import native_available

MIB = 1 << 20
SLACK = 96 * MIB
"""What a process grows by for other reasons: arenas that are kept, connections, buffers of the kernel's size."""
BUDGET = 256 * MIB
PEERS = 150
GENERATE = "/kvscout.v1.Gateway/Generate"

TRANSPORTS = ["native", "grpcio"] if native_available() else ["grpcio"]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@asynccontextmanager
async def gateway(transport: str, *flags: str) -> AsyncIterator[Running]:
    """A gateway of its own process, which knows no worker."""
    flags = ("--scheduler", "127.0.0.1:1", "--no-indexer", "--rpc-transport", transport, *flags)
    async with running("kvscout_gateway.main", *flags) as process:
        yield process


class Sender:
    """A client over a raw socket: sends the head of a request, and as much of its body as the gateway takes."""

    def __init__(
        self, process: Running, length: int, key: str = "", *, path: str = "/v1/completions", tenant: str = ""
    ) -> None:
        self._port = process.ready["http_port"]
        self._head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n"
        self._head += f"Authorization: Bearer {key}\r\n" if key else ""
        self._head += f"X-Kvscout-Tenant: {tenant}\r\n\r\n" if tenant else "\r\n"
        self.length = length
        self.sent = 0
        self.status = 0
        """Of the answer; 0 = there is none yet, -1 = the connection was lost."""
        self.headers: dict[str, str] = {}
        self.text = b""
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._answer: asyncio.Task[None] | None = None

    async def begin(self, most: int) -> None:
        """Connects, and sends so much of the body beside everything else that happens."""
        reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=MIB)
        self._writer.transport.set_write_buffer_limits(high=1)
        self._writer.write(self._head.encode())
        self._answer = asyncio.create_task(self._read(reader))
        self._task = asyncio.create_task(self._send(most))

    async def send(self, data: bytes) -> None:
        """Sends some more."""
        assert self._writer is not None
        self._writer.write(data)
        await self._writer.drain()
        self.sent += len(data)

    def close(self) -> None:
        """Breaks it off."""
        for task in (self._task, self._answer):
            if task is not None:
                task.cancel()
        if self._writer is not None:
            self._writer.transport.abort()

    @property
    def settled(self) -> bool:
        """It was answered, or has sent all that it was to."""
        return bool(self.status) or (self._task is not None and self._task.done())

    async def _send(self, most: int) -> None:
        chunk = b" " * (256 * 1024)
        try:
            while self.sent < most and not self.status:
                await self.send(chunk[: most - self.sent])
        except OSError:
            pass  # what it was told is read all the same

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            self.headers = {
                name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)
            }
            self.text = await reader.readexactly(int(self.headers["content-length"]))
            self.status = int(lines[0].split()[1])
        except (OSError, asyncio.IncompleteReadError):
            self.status = -1


@asynccontextmanager
async def senders(*given: Sender, most: int) -> AsyncIterator[None]:
    """Has all of them send so much of their bodies, until each is answered or has done so."""
    try:
        await asyncio.gather(*(one.begin(most) for one in given))
        await eventually(lambda: all(one.settled for one in given), what="all have sent or were answered")
        yield
    finally:
        for one in given:
            one.close()


class Watched:
    """The memory of a process, from now on."""

    def __init__(self, process: Running) -> None:
        self._process = psutil.Process(process.process.pid)
        self._before = self._process.memory_info().rss
        self._most = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Watched:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()

    @property
    def grown(self) -> int:
        """By how many bytes it has grown at most."""
        self._look()
        return self._most

    def _look(self) -> None:
        self._most = max(self._most, self._process.memory_info().rss - self._before)

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(0.02)


async def answered_with(status: int, process: Running, *, key: str = "", tenant: str = "") -> None:
    """Has a short request answered; 404 = it was looked at: there is no worker."""
    body = json.dumps({"model": "m", "prompt": "hello"}).encode()
    sender = Sender(process, len(body), key, tenant=tenant)
    async with senders(sender, most=0):
        await sender.send(body)
        await eventually(lambda: sender.status == status, what="a short request is answered")


async def is_well(process: Running) -> None:
    """Has a call over gRPC answered that needs no token."""
    async with grpc.aio.insecure_channel(process.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def tokens_file(tmp_path: Path) -> str:
    path = tmp_path / "tokens.yaml"
    path.write_text(
        "tokens:\n"
        "  - {token: of-one, role: client, tenant: one}\n"
        "  - {token: of-two, role: client, tenant: two}\n"
        "limits:\n"
        "  - {tenant: one, requests: 1}\n"
    )
    return str(path)


async def held(process: Running) -> float:
    return (await scrape(process))["kvscout_request_memory_bytes"]


async def nothing_held(process: Running) -> None:
    async def zero() -> bool:
        return await held(process) == 0

    await eventually(zero, what="nothing is held any more")


async def test_bodies_beyond_those_that_may_be_in_flight_are_not_kept(transport: str) -> None:
    async with gateway(transport, "--max-in-flight", "4", "--request-memory-bytes", str(8 * 4 * 40 * MIB)) as process:
        length = 40 * MIB
        clients = [Sender(process, length) for _ in range(24)]
        async with Watched(process) as watched, senders(*clients, most=length - 1):
            assert watched.grown <= 4 * 2 * length + SLACK
            answered = [one.status for one in clients if one.status]
            assert len(answered) == 20
            assert {429} >= {status for status in answered if status > 0}
        await nothing_held(process)


async def test_bodies_are_kept_within_one_budget_and_what_is_above_is_told_to_come_again(transport: str) -> None:
    flags = ("--request-memory-bytes", str(BUDGET), "--max-message-bytes", str(BUDGET // 8))
    async with gateway(transport, *flags) as process:
        clients = [Sender(process, 15 * MIB) for _ in range(48)]
        async with Watched(process) as watched, senders(*clients, most=15 * MIB - 1):
            assert watched.grown <= BUDGET + SLACK
            refused = [one for one in clients if one.status > 0]
            assert refused
            assert {one.status for one in refused} <= {429, 503}
            assert all(int(one.headers["retry-after"]) >= 1 for one in refused)
            assert b"request-memory-bytes" in refused[0].text
            assert 0 < await held(process) <= BUDGET
            await answered_with(404, process, tenant="another")
        await nothing_held(process)
        samples = await scrape(process)
        assert (
            sum(value for name, value in samples.items() if name.startswith("kvscout_request_memory_refusals_total"))
            > 0
        )


async def test_a_tenant_that_may_have_one_request_has_one_body_and_others_are_served(
    transport: str, tmp_path: Path
) -> None:
    async with gateway(transport, "--auth-tokens", tokens_file(tmp_path)) as process:
        length = 40 * MIB
        clients = [Sender(process, length, "of-one") for _ in range(12)]
        async with Watched(process) as watched, senders(*clients, most=length - 1):
            assert watched.grown <= 2 * length + SLACK
            assert sum(one.status == 0 for one in clients) == 1
            await answered_with(404, process, key="of-two")
        await nothing_held(process)


async def test_bodies_of_callers_that_are_unknown_are_not_read(transport: str, tmp_path: Path) -> None:
    async with gateway(transport, "--auth-tokens", tokens_file(tmp_path)) as process:
        length = 60 * MIB
        clients = [Sender(process, length, "of-nobody") for _ in range(8)]
        clients += [Sender(process, length, "of-two", path="/v1/models") for _ in range(8)]
        async with Watched(process) as watched, senders(*clients, most=length - 1):
            assert watched.grown <= SLACK
            assert {one.status for one in clients[:8]} <= {401, -1}
            assert {one.status for one in clients[8:]} <= {405, -1}
            if transport == "native":  # aiohttp reads for a second, and keeps nothing
                # What two kernels keep for a connection.
                assert all(one.sent < 20 * MIB for one in clients), [one.sent for one in clients]
        await nothing_held(process)


@pytest.mark.skipif(not native_available(), reason="the extension is not built: grpcio keeps what it likes")
@pytest.mark.parametrize("key", ["", "of-nobody"])
async def test_messages_of_strangers_are_not_kept(tmp_path: Path, key: str) -> None:
    async with gateway("native", "--auth-tokens", tokens_file(tmp_path)) as process:
        async with Watched(process) as watched, grpc_peers(process, PEERS, key):
            assert watched.grown <= PEERS * 64 * 1024 + 32 * MIB
            await is_well(process)
        await nothing_held(process)


@pytest.mark.skipif(not native_available(), reason="the extension is not built: grpcio keeps what it likes")
async def test_parts_of_messages_are_kept_within_the_budget(tmp_path: Path) -> None:
    budget = 128 * MIB
    async with gateway("native", "--request-memory-bytes", str(budget)) as process:
        async with Watched(process) as watched, grpc_peers(process, PEERS, ""):
            assert watched.grown <= 2 * budget + 32 * MIB
            assert await held(process) <= budget
        await nothing_held(process)


@asynccontextmanager
async def grpc_peers(process: Running, count: int, key: str) -> AsyncIterator[None]:
    """Peers that each begin a call and send as much of a message of 8 MiB as is taken from them."""
    port = process.ready["port"]
    writers: list[asyncio.StreamWriter] = []
    headers = headers_of(GENERATE, {"authorization": f"Bearer {key}"} if key else {})
    begun = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, headers)

    async def peer() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        writer.write(begun + frame(DATA, 0, 1, struct.pack(">BI", 0, 8 * MIB)))
        connection, stream = 65_535 - 5, 65_535 - 5
        initial = 65_535
        sent = 0
        while sent < 7 * MIB:
            room = min(connection, stream, 16_384)
            if room > 0:
                writer.write(frame(DATA, 0, 1, bytes(room)))
                await writer.drain()
                connection, stream, sent = connection - room, stream - room, sent + room
                if connection > 0 and stream > 0 and not getattr(reader, "_buffer"):  # noqa: B009 - no public name
                    continue
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            match head[3]:
                case 8:
                    more = int.from_bytes(payload, "big")
                    if int.from_bytes(head[5:9], "big"):
                        stream += more
                    else:
                        connection += more
                case 4 if not head[4] & 1:
                    for at in range(0, len(payload), 6):
                        if int.from_bytes(payload[at : at + 2], "big") == 4:
                            now = int.from_bytes(payload[at + 2 : at + 6], "big")
                            stream, initial = stream + now - initial, now
                    writer.write(frame(SETTINGS, 1, 0))
                case 3 | 7 | 1:
                    return  # it was refused

    async def quietly() -> None:
        try:
            async with asyncio.timeout(3):
                await peer()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass

    try:
        await asyncio.gather(*(quietly() for _ in range(count)))
        yield
    finally:
        for writer in writers:
            writer.transport.abort()
