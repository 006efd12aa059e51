"""The replicas' messages over NATS core: what is pending leaves within a millisecond, what comes goes to the core.

While NATS is away the scheduler works on alone: events are thrown away, not kept. When it is back, everyone is asked
where they are, and what is missing on either side comes as snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import nats.errors
from google.protobuf.message import DecodeError

from kvscout.v1 import replication_pb2
from kvscout_common.nats.link import NatsLink, end_if_cancelled
from kvscout_scheduler.replicas.replication import ALL, TICK_SECONDS, VERSION, Replication

if TYPE_CHECKING:
    from nats.aio.msg import Msg

log = logging.getLogger("kvscout.replicas")

COALESCE_SECONDS = 0.001
"""Between two messages; snapshots go at this pace too."""
PENDING_MESSAGES = 65_536
PENDING_BYTES = 64 * 1024 * 1024
"""Messages that wait to be taken; what is beyond them is lost, and comes with a snapshot."""
JOIN_SECONDS = 0.3
"""How long after connecting a replica that hears of nobody counts as the only one."""
WARM_SECONDS = 1.5

Answer = Callable[[replication_pb2.ForwardedOperation], replication_pb2.ForwardedResult]


class ReplicaLink:
    """Carries the messages of one replica.

    Args:
        link: NATS; whoever made it runs it.
        replication: The core.
        answer: Carries out what another replica forwards; must not raise.
    """

    def __init__(self, link: NatsLink, replication: Replication, answer: Answer) -> None:
        self.lost = 0
        """Messages that could not be sent."""
        self._link = link
        self._replication = replication
        self._answer = answer
        self._all = link.names.scheduler("events")
        self._subscribed = False
        self._connected_at: float | None = None
        self._news = asyncio.Event()
        replication.ownership.log.on_pending = self._news.set
        link.on_connected(self._on_connected)

    @property
    def problem(self) -> str:
        """Why this replica works alone; "" = it does not."""
        if not self._link.connected:
            return f"replicas cannot be reached: {self._link.problem or 'not connected to NATS'}"
        return self._replication.conflict

    async def run(self) -> None:
        """Sends what is pending and does what is due, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._send())

    async def join(self) -> None:
        """Returns when everything that others own is here, or nobody answers, within `WARM_SECONDS`."""
        deadline = time.monotonic() + WARM_SECONDS
        while (now := time.monotonic()) < deadline:
            alone = self._connected_at is not None and now - self._connected_at > JOIN_SECONDS
            views = [view for view in self._replication.views.values() if not view.replaced]
            if (views or alone) and all(view.lag_events == 0 for view in self._replication.views.values()):
                return
            await asyncio.sleep(TICK_SECONDS)
        log.warning("serving without what other replicas own: %s", self.problem or "it did not come in time")

    async def request(self, replica_id: str, operation: replication_pb2.ForwardedOperation, seconds: float) -> bytes:
        """Has another replica carry out an operation.

        Raises:
            nats.errors.Error: It is not there, or does not answer in time.
        """
        message = self._replication.message(forward=operation)
        answer = await self._link.client.request(self._inbox(replica_id), message, timeout=seconds)
        return answer.data

    async def leave(self) -> None:
        """Tells the others that this replica stops."""
        self._replication.leave()
        await self._publish()

    def _inbox(self, replica_id: str) -> str:
        return self._link.names.scheduler("to", replica_id)

    async def _on_connected(self) -> None:
        client = self._link.client
        if not self._subscribed:
            for subject in (self._all, self._inbox(self._replication.me.replica_id)):
                await client.subscribe(
                    subject,
                    cb=self._on_message,
                    pending_msgs_limit=PENDING_MESSAGES,
                    pending_bytes_limit=PENDING_BYTES,
                )
            self._subscribed = True
        self._connected_at = time.monotonic()
        self._replication.query()
        self._news.set()

    async def _on_message(self, message: Msg) -> None:
        if message.reply:
            await self._on_request(message)
            return
        self._replication.receive(message.data)
        if self._replication.busy:
            self._news.set()

    async def _on_request(self, message: Msg) -> None:
        try:
            asked = replication_pb2.ReplicaMessage.FromString(message.data)
        except DecodeError:
            self._replication.receive(message.data)
            return
        if asked.version != VERSION or asked.WhichOneof("body") != "forward":
            self._replication.receive(message.data)
            return
        answer = self._answer(asked.forward)
        await self._link.client.publish(message.reply, answer.SerializeToString())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._replication.tick()
            if self._replication.busy:
                self._news.set()

    async def _send(self) -> None:
        sent_at = 0.0
        while True:
            await self._news.wait()
            # What comes alone leaves at once, what comes in numbers gathers.
            await asyncio.sleep(max(0.0, sent_at + COALESCE_SECONDS - time.monotonic()))
            self._news.clear()
            sent_at = time.monotonic()
            await self._publish()
            end_if_cancelled()
            if self._replication.busy:
                self._news.set()

    async def _publish(self) -> None:
        client = self._link.client
        for to, payload in self._replication.take():
            if not client.is_connected:
                self.lost += 1
                continue
            try:
                await client.publish(self._all if to == ALL else self._inbox(to), payload)
            except (nats.errors.Error, OSError) as error:
                self.lost += 1
                log.debug("a message for replicas is lost: %r", error)
