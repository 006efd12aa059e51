"""Messages pulled from a JetStream consumer: as many at a time as this side has requested, in order.

Two requests are under way at most, so that one is being filled while the other is applied; their size bounds the
messages and the bytes that wait here. A consumer that is silent beyond its heartbeats, or whose numbers show a hole, is
given up: the reader makes another one at its own position.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Final, NamedTuple

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

BATCH: Final = 256
"""Messages a request."""
BATCH_BYTES: Final = 4 * 1024 * 1024
"""Bytes a request, at first; a larger message has it doubled."""
MAX_BATCH_BYTES: Final = 64 * 1024 * 1024
EXPIRES_SECONDS: Final = 5.0
HEARTBEAT_SECONDS: Final = 0.5
SILENCE_SECONDS: Final = 2.0
"""Without a message or a heartbeat for so long the consumer is gone."""
_NANOSECONDS: Final = 1_000_000_000


class PullBroken(Exception):
    """The consumer is gone, or messages between it and us are."""


class StreamMessage(NamedTuple):
    """A message of a stream."""

    sequence: int
    """In the stream, from 1."""
    sent_at: float
    """Time at which the server took it, seconds since the Unix epoch."""
    subject: str
    data: bytes
    pending: int
    """Messages that the consumer had after it, when it was sent."""
    reply: str
    """Subject for its acknowledgement."""


class StreamPull:
    """Pulls from one consumer; its first message must be the consumer's first.

    Args:
        client: Connected to NATS.
        stream: Name of the stream.
        consumer: Name of the consumer.
        arrived: Called when there is something to take; must not block.
        clock: Monotonic seconds.
        api: Prefix of the JetStream API.
    """

    def __init__(
        self,
        client: Client,
        stream: str,
        consumer: str,
        *,
        arrived: Callable[[], None],
        clock: Callable[[], float],
        api: str = "$JS.API",
    ) -> None:
        self._client = client
        self._next = f"{api}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._arrived = arrived
        self._clock = clock
        self._inbox = client.new_inbox()
        self._subscription: Subscription | None = None
        self._waiting: list[StreamMessage] = []
        self._delivered = 0
        """Consumer sequence of the last message."""
        self._requested = 0
        """Messages that were requested and have not come."""
        self._batch_bytes = BATCH_BYTES
        self._came_since_request = False
        self._received_at = clock()
        self._broken = ""

    async def open(self) -> None:
        """Begin.

        Raises:
            nats.errors.Error: The server is not there.
        """
        self._subscription = await self._client.subscribe(self._inbox, cb=self._on_message)
        self._received_at = self._clock()
        await self._request()

    async def close(self) -> None:
        """End it; what waits is dropped."""
        if self._subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._subscription.unsubscribe()

    async def take(self) -> list[StreamMessage]:
        """Return what has come, in order; requests more where little is left to come.

        Raises:
            PullBroken: The consumer must be made again.
            nats.errors.Error: The server is not there.
        """
        taken, self._waiting = self._waiting, []
        if self._broken and not taken:
            raise PullBroken(self._broken)
        if not taken and self._clock() - self._received_at > SILENCE_SECONDS:
            raise PullBroken(f"the consumer was silent for {SILENCE_SECONDS:g} s")
        if self._requested <= BATCH and not self._broken:
            await self._request()
        return taken

    async def acknowledge(self, message: StreamMessage) -> None:
        """Report this reader's position to the server, for people to see; nothing depends on it.

        Raises:
            nats.errors.Error: The server is not there.
        """
        await self._client.publish(message.reply, b"+ACK")

    async def _request(self) -> None:
        self._requested = max(self._requested, 0) + BATCH
        self._came_since_request = False
        request = {
            "batch": BATCH,
            "max_bytes": self._batch_bytes,
            "expires": int(EXPIRES_SECONDS * _NANOSECONDS),
            "idle_heartbeat": int(HEARTBEAT_SECONDS * _NANOSECONDS),
        }
        await self._client.publish(self._next, json.dumps(request).encode(), self._inbox)

    async def _on_message(self, message: Msg) -> None:
        self._received_at = self._clock()
        status = (message.headers or {}).get("Status") if not message.data else None
        if status is not None:
            self._on_status(status, message)
            return
        sequence, delivered, sent_at, pending = parse_reply(message.reply)
        if delivered != self._delivered + 1:
            self._broken = f"delivery {delivered} came where {self._delivered + 1} comes next"
        elif not self._broken:
            self._delivered = delivered
            self._requested -= 1
            self._came_since_request = True
            self._waiting.append(
                StreamMessage(sequence, sent_at, message.subject, message.data, pending, message.reply)
            )
        self._arrived()

    def _on_status(self, status: str, message: Msg) -> None:
        """Handle a heartbeat, the end of a request, or of the consumer."""
        headers = message.headers or {}
        description = headers.get("Description", "")
        if status == "100":
            return
        if status == "408":
            self._requested -= int(headers.get("Nats-Pending-Messages", BATCH))
        elif status == "409" and "MaxBytes" in description:
            self._requested -= int(headers.get("Nats-Pending-Messages", BATCH))
            if not self._came_since_request:
                self._batch_bytes = min(2 * self._batch_bytes, MAX_BATCH_BYTES)
        elif status == "409" and "Batch Completed" in description:
            # Where bytes were limited, too, the server says that a request is fulfilled.
            self._requested -= int(headers.get("Nats-Pending-Messages", 0))
        else:
            self._broken = f"the server says {status} {description}".rstrip()
        self._arrived()


def parse_reply(reply: str) -> tuple[int, int, float, int]:
    """Return stream sequence, consumer sequence, time (Unix seconds) and pending messages of a reply subject.

    Raises:
        PullBroken: It is no reply subject of JetStream.
    """
    parts = reply.split(".")
    # $JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>.<consumer sequence>.<time>.<pending>, and since
    # 2.10, where domains are used, with two more after ACK.
    first = 5 if len(parts) == 9 else 7
    try:
        stream, consumer, sent_at, pending = map(int, parts[first : first + 4])
        return stream, consumer, sent_at / _NANOSECONDS, pending
    except (ValueError, IndexError):
        raise PullBroken(f"{reply!r} is not a reply subject of JetStream") from None
