"""Sends what an outbox has over NATS, and knows what arrived.

::

    Outbox ──due──▶ Sender ──burst──▶ CoreWay: published, then a barrier          ──▶ confirm
       ▲                        └───▶ StreamWay: published, then every PubAck     ──▶ confirm
       └───────────── fail: the connection was lost, a message was refused ◀───┘

Messages of a burst are published one after the other without waiting, and confirmed together: batches that come while a
burst is under way go with the next one. What failed is sent again; readers drop what they have by (epoch, event id),
and JetStream by message id.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Final, Protocol
from weakref import WeakKeyDictionary

import nats.errors
import nats.js.errors
from nats.js.api import PubAck

from kvscout_blocks.publish.event_stream import MSG_ID, ensure_stream, message_id
from kvscout_blocks.publish.publication import Outbox, Outgoing, Publication
from kvscout_common.nats.barrier import NatsBarrier
from kvscout_common.nats.link import NatsLink, end_if_cancelled
from kvscout_common.observability.telemetry import RateLimitedLog

log = logging.getLogger("kvscout.nats")

WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Published without a confirmation; a state is sent in as many windows as it takes."""
ACK_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 0.2

Message = tuple[Publication, Outgoing]


class Way(Protocol):
    """One way through NATS."""

    async def prepare(self) -> None:
        """Set up what the server needs; may be called again."""

    async def send(self, messages: list[Message]) -> list[bool]:
        """Publish messages and waits; whether each has arrived.

        Raises:
            nats.errors.Error, TimeoutError: None of them may have.
        """
        ...


class CoreWay:
    """NATS core: who subscribes now receives it.

    Args:
        link: The connection.
    """

    def __init__(self, link: NatsLink) -> None:
        self._link = link
        self._barrier = NatsBarrier(link.client)

    async def prepare(self) -> None:
        """Do nothing."""

    async def send(self, messages: list[Message]) -> list[bool]:
        """See `Way.send`."""
        generation = self._barrier.generation
        for publication, outgoing in messages:
            pool = publication.pool
            subject = self._link.names.core_events(pool.tenant, pool.model, publication.rank)
            await self._link.client.publish(subject, outgoing.message)
        await self._barrier.wait(generation, seconds=ACK_SECONDS)
        return [True] * len(messages)


class StreamWay:
    """JetStream: who comes within the stream's age receives it.

    Args:
        link: The connection.
        pools: (tenant, model) of every stream that is published to.
        max_age_seconds: Of a stream that is not there yet.
    """

    def __init__(self, link: NatsLink, pools: Callable[[], set[tuple[str, str]]], *, max_age_seconds: float) -> None:
        self._link = link
        self._pools = pools
        self._max_age_seconds = max_age_seconds
        self._js = link.client.jetstream()
        self._made: set[tuple[str, str]] = set()
        self._cuts: WeakKeyDictionary[Publication, str] = WeakKeyDictionary()
        """Names of the states that are under way, by their publication."""

    async def prepare(self) -> None:
        """Make the streams, after each connection: the server may have lost them."""
        self._made.clear()
        await self._make_streams()

    async def send(self, messages: list[Message]) -> list[bool]:
        """See `Way.send`."""
        await self._make_streams()
        acks: list[asyncio.Future[PubAck]] = []
        try:
            for publication, outgoing in messages:
                pool = publication.pool
                subject = self._link.names.stream_events(pool.tenant, pool.model, publication.rank)
                headers = {MSG_ID: self._message_id(publication, outgoing)}
                acks.append(await self._js.publish_async(subject, outgoing.message, headers=headers))
            await asyncio.wait(acks, timeout=ACK_SECONDS)
        finally:
            for ack in acks:
                ack.cancel()
        arrived = [ack.done() and not ack.cancelled() and ack.exception() is None for ack in acks]
        errors = [error for ack in acks if ack.done() and not ack.cancelled() and (error := ack.exception())]
        if errors:
            if any(isinstance(error, nats.js.errors.NoStreamResponseError) for error in errors):
                # Somebody deleted a stream.
                self._made.clear()
            log.warning("JetStream refused %d of %d messages: %r", len(errors), len(acks), errors[0])
        return arrived

    async def _make_streams(self) -> None:
        for tenant, model in self._pools() - self._made:
            await ensure_stream(
                self._js,
                self._link.names,
                tenant,
                model,
                max_age_seconds=self._max_age_seconds,
                replicas=self._link.config.replicas,
            )
            self._made.add((tenant, model))

    def _message_id(self, publication: Publication, outgoing: Outgoing) -> str:
        if outgoing.chunk is None:
            return message_id(publication.rank, outgoing.epoch, outgoing.event_id)
        if outgoing.chunk == 0:
            # A state that is sent again is cut anew, and must not be taken for the one before.
            self._cuts[publication] = secrets.token_hex(8)
        return message_id(publication.rank, "state", self._cuts[publication], outgoing.chunk)


class Sender:
    """Empties an outbox. `run` is a task of the process; `wake` is what the outbox calls.

    Args:
        link: The connection; its hooks prepare the way.
        way: How.
    """

    def __init__(self, link: NatsLink, way: Way) -> None:
        self.problem = ""
        """Reason for which nothing arrives now; "" = it does, as far as is known."""
        self._link = link
        self._way = way
        self._work = asyncio.Event()
        self._connected = asyncio.Event()
        self._moved = asyncio.Event()
        """Something was confirmed."""
        self._warnings = RateLimitedLog(log)
        link.on_connected(self._prepare)

    def wake(self) -> None:
        """Wake the sender."""
        self._work.set()

    async def _prepare(self) -> None:
        await self._way.prepare()
        self._connected.set()

    async def run(self, outbox: Outbox) -> None:
        """Send until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            await self._connected.wait()
            while due := outbox.due:
                end_if_cancelled()
                if not self._link.connected:
                    self._connected.clear()
                    await self._connected.wait()
                    continue
                if not await self._send(due):
                    await asyncio.sleep(RETRY_SECONDS)

    async def drained(self, outbox: Outbox) -> None:
        """Return when all was confirmed."""
        while not outbox.empty:
            self._moved.clear()
            await self._moved.wait()

    async def _send(self, publications: list[Publication]) -> bool:
        """Send what some ranks have due; whether all of it arrived."""
        messages: list[Message] = []
        for publication in publications:
            # While the state of one before it was taken, it may have ended, or begun anew.
            if publication.due:
                messages += [(publication, outgoing) for outgoing in await publication.take()]
        arrived: list[bool] = []
        try:
            for window in _windows(messages):
                arrived += await self._way.send(window)
                if not all(arrived):
                    break
            self.problem = ""
        except (nats.errors.Error, TimeoutError, OSError) as error:
            self.problem = f"events do not reach NATS: {error!r}"
            self._warnings.warning(type(error).__name__, "%s; trying again", self.problem)
        finally:
            arrived += [False] * (len(messages) - len(arrived))
            complete = self._settle(publications, messages, arrived)
            self._moved.set()
        return complete

    @staticmethod
    def _settle(publications: list[Publication], messages: list[Message], arrived: list[bool]) -> bool:
        for publication in publications:
            own = [there for (owner, _), there in zip(messages, arrived, strict=True) if owner is publication]
            if all(own):
                publication.confirm()
            else:
                publication.fail(out_of_order=True in own[own.index(False) :])
        return all(arrived)


def _windows(messages: list[Message]) -> list[list[Message]]:
    windows: list[list[Message]] = [[]]
    size = 0
    for message in messages:
        if windows[-1] and size + len(message[1].message) > WINDOW_BYTES:
            windows.append([])
            size = 0
        windows[-1].append(message)
        size += len(message[1].message)
    return windows
