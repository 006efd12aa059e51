"""The event sockets of one rank: PUB for live batches, ROUTER that repeats the last ones on request.

Their options are vLLM's, too: the ROUTER keeps ZMQ's own mark of 1,000 messages and is not mandatory, so that replies
which outrun its I/O thread are dropped in silence, and their end with them.

Frames are vLLM's: `[topic][seq, 8 bytes big-endian][payload]`, seq from 0. A replay request is
`[b"", start_seq]` from a DEALER; it is answered with one message a batch and closed by seq −1 with an empty
payload.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq
import zmq.asyncio

from kvscout_mocker.events import Event, EventEncoder, EventFormat
from kvscout_mocker.faults import Faults

_log = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
SEND_HWM = 100_000
"""Messages a slow subscriber may lag behind before ZMQ drops for it, vLLM's default."""


class _Batch(NamedTuple):
    seq: int
    payload: bytes


class EventPublisher:
    """Publishes what one engine's cache does and answers for the recent past. Not thread-safe."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        encoder: EventEncoder,
        *,
        host: str,
        events_port: int,
        replay_port: int,
        topic: str,
        event_format: EventFormat,
        buffer_steps: int,
        faults: Faults,
        first_rank: bool,
        relayed: Callable[[int, bytes], None] | None = None,
    ) -> None:
        """Bind both sockets.

        Args:
            context: Shared by the process.
            encoder: Events to payload.
            host: Address to bind.
            events_port: Port of the PUB socket; 0: any free one.
            replay_port: Port of the ROUTER socket; 0: any free one.
            topic: First frame of each message.
            event_format: `array` engines answer replays without the topic frame.
            buffer_steps: Batches retained for replay; the oldest make room.
            faults: Faults of the batches.
            first_rank: This rank's batches count for faults that come after a number of batches.
            relayed: Receives number and payload of each batch, for subscribers over gRPC; None = there are none.

        Raises:
            zmq.ZMQError: A port is taken.
        """
        self.topic = topic
        self._topic = topic.encode()
        self._encoder = encoder
        self._next_seq = 0
        self._recent: deque[_Batch] = deque(maxlen=buffer_steps)
        self._replay_prefix = [b"", self._topic] if event_format is EventFormat.MAP else [b""]
        self._replay_end = [b""] * len(self._replay_prefix)
        self._pub: zmq.Socket[bytes] = zmq.Context(context).socket(zmq.PUB)
        self._pub.set_hwm(SEND_HWM)
        self._pub.set(zmq.LINGER, 0)
        self._faults = faults
        self._first_rank = first_rank
        self._relayed = relayed
        self.endpoint = _bind(self._pub, host, events_port)
        self.replay_endpoint = ""
        """"" = there is no replay socket."""
        self._replay: zmq.asyncio.Socket | None = None
        if not faults.config.no_replay:
            self._replay = context.socket(zmq.ROUTER)
            self._replay.set(zmq.LINGER, 0)
            self.replay_endpoint = _bind(self._replay, host, replay_port)

    @property
    def last_seq(self) -> int:
        """Return the newest batch's sequence number, −1 before the first."""
        return self._next_seq - 1

    def publish(self, events: Sequence[Event]) -> None:
        """Send the events of one step as one batch; nothing for none. Does not block."""
        if not events:
            return
        batch = _Batch(self._next_seq, self._encoder.encode(events, time.time()))
        self._next_seq += 1
        self._recent.append(batch)
        for _ in range(self._faults.deliveries()):
            self._pub.send_multipart((self._topic, batch.seq.to_bytes(8, "big"), batch.payload))
        if self._relayed is not None:
            self._relayed(batch.seq, batch.payload)
        if self._first_rank:
            self._faults.published(self._next_seq)

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled; return immediately if there is no replay socket."""
        replay = self._replay
        while replay is not None:
            frames: list[bytes] = await replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                _log.warning("ignored a malformed replay request of %d frames", len(frames))
                continue
            await self._answer(replay, frames[0], int.from_bytes(frames[2], "big"))

    async def _answer(self, replay: zmq.asyncio.Socket, client: bytes, start: int) -> None:
        for seq, payload in [batch for batch in self._recent if batch.seq >= start]:
            await replay.send_multipart([client, *self._replay_prefix, seq.to_bytes(8, "big"), payload])
        await replay.send_multipart([client, *self._replay_end, END_OF_REPLAY, b""])

    def close(self) -> None:
        """Close both sockets; what a subscriber has not received yet is dropped."""
        self._pub.close()
        if self._replay is not None:
            self._replay.close()


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> str:
    address = f"[{host}]" if ":" in host else host
    if ":" in host:
        socket.set(zmq.IPV6, 1)
    socket.bind(f"tcp://{address}:{port or '*'}")
    endpoint = socket.get_string(zmq.LAST_ENDPOINT)
    return endpoint.rstrip("\0")
