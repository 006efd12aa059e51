"""The replicas' messages over NATS core: what is pending leaves within a millisecond, what comes goes to the core.

While NATS is away the scheduler works on alone: events are thrown away, not kept. When it is back, every replica is
queried, and what is missing on either side comes as snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import nats.errors
from google.protobuf.message import DecodeError
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvscout.v1 import replication_pb2, scheduler_pb2
from kvscout_common.nats.link import NatsLink, end_if_cancelled
from kvscout_scheduler.replicas.forwarding import Forwarding
from kvscout_scheduler.replicas.replication import ALL, TICK_SECONDS, VERSION, Replication

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from kvscout_scheduler.scheduler import Scheduler

log = logging.getLogger("kvscout.replicas")

COALESCE_SECONDS = 0.001
"""Between two messages; snapshots go at this pace too."""
PENDING_MESSAGES = 65_536
PENDING_BYTES = 64 * 1024 * 1024
"""Messages that wait to be taken; what is beyond them is lost, and comes with a snapshot."""
JOIN_SECONDS = 0.3
"""Seconds after connecting without any message of others after which a replica counts as the only one."""
WARM_SECONDS = 1.5

Answer = Callable[[replication_pb2.ForwardedOperation], replication_pb2.ForwardedResult]


class ReplicaLink:
    """Carries the messages of one replica.

    Args:
        link: NATS; whoever made it runs it.
        replication: The core.
    """

    def __init__(self, link: NatsLink, replication: Replication) -> None:
        self.lost = 0
        """Messages that could not be sent."""
        self._link = link
        self._replication = replication
        self.on_forward: Answer = lambda forwarded: replication_pb2.ForwardedResult(owner=False)
        """Carries out what another replica forwards; must not raise."""
        self._all = link.names.scheduler("events")
        self._subscribed = False
        self._connected_at: float | None = None
        self._news = asyncio.Event()
        replication.ownership.log.on_pending = self._news.set
        link.on_connected(self._on_connected)

    @property
    def problem(self) -> str:
        """Return why this replica works alone; "" = it does not."""
        if not self._link.connected:
            return f"replicas cannot be reached: {self._link.problem or 'not connected to NATS'}"
        return self._replication.conflict

    async def run(self) -> None:
        """Send what is pending and does what is due, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._send())

    async def join(self) -> None:
        """Return when everything that others own is here, or nobody answers, within `WARM_SECONDS`."""
        deadline = time.monotonic() + WARM_SECONDS
        while (now := time.monotonic()) < deadline:
            alone = self._connected_at is not None and now - self._connected_at > JOIN_SECONDS
            views = [view for view in self._replication.views.values() if not view.replaced]
            if (views or alone) and all(view.lag_events == 0 for view in self._replication.views.values()):
                return
            await asyncio.sleep(TICK_SECONDS)
        log.warning("serving without the bookings of other replicas: %s", self.problem or "not received in time")

    async def request(self, replica_id: str, operation: replication_pb2.ForwardedOperation, seconds: float) -> bytes:
        """Forward an operation to another replica.

        Raises:
            nats.errors.Error: It is not there, or does not answer in time.
        """
        message = self._replication.message(forward=operation)
        answer = await self._link.client.request(self._inbox(replica_id), message, timeout=seconds)
        return answer.data

    async def leave(self) -> None:
        """Announce that this replica stops."""
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
            request = replication_pb2.ReplicaMessage.FromString(message.data)
        except DecodeError:
            self._replication.receive(message.data)
            return
        if request.version != VERSION or request.WhichOneof("body") != "forward":
            self._replication.receive(message.data)
            return
        answer = self.on_forward(request.forward)
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
            # What comes alone leaves immediately, what comes in numbers gathers.
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


class Replicas:
    """This replica and what it knows of the others.

    Args:
        scheduler: The core that is replicated.
        replication: It, as a replica.
        link: NATS.
    """

    def __init__(self, scheduler: Scheduler, replication: Replication, link: NatsLink) -> None:
        self.replication = replication
        self.link = ReplicaLink(link, replication)
        self.forwarding = Forwarding(scheduler, replication.ownership, replication.live, self.link.request)
        self.link.on_forward = self.forwarding.answer

    @property
    def problem(self) -> str:
        """Return why this replica works alone; "" = it does not."""
        return self.link.problem

    def to_proto(self) -> scheduler_pb2.GetReplicasResponse:
        """Return the answer to `GetReplicas`."""
        return scheduler_pb2.GetReplicasResponse(
            replicas=self.replication.status(),
            problem=self.link.problem,
            forwarded=self.forwarding.forwarded,
            taken_over=self.replication.ownership.taken_over_count,
        )

    def collect(self) -> Iterator[Metric]:
        """Return samples for Prometheus."""
        replication = self.replication
        lag = GaugeMetricFamily("kvscout_replica_lag_events", "Events not applied yet", labels=["replica"])
        behind = GaugeMetricFamily("kvscout_replica_lag_seconds", "Since when events are missing", labels=["replica"])
        owned = GaugeMetricFamily("kvscout_replica_requests", "Requests, by owner", labels=["replica"])
        statuses = replication.status()
        for status in statuses:
            # Of a replica that was started again the incarnations before it are not lag.
            if status.live:
                lag.add_metric([status.replica_id], status.lag_events)
                behind.add_metric([status.replica_id], status.lag_seconds)
                owned.add_metric([status.replica_id], status.owned_requests)
        yield from (lag, behind, owned)
        yield GaugeMetricFamily(
            "kvscout_replicas_connected", "1 = other replicas can be reached", value=float(not self.link.problem)
        )
        yield GaugeMetricFamily(
            "kvscout_replica_transit_seconds", "From sending to applying, last batch", value=replication.transit_seconds
        )
        counts = {
            "divergences": (self._count("divergences", statuses), "Digests that differ"),
            "gaps": (self._count("gaps", statuses), "Gaps in the events of others"),
            "snapshots": (self._count("snapshots", statuses), "Snapshots applied"),
            "forwarded": (self.forwarding.forwarded, "Operations carried out by their owner"),
            "forwards_unanswered": (self.forwarding.unanswered, "Operations that an owner did not answer in time"),
            "taken_over": (replication.ownership.taken_over_count, "Requests taken over from others"),
            "messages_lost": (self.link.lost, "Messages that could not be sent"),
            "messages_refused": (replication.refused, "Messages that could not be read"),
        }
        for name, (count, help_) in counts.items():
            yield CounterMetricFamily(f"kvscout_replica_{name}", help_, value=count)

    def _count(self, name: str, statuses: Iterable[scheduler_pb2.Replica]) -> float:
        """Return a count over all views, those that are forgotten included."""
        return float(self.replication.ended[name] + sum(getattr(status, name) for status in statuses))
