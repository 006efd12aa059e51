"""The event sockets of an engine rank, as wire.md's engines have them: publishes on demand and answers replays.

::

    [topic] [seq] [payload]        published
    [b""] [start seq]              asked  →  [b""] ([topic]) [seq] [payload] ..., the end has seq ff..ff

The options of the sockets are vLLM's: its own mark for the PUB, ZMQ's for the ROUTER, which drops what outruns it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from support.zmq_bind import bind

DEADLINE_SECONDS = 30.0
END_OF_REPLAY = b"\xff" * 8
SEND_HWM = 100_000
"""Messages that a subscriber may lag behind, vLLM's default."""


class RecordedEngine:
    """One rank's sockets on free ports.

    Args:
        has_replay: Whether it has a replay socket.
        replay_topics: Replay replies carry the topic (newer engines) or not (older ones).
        topic: Of what it publishes.
        buffer_steps: Batches that a replay can go back.
        connect_to: Publishes by connecting to this address; "" = it binds.
        send_hwm: Messages that a subscriber may lag behind.
    """

    def __init__(
        self,
        *,
        has_replay: bool = True,
        replay_topics: bool = True,
        topic: bytes = b"kv-events",
        buffer_steps: int = 10_000,
        connect_to: str = "",
        send_hwm: int = SEND_HWM,
    ) -> None:
        self.endpoint = connect_to
        self.replay_endpoint = ""
        self.next_seq = 0
        self.replays_asked: list[int] = []
        """First seq of each replay that was asked for."""
        self.lost_replies: deque[range] = deque()
        """Of each of the next replays, the positions of the replies that are lost, the end being the last one."""
        self.answering = asyncio.Event()
        """Cleared: replays wait."""
        self.answering.set()
        self._has_replay = has_replay
        self._replay_topics = replay_topics
        self._topic = topic
        self._buffer_steps = buffer_steps
        self._send_hwm = send_hwm
        self._connects = bool(connect_to)
        self._buffer: dict[int, bytes] = {}
        self._subscribed = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def buffer(self) -> dict[int, bytes]:
        """What a replay can have, by seq."""
        return self._buffer

    async def start(self) -> None:
        """Opens the sockets, where they were before if they were."""
        # An XPUB is a PUB that can tell when somebody has subscribed.
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.set(zmq.XPUB_VERBOSE, 1)
        self._pub.set_hwm(self._send_hwm)
        if self._connects:
            self._pub.connect(self.endpoint)
        else:
            self.endpoint = bind(self._pub, self.endpoint)
        self._tasks = [asyncio.create_task(self._watch_subscriptions())]
        if self._has_replay:
            self._router = self._context.socket(zmq.ROUTER)
            self.replay_endpoint = bind(self._router, self.replay_endpoint)
            self._tasks.append(asyncio.create_task(self._answer_replays()))

    async def stop(self) -> None:
        """Closes the sockets; the addresses stay reserved in name only."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pub.close(linger=0)
        if self._has_replay:
            self._router.close(linger=0)
        self._subscribed.clear()

    async def close(self) -> None:
        """Ends it."""
        await self.stop()
        self._context.destroy(linger=0)

    def forget(self) -> None:
        """The engine restarts: its sequence begins again, its replay buffer is empty."""
        self.next_seq = 0
        self._buffer.clear()

    def forget_subscribers(self) -> None:
        """`subscribed` waits for one that comes from now on."""
        self._subscribed.clear()

    async def subscribed(self) -> None:
        """Waits until a subscription has reached this engine."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self._subscribed.wait()

    async def publish(self, *payloads: bytes) -> None:
        """Publishes batches under the next sequence numbers."""
        for payload in payloads:
            seq = self._keep(payload)
            await self.send([self._topic, seq.to_bytes(8, "big"), payload])

    def lose(self, *payloads: bytes) -> None:
        """Batches that are published and lost on the way: only a replay has them."""
        for payload in payloads:
            self._keep(payload)

    async def send(self, frames: Iterable[bytes]) -> None:
        """Publishes frames as they are."""
        await self._pub.send_multipart(list(frames))

    def _keep(self, payload: bytes) -> int:
        seq = self.next_seq
        self.next_seq += 1
        self._buffer[seq] = payload
        self._buffer.pop(seq - self._buffer_steps, None)
        return seq

    async def _watch_subscriptions(self) -> None:
        while True:
            message = await self._pub.recv()
            if message[:1] == b"\x01":
                self._subscribed.set()

    async def _answer_replays(self) -> None:
        while True:
            identity, empty, start = await self._router.recv_multipart()
            assert empty == b""
            first = int.from_bytes(start, "big")
            self.replays_asked.append(first)
            await self.answering.wait()
            replies = [
                (self._topic, seq.to_bytes(8, "big"), payload) for seq, payload in self._buffer.items() if seq >= first
            ]
            replies.append((b"", END_OF_REPLAY, b""))
            lost = self.lost_replies.popleft() if self.lost_replies else range(0)
            for number, reply in enumerate(replies):
                if number not in lost:
                    await self._reply(identity, *reply)

    async def _reply(self, identity: bytes, topic: bytes, seq: bytes, payload: bytes) -> None:
        frames = [topic, seq, payload] if self._replay_topics else [seq, payload]
        await self._router.send_multipart([identity, b"", *frames])


@asynccontextmanager
async def recorded_engine(
    *,
    has_replay: bool = True,
    replay_topics: bool = True,
    topic: bytes = b"kv-events",
    buffer_steps: int = 10_000,
    connect_to: str = "",
) -> AsyncIterator[RecordedEngine]:
    """A running engine for the length of a block."""
    engine = RecordedEngine(
        has_replay=has_replay,
        replay_topics=replay_topics,
        topic=topic,
        buffer_steps=buffer_steps,
        connect_to=connect_to,
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
