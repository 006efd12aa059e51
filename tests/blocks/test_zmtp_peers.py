"""Peers that are no libzmq, before the native thread: old ones, hostile ones, and some that are half dead."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from support import zmtp_peer as zmtp
from support.free_ports import free_ports
from support.intake_world import IntakeWorld

from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.source import subscriber
from kvscout_common.hashing import native_available
from kvscout_common.worker import EventEndpoint, WorkerRank

pytestmark = pytest.mark.skipif(not native_available(), reason="the intake is native")

OPENED = zmtp.greeting() + zmtp.ready() + zmtp.command(b"PONG")
Scene = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=[1, 3])
async def world(request: pytest.FixtureRequest) -> Iterator[IntakeWorld]:  # type: ignore[misc]  # an async generator, for the running loop
    world = IntakeWorld(threads=request.param)
    yield world
    world.close()


@asynccontextmanager
async def peer(scene: Scene) -> AsyncIterator[str]:
    """Plays a scene to each connection; where it listens."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await scene(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(play, "127.0.0.1", 0)
    async with server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("minor", "subscription"),
    [
        (0, zmtp.frame(b"\x01topic")),
        (1, zmtp.command(b"SUBSCRIBE", b"topic")),
        (7, zmtp.command(b"SUBSCRIBE", b"topic")),
    ],
)
async def test_a_publisher_of_each_version_gets_a_subscription_it_understands(
    world: IntakeWorld, minor: int, subscription: bytes
) -> None:
    received: list[bytes] = []

    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(zmtp.greeting(minor=minor))
        received.append(await reader.readexactly(64))
        received.append(await reader.readexactly(len(zmtp.ready(b"SUB"))))
        writer.write(zmtp.ready(b"XPUB"))
        received.append(await reader.readexactly(len(subscription)))
        writer.write(zmtp.batch(0) + zmtp.batch(1, topic=b"else") + zmtp.batch(2, b"x" * 300))
        await reader.read()

    async with peer(scene) as endpoint:
        subscribed = world.subscribe(endpoint, topic="topic")
        await world.until_told(3)
        subscribed.close()
    assert received == [zmtp.greeting(), zmtp.ready(b"SUB"), subscription]
    assert world.told == ["connected", 0, 2]


async def test_a_ping_is_answered_with_its_context_though_it_comes_amid_a_message(world: IntakeWorld) -> None:
    answers: list[bytes] = []
    pong = zmtp.command(b"PONG", b"context")

    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ping = zmtp.command(b"PING", b"\0\0context")
        writer.write(OPENED + zmtp.frame(b"topic", zmtp.MORE) + ping + zmtp.frame(b"\0" * 8, zmtp.MORE))
        await reader.readuntil(zmtp.command(b"SUBSCRIBE") + zmtp.command(b"PING", b"\0\0"))
        answers.append(await reader.readexactly(len(pong)))
        writer.write(zmtp.frame(b"payload"))
        await reader.read()

    async with peer(scene) as endpoint:
        subscription = world.subscribe(endpoint)
        await world.until_told(2)
        subscription.close()
    assert (world.told, answers) == (["connected", 0], [pong])


async def test_it_is_connected_once_its_subscription_came(world: IntakeWorld) -> None:
    subscribed = asyncio.Event()

    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(zmtp.greeting() + zmtp.ready())
        await reader.readuntil(zmtp.command(b"SUBSCRIBE") + zmtp.command(b"PING", b"\0\0"))
        # An engine whose thread does not get to it: what it publishes now goes to nobody.
        await asyncio.sleep(0.1)
        assert not world.told
        writer.write(zmtp.command(b"PONG"))
        subscribed.set()
        await reader.read()

    async with peer(scene) as endpoint:
        subscription = world.subscribe(endpoint)
        await subscribed.wait()
        await world.until_told(1)
        subscription.close()
    assert world.told == ["connected"]


async def test_bytes_that_come_one_by_one_make_the_same_messages(world: IntakeWorld) -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in OPENED + zmtp.batch(0) + zmtp.batch(1, b"x" * 260) + zmtp.message(b"alone"):
            writer.write(bytes([byte]))
            await writer.drain()
        await reader.read()

    async with peer(scene) as endpoint:
        subscription = world.subscribe(endpoint)
        await world.until_told(4)
        subscription.close()
    assert world.told[:3] == ["connected", 0, 1]
    assert "got frames of [5] bytes" in str(world.told[3])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what is not ZMQ's"),
        (zmtp.greeting(mechanism=b"CURVE"), "a greeting that wants the security mechanism CURVE"),
        (zmtp.greeting() + zmtp.ready(b"ROUTER"), 'a socket of type "ROUTER", and not PUB or XPUB'),
        (zmtp.greeting() + zmtp.command(b"ERROR", b"\x04gone"), "an error instead of a handshake (gone)"),
        (OPENED + zmtp.frame(b"", 0x40), "a frame with flags 0x40, which is not ZMQ's"),
        (OPENED + b"\x02" + b"\xff" * 8, "a frame above 4096 bytes"),
        (OPENED + zmtp.frame(b"x" * 5000), "a frame above 4096 bytes"),
        (OPENED + zmtp.frame(b"", zmtp.MORE) * 100_000, "a message of more than 64 frames"),
        (OPENED + zmtp.command(b"PING", b"\0\0" + b"x" * 16) * 100_000, "more PINGs than it reads answers"),
    ],
)
async def test_what_no_publisher_says_ends_the_connection_with_its_reason_and_it_is_not_made_again(
    world: IntakeWorld, monkeypatch: pytest.MonkeyPatch, said: bytes, reason: str
) -> None:
    monkeypatch.setattr(subscriber, "MAX_FRAME_BYTES", 4096)
    connections = 0

    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(said)
        await reader.read()

    async with peer(scene) as endpoint:
        subscription = world.subscribe(endpoint)
        await world.until(lambda: bool(world.told) and str(world.told[-1]).startswith("refused"))
        # Time for another try, were there one.
        await asyncio.sleep(0.25)
        subscription.close()
    assert (world.told[-1], connections) == (f"refused: {reason}", 1)
    assert world.told[:-1] == (["connected"] if said.startswith(OPENED) else [])


async def test_a_peer_that_hangs_up_again_and_again_is_reported_once_and_tried_less_and_less(
    world: IntakeWorld,
) -> None:
    times: list[float] = []

    async def scene(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        times.append(asyncio.get_running_loop().time())
        writer.write(zmtp.greeting())

    async with peer(scene) as endpoint:
        subscription = world.subscribe(endpoint)
        await world.until(lambda: len(times) == 4)
        subscription.close()
    assert world.told == ["unconnected"]
    pauses = [after - before for before, after in pairwise(times)]
    # A busy machine makes them longer, and nothing shorter: 100, 200, 400 ms, less a quarter.
    assert all(pause >= least for pause, least in zip(pauses, (0.075, 0.15, 0.3), strict=True))


async def test_a_bound_address_serves_its_engine_whoever_else_comes(world: IntakeWorld) -> None:
    (port,) = free_ports(1)
    subscription = world.subscribe(f"tcp://127.0.0.1:{port}", bind=True)
    strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
    for _, writer in strangers[:5]:
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
    reader, engine = await asyncio.open_connection("127.0.0.1", port)
    engine.write(OPENED + zmtp.batch(0))
    await world.until_told(2)
    # Those that talk are hung up on, those that wait for something are waited for.
    for talking, _ in strangers[:5]:
        await talking.read()
    engine.write(zmtp.batch(1) + zmtp.frame(b"", 0x40))
    await world.until_told(5)
    assert world.told == ["connected", 0, 1, "refused: a frame with flags 0x40, which is not ZMQ's", "unconnected"]
    subscription.close()
    for _, writer in (*strangers, (reader, engine)):
        writer.close()


async def test_what_waits_for_a_busy_loop_is_not_read_and_keeps_its_order(world: IntakeWorld) -> None:
    payload = b"x" * 2**20
    sent = 0

    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(OPENED)
        for seq in range(40):
            writer.write(zmtp.batch(seq, payload))
            await writer.drain()
            sent += 1
        await reader.read()

    async with peer(scene) as endpoint:
        taken, world.intake._drain = world.intake._drain, lambda: None  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        loop.remove_reader(world.intake._native.fileno())
        subscription = world.subscribe(endpoint)
        before = -1
        while before < sent or not sent:
            before = sent
            await asyncio.sleep(0.1)
        # 8 MiB here, and what the kernel holds of a connection.
        assert sent < 30
        loop.add_reader(world.intake._native.fileno(), taken)
        await world.until_told(41)
        subscription.close()
    assert world.told == ["connected", *range(40)]


@pytest.mark.parametrize("flood", [zmtp.message(b"") * 10_000, zmtp.command(b"JOIN") * 10_000, zmtp.batch(9) * 1_000])
async def test_one_that_never_stops_talking_leaves_turns_to_others(world: IntakeWorld, flood: bytes) -> None:
    received: list[int] = []
    talked = 0

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal talked
        writer.write(OPENED)
        while True:
            writer.write(flood)
            await writer.drain()
            talked += 1

    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OPENED)
        for seq in range(20):
            await world.until(lambda: talked > len(received))
            writer.write(zmtp.batch(seq))
            await world.until(lambda seq=seq: seq in received)  # type: ignore[misc]  # its type is the list's
        await reader.read()

    async with peer(talk) as talking, peer(publish) as publishing:
        flooding = world.subscribe(talking)
        callbacks = replace(world.callbacks, on_message=lambda message: received.append(message.seq))
        other = WorkerRank("other", 0)
        world.index.add_worker(other, WorkerOptions(total_kv_blocks=0))
        subscription = world.intake.subscribe(EventEndpoint(0, publishing), other, world.index, callbacks)
        assert subscription is not None
        await world.until(lambda: len(received) == 20)
        subscription.close()
        flooding.close()
    assert received == list(range(20))


async def test_no_socket_is_left_behind(world: IntakeWorld) -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OPENED + zmtp.batch(0))
        await reader.read()

    async with peer(scene) as endpoint:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            world.told.clear()
            subscription = world.subscribe(endpoint)
            await world.until_told(2)
            subscription.close()
        await world.until(lambda: len(os.listdir("/proc/self/fd")) <= before)
