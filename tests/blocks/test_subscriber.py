"""The sockets of a source: order of what they tell, bursts, endings, and replays that break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import psutil
import pytest
import zmq
import zmq.asyncio
from support.processes import eventually
from support.recorded_engine import RecordedEngine, recorded_engine
from support.vllm_publisher import VllmPublisher, vllm_publisher
from support.zmq_publisher import DEADLINE_MS, Publisher

from kvscout_blocks.bytes.frames import Message
from kvscout_blocks.source import subscriber
from kvscout_blocks.source.feed import HistoryBroken
from kvscout_blocks.source.subscriber import (
    BURST,
    RECEIVE_LIMIT,
    Callbacks,
    Subscription,
    close_sockets,
    open_sockets,
    replay,
)
from kvscout_common.worker import EventEndpoint


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher()
    yield publisher
    publisher.close()


class Told:
    """What a subscription told, in order."""

    def __init__(self) -> None:
        self.events: list[str | int] = []
        self.during: Callable[[Message], None] = lambda _: None

    def subscribe(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: EventEndpoint) -> Subscription:
        return Subscription(
            context,
            endpoint,
            Callbacks(
                on_message=self._on_message,
                on_malformed=self.events.append,
                on_connected=lambda: self.events.append("connected"),
                on_unconnected=lambda: None,
                on_refused=self.events.append,
            ),
        )

    def _on_message(self, message: Message) -> None:
        self.events.append(message.seq)
        self.during(message)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_MS / 1000):
            while len(self.events) < count:
                await asyncio.sleep(0.001)


async def test_a_connection_is_reported_before_its_first_batch(
    context: zmq.Context[zmq.Socket[bytes]], publisher: Publisher
) -> None:
    told = Told()
    subscription = told.subscribe(context, EventEndpoint(0, publisher.endpoint))
    publisher.await_subscription()
    publisher.send(0, 1)
    # The loop stands still until both are there: the handshake and the batch.
    assert subscription._socket.poll(DEADLINE_MS)
    await told.until(2)
    subscription.close()
    assert told.events == ["connected", 0]


async def test_a_reconnect_in_the_midst_of_a_burst_is_reported_when_the_socket_is_read_empty(
    context: zmq.Context[zmq.Socket[bytes]], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The former connection ends before all that came over it is read.
    monkeypatch.setattr(subscriber, "RECEIVE_LIMIT", 1000)
    told = Told()
    subscription = told.subscribe(context, EventEndpoint(0, publisher.endpoint))
    publisher.await_subscription()
    await told.until(1)

    def reconnect(message: Message) -> None:
        if message.seq == 9:
            publisher.reopen()
            assert subscription._monitor.poll(DEADLINE_MS), "no handshake came"

    told.during = reconnect
    batches = 3 * BURST
    publisher.send(0, batches)
    await told.until(batches + 2)
    subscription.close()
    assert told.events == ["connected", *range(batches), "connected"]


async def test_bursts_leave_turns_to_others(context: zmq.Context[zmq.Socket[bytes]], publisher: Publisher) -> None:
    told = Told()
    subscription = told.subscribe(context, EventEndpoint(0, publisher.endpoint))
    publisher.await_subscription()
    await told.until(1)
    publisher.send(0, 4 * BURST)
    seen = []
    while len(told.events) < 4 * BURST + 1:
        seen.append(len(told.events))
        await asyncio.sleep(0)
    subscription.close()
    assert max(after - before for before, after in zip(seen, [*seen[1:], len(told.events)], strict=True)) <= BURST


async def test_nothing_is_reported_after_close_not_even_the_rest_of_a_burst(
    context: zmq.Context[zmq.Socket[bytes]], publisher: Publisher
) -> None:
    told = Told()
    subscription = told.subscribe(context, EventEndpoint(0, publisher.endpoint))
    publisher.await_subscription()
    await told.until(1)
    told.during = lambda message: subscription.close() if message.seq == 2 else None
    publisher.send(0, 10)
    await told.until(4)
    subscription.close()
    await asyncio.sleep(0)
    assert told.events == ["connected", 0, 1, 2]


async def test_an_endpoint_that_cannot_be_used_leaves_no_socket_behind(
    context: zmq.Context[zmq.Socket[bytes]], publisher: Publisher
) -> None:
    told = Told()
    with pytest.raises(zmq.ZMQError, match="in use"):
        told.subscribe(context, EventEndpoint(0, publisher.endpoint, bind=True))
    with pytest.raises(zmq.ZMQError):
        told.subscribe(context, EventEndpoint(0, "tcp://no port here"))
    context.term()  # would wait for an open socket for ever


async def test_an_address_that_cannot_be_connected_to_has_no_history(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with pytest.raises(HistoryBroken, match="no port here"):
        await read(context, "tcp://no port here", 0)


@pytest.fixture
async def engine() -> AsyncIterator[RecordedEngine]:
    async with recorded_engine() as started:
        yield started


async def read(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, start: int) -> list[Message]:
    return [message async for message in replay(context, endpoint, start, idle_seconds=0.2, pause_seconds=0.2)]


@pytest.mark.parametrize("start", [0, 2, 3, 2**64 - 1])
async def test_a_replay_brings_what_the_engine_has_from_there_on(
    context: zmq.Context[zmq.Socket[bytes]], engine: RecordedEngine, start: int
) -> None:
    engine.lose(b"zero", b"one", b"two")
    expected = [Message(seq, payload) for seq, payload in enumerate([b"zero", b"one", b"two"]) if seq >= start]
    assert await read(context, engine.replay_endpoint, start) == expected
    assert engine.replays_asked == [start]


async def test_a_replay_of_an_engine_that_is_away_breaks(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with recorded_engine() as engine:
        endpoint = engine.replay_endpoint
    with pytest.raises(HistoryBroken, match=r"silent for 0\.2 s"):
        await read(context, endpoint, 0)


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        ([[b"", b"\0" * 8, b"payload"]], "silent"),
        ([[b"", b"\0" * 7, b"payload"]], "want seq and payload"),
        ([[b"payload"]], "want seq and payload"),
        ([[b"", b"a", b"b", b"\0" * 8, b"payload"]], "want seq and payload"),
    ],
    ids=["no end", "short seq", "one frame", "five frames"],
)
async def test_a_replay_that_makes_no_sense_breaks(
    context: zmq.Context[zmq.Socket[bytes]], replies: list[list[bytes]], reason: str
) -> None:
    router_context = zmq.asyncio.Context()
    router = router_context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:*")

    async def answer() -> None:
        identity, *_ = await router.recv_multipart()
        for reply in replies:
            await router.send_multipart([identity, *reply])

    answering = asyncio.create_task(answer())
    try:
        with pytest.raises(HistoryBroken, match=reason):
            await read(context, router.get_string(zmq.LAST_ENDPOINT), 0)
    finally:
        await answering
        router_context.destroy(linger=0)


async def test_a_replay_that_is_left_early_closes_its_socket(
    context: zmq.Context[zmq.Socket[bytes]], engine: RecordedEngine
) -> None:
    engine.lose(b"zero", b"one")
    replies = replay(context, engine.replay_endpoint, 0)
    assert await anext(replies) == Message(0, b"zero")
    await replies.aclose()
    context.term()  # would wait for an open socket for ever


async def kept_while_unread(engine: VllmPublisher) -> None:
    """Waits until nothing more comes, then ends the engine: what is read afterwards is what had been received."""
    before, now = -1, psutil.Process().memory_info().rss
    while before < now:
        await asyncio.sleep(0.2)
        before, now = now, psutil.Process().memory_info().rss
    await engine.kill()


async def test_what_is_not_read_waits_at_the_engine_not_here() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # The kernel may keep 32 MiB of a connection for its reader: few messages, if they are large.
    async with vllm_publisher(payload_bytes=2**21) as engine:
        socket, monitor = open_sockets(context, EventEndpoint(0, engine.endpoint))
        try:

            async def subscribed() -> int:
                # What is published between the connection and the subscription is for nobody.
                await engine.publish(1)
                return await asyncio.to_thread(socket.poll, 100)

            await eventually(subscribed, what="a subscription that has reached the engine")
            await engine.publish(150)
            await kept_while_unread(engine)
            count = 0
            while socket.poll(200):
                socket.recv_multipart()
                count += 1
        finally:
            close_sockets(socket, monitor)
    context.term()
    # A few more are in the connection's own buffers.
    assert RECEIVE_LIMIT <= count < 3 * RECEIVE_LIMIT


async def test_replies_that_are_not_read_wait_at_the_engine_not_here(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async with vllm_publisher(payload_bytes=2**20) as engine:
        await engine.publish(150)
        replies = replay(context, engine.replay_endpoint, 0, pause_seconds=0.2)
        count = len([await anext(replies)])
        await kept_while_unread(engine)
        with pytest.raises(HistoryBroken):
            async for _ in replies:
                count += 1
    assert RECEIVE_LIMIT <= count < 3 * RECEIVE_LIMIT
