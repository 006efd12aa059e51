"""A publisher's way over NATS: a bounded outbox, recovery from the local index, and the registration in the bucket."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from kvscout.v1 import bridge_pb2
from kvscout_blocks.bytes.events import DecodedBatch
from kvscout_blocks.publish.event_stream import STREAM_MAX_AGE_SECONDS
from kvscout_blocks.publish.nats import CoreWay, Sender, StreamWay, Way
from kvscout_blocks.publish.publication import Outbox, Publication
from kvscout_blocks.source.decisions import SequencedBatch
from kvscout_blocks.source.recovery import RecoveryService, serve_recovery
from kvscout_client.kv_publisher_rank import PublishedRank
from kvscout_common.errors import Unavailable
from kvscout_common.nats.config import NatsConfig
from kvscout_common.nats.link import NatsLink
from kvscout_common.registry.worker_lease import WorkerLease
from kvscout_common.worker import Transport

log = logging.getLogger("kvscout.publisher")


class NatsOutlet:
    """`Outlet` over NATS core or JetStream.

    Args:
        rank: The rank that is published.
        config: The connection.
        max_buffered_bytes: Largest size of waiting batches; beyond it the state replaces them, or they are lost.
        lease_seconds: Lease of the registration; None = another process registers the worker.
        stream_max_age_seconds: Retention of a stream that has to be created.
    """

    def __init__(
        self,
        rank: PublishedRank,
        config: NatsConfig,
        *,
        max_buffered_bytes: int,
        lease_seconds: int | None,
        stream_max_age_seconds: float = STREAM_MAX_AGE_SECONDS,
    ) -> None:
        spec = rank.spec
        self._rank = rank
        self._link = NatsLink(config, f"kvscout-publisher {spec.worker_id}")
        self._service: RecoveryService | None = None
        # Before anything is sent: a reader that misses something can recover it.
        self._link.on_connected(self._serve)
        way: Way = CoreWay(self._link)
        if spec.transport is Transport.JETSTREAM:
            streams = {(spec.tenant, spec.model)}
            way = StreamWay(self._link, lambda: streams, max_age_seconds=stream_max_age_seconds)
        self._sender = Sender(self._link, way)
        self._outbox = Outbox(max_buffered_bytes, self._sender.wake)
        self._publication = Publication(rank.rank, spec.pool, {}, rank.local, self._outbox, has_state=rank.has_state)
        self._lease = WorkerLease(self._link, spec, lease_seconds=lease_seconds) if lease_seconds else None
        self._publication.begin(rank.epoch, None)

    def applied(self, batch: SequencedBatch[DecodedBatch]) -> None:
        """See `Outlet.applied`."""
        self._publication.applied(batch)

    def began(self, epoch: int) -> None:
        """See `Outlet.began`."""
        self._publication.begin(epoch, None)

    def tasks(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return what runs while it is open, by name."""
        tasks: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "nats": self._link.run,
            "send": lambda: self._sender.run(self._outbox),
        }
        if self._lease is not None:
            tasks["lease"] = self._lease.run
        return tasks

    @property
    def connected(self) -> bool:
        """Return whether NATS is there now."""
        return self._link.connected

    @property
    def problem(self) -> str:
        """Return what an operator should know; "" = nothing."""
        lease = self._lease.problem if self._lease is not None else ""
        return self._link.problem or self._sender.problem or (lease and f"not registered: {lease}")

    @property
    def buffered(self) -> tuple[int, int]:
        """Return the batches and bytes that NATS has not confirmed."""
        return self._publication.waiting, self._outbox.buffered_bytes

    @property
    def dropped(self) -> int:
        """Return the number of batches that were not sent as batches: too many waited, or one was too large."""
        return self._publication.dropped + self._publication.oversized

    @property
    def states(self) -> int:
        """Return the number of states sent, or begun."""
        return self._publication.states

    async def drained(self) -> None:
        """Return when NATS has confirmed everything, and the registration.

        Raises:
            FailedPrecondition: Somebody removed the worker.
        """
        await self._sender.drained(self._outbox)
        if self._lease is not None:
            await self._lease.until_registered()

    async def close(self, *, deregister: bool) -> None:
        """End it, after its tasks have ended."""
        if self._lease is not None and deregister:
            try:
                await self._lease.remove()
            except Unavailable as error:
                log.warning(
                    "the registration of worker %s was not removed and ends with its lease: %s",
                    self._rank.rank.worker_id,
                    error,
                )
        if self._service is not None:
            await self._service.close()
        await self._link.close()

    async def _serve(self) -> None:
        if self._service is None:
            subject = self._link.names.recover(self._rank.spec.tenant, self._rank.rank)
            self._service = await serve_recovery(self._link.client, subject, self._answer)

    async def _answer(self, request: bridge_pb2.RecoverRequest) -> Iterator[bridge_pb2.RecoverResponse]:
        if self._rank.is_known:
            return await self._rank.local.answer(request)
        # A reader that gets an empty answer continues immediately; without an answer it requests again and again.
        return iter((bridge_pb2.RecoverResponse(outcome=bridge_pb2.RECOVER_OUTCOME_TOO_NEW, last=True),))
