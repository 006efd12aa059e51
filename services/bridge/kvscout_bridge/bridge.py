"""The bridge's parts, put together: engines in, NATS out, and answers to requests for lost events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import nats.errors

from kvscout.v1 import bridge_pb2
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.publish.incarnation import Record
from kvscout_blocks.publish.incarnation_store import IncarnationStore
from kvscout_blocks.publish.nats import CoreWay, Sender, StreamWay, Way
from kvscout_blocks.publish.publication import Outbox
from kvscout_blocks.source.feed import Feed
from kvscout_blocks.source.polled_feed import EnginePoll, is_polled, poll_address
from kvscout_blocks.source.recovery import RecoveryService, serve_recovery
from kvscout_blocks.source.zmq_feed import ZmqFeed
from kvscout_blocks.source.zmq_reader import ZmqReader
from kvscout_bridge.config import BridgeConfig
from kvscout_bridge.rank import BridgedRank
from kvscout_bridge.registration import Registrations
from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_common.nats.link import NatsLink, end_if_cancelled
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.process.endings import Closing, FirstDefect
from kvscout_common.registry.backends import file_warnings
from kvscout_common.registry.engine_discovery import Discovery
from kvscout_common.registry.engine_facts import lacks_event_endpoints
from kvscout_common.registry.registry import Registry
from kvscout_common.registry.workers_file import WorkersFile
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.worker import ALL_TENANTS, DEFAULT_TENANT, CopyMode, Transport, WorkerRank, WorkerSpec

log = logging.getLogger("kvscout.bridge")

MAX_RECOVERIES = 16
"""Replays that run at once."""
TICK_SECONDS = 0.1
DRAIN_SECONDS = 3.0
"""Longest wait for NATS at the end: the next bridge reads again from the engine what NATS does not take."""
RECORD_SECONDS = 1.0
"""Interval of recording each rank's last batch, which must still be in the engine's replay buffer."""

Key = tuple[str, WorkerRank]


class Bridge:
    """Every rank that is bridged, and what they share."""

    def __init__(self, config: BridgeConfig) -> None:
        self.started = time.monotonic()
        self.config = config
        self.registry = Registry(time.monotonic, lambda spec: spec.require_allowed(config.allowed_endpoints))
        self.link = NatsLink(config.nats, "kvscout-bridge")
        way: Way = CoreWay(self.link)
        if config.transport is Transport.JETSTREAM:
            way = StreamWay(self.link, self._streams, max_age_seconds=config.stream_max_age_seconds)
        # The order of hooks: what is on record is known before anything is sent.
        self._store = IncarnationStore(self.link, required=config.transport is Transport.JETSTREAM)
        self.sender = Sender(self.link, way)
        self.outbox = Outbox(config.max_buffered_bytes, self.sender.wake)
        self.registrations = Registrations(self.link, config)
        self._recoveries = asyncio.Semaphore(MAX_RECOVERIES)
        self._warnings = RateLimitedLog(log)
        self._ranks: dict[Key, BridgedRank] = {}
        self._services: dict[Key, RecoveryService] = {}
        self._read: dict[Key, Record | None] = {}
        """Record from before."""
        self._record_due = asyncio.Event()
        self._closing = Closing()
        self._defect = FirstDefect()
        self._reader = ZmqReader(failed=self._defect.report)
        self._polls: dict[tuple[str, str], EnginePoll] = {}
        """By tenant and worker, of engines whose events are polled."""
        self._file = WorkersFile(config.server.workers_file, self.registry) if config.server.workers_file else None
        self.registry.listen(self)
        self._discovery = Discovery(self.registry)
        if self._file is not None:
            self._file.load()
        if config.worker is not None:
            self.registry.register(config.worker)

    def tasks(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return what runs beside the server, by name."""
        tasks: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "nats": self.link.run,
            "send": lambda: self.sender.run(self.outbox),
            "records": self._keep_records,
            "ticks": self._tick,
            "ingest": self._defect.watch,
            "discovery": self._discovery.run,
        }
        if self._file is not None:
            tasks["workers-file"] = self._file.watch
        if self.config.register_workers:
            tasks["registration"] = self.registrations.run
        return tasks

    async def drain(self) -> None:
        """Stop reading, and wait until NATS has what was read."""
        for rank in self._ranks.values():
            self._closing.add(rank.close())
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                await self.sender.drained(self.outbox)
                await self._write_records()
        except (nats.errors.Error, TimeoutError, OSError) as error:
            # The next bridge goes on from the record before this one.
            log.warning("not all of the engines' last events were sent and recorded: %r", error)

    async def close(self) -> None:
        """Close every socket."""
        for rank in self._ranks.values():
            self._closing.add(rank.close())
        for poll in self._polls.values():
            self._closing.add(poll.task)
        await self._closing.wait()
        for service in self._services.values():
            await service.close()
        await self.link.close()
        self._reader.close()

    def warnings(self) -> list[Warned]:
        """Return what an operator should know."""
        found: list[Warned] = [text for text in (self.link.problem, self.sender.problem) if text]
        if self.config.register_workers:
            found += self.registrations.warnings()
        found += self._discovery.warnings()
        if self._file is not None:
            found += file_warnings(self._file)
        for (tenant, _), rank in sorted(self._ranks.items()):
            name = f"worker {rank.rank.worker_id}/{rank.rank.dp_rank}"
            found += [TenantWarning(tenant, f"{name}: {text}") for text in problems(rank)]
        return found

    def ranks(self, tenant: str) -> Iterator[BridgedRank]:
        """Return every bridged rank of a tenant ("*" = all), in order."""
        for (owner, _), rank in sorted(self._ranks.items()):
            if tenant in (ALL_TENANTS, owner):
                yield rank

    async def recover(self, request: bridge_pb2.RecoverRequest) -> Iterator[bridge_pb2.RecoverResponse]:
        """Answer a request for lost events.

        Raises:
            InvalidArgument: It names no worker.
            NotFound: The rank is not bridged here.
            FailedPrecondition: This bridge keeps nothing to answer from.
            Unavailable: The engine's incarnation is not known yet.
        """
        if not request.worker.worker_id:
            raise InvalidArgument("must not be empty", field="worker")
        wanted = WorkerRank(request.worker.worker_id, request.worker.dp_rank)
        rank = self._ranks.get((request.tenant or DEFAULT_TENANT, wanted))
        if rank is None:
            raise NotFound(f"rank {wanted.dp_rank} of worker {wanted.worker_id!r} is not bridged here")
        return await rank.answer(request)

    def worker_added(self, spec: WorkerSpec) -> None:
        """Bridge a worker's ranks, as far as they publish events."""
        if spec.transport is Transport.SUBSCRIBE:
            log.warning("worker %s is served over gRPC: indexers read its events, it is not bridged", spec.worker_id)
            return
        if is_polled(spec):
            # Its engine announces a block once, wherever and however often it is kept.
            spec = replace(spec, copies=CopyMode.SET)
        elif not spec.event_endpoints:
            if not lacks_event_endpoints(spec):
                log.warning("worker %s has no event endpoint and is not bridged", spec.worker_id)
            return
        for rank in spec.ranks:
            bridged = self._ranks.get((spec.tenant, rank))
            if bridged is not None:
                bridged.take(spec)
                continue
            if _address(spec, rank) is None:
                log.warning("worker %s/%d has no event endpoint and is not bridged", *rank)
                continue
            bridged = BridgedRank(
                spec,
                rank,
                partial(self._feed, spec, rank),
                outbox=self.outbox,
                recoveries=self._recoveries,
                clock=time.monotonic,
                wall_clock=time.time,
                warnings=self._warnings,
                failed=self._defect.report,
                changed=self._record_due.set,
                answers=self.config.local_indexer,
            )
            self._ranks[spec.tenant, rank] = bridged
            bridged.open()
        self.registrations.add(spec)
        self._record_due.set()

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        """Bridge anew what is read otherwise now; readers of the rest need not know."""
        kept = {
            rank
            for rank in new.ranks
            if (bridged := self._ranks.get((new.tenant, rank))) and bridged.reads(new, _address(new, rank))
        }
        # The registration stays, and is replaced: whoever follows it would forget the worker in between.
        self._close(old, set(old.ranks) - kept)
        self.worker_added(new)

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        """End a worker's bridges."""
        self._close(spec, spec.ranks)
        self.registrations.remove(spec)

    def _feed(self, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex) -> Feed:
        """Return what brings a rank's batches from its engine."""
        if is_polled(spec):
            poll = self._polls.get((spec.tenant, spec.worker_id))
            if poll is None or poll.address != poll_address(spec) or poll.ended:
                poll = EnginePoll(spec, warnings=self._warnings, failed=self._defect.report)
                self._polls[spec.tenant, spec.worker_id] = poll
            return poll.feed(rank, index)
        endpoint = spec.event_endpoint(rank.dp_rank)
        assert endpoint is not None
        return ZmqFeed(
            rank,
            endpoint,
            index,
            reader=self._reader,
            clock=time.monotonic,
            warnings=self._warnings,
            failed=self._defect.report,
        )

    def _close(self, spec: WorkerSpec, ranks: Iterable[WorkerRank]) -> None:
        for rank in ranks:
            key = (spec.tenant, rank)
            bridged = self._ranks.pop(key, None)
            if bridged is None:
                continue
            self._closing.add(bridged.close())
            self.outbox.remove(bridged.publication)
            self._end_poll(spec)
            self._read.pop(key, None)
            service = self._services.pop(key, None)
            if service is not None:
                self._closing.add(asyncio.get_running_loop().create_task(service.close()))

    def _end_poll(self, spec: WorkerSpec) -> None:
        poll = self._polls.get((spec.tenant, spec.worker_id))
        if poll is not None and poll.ended:
            self._closing.add(poll.task)
            del self._polls[spec.tenant, spec.worker_id]

    def _streams(self) -> set[tuple[str, str]]:
        return {(rank.spec.tenant, rank.spec.model) for rank in self._ranks.values()}

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for rank in list(self._ranks.values()):
                rank.tick(time.monotonic())

    async def _keep_records(self) -> None:
        """Decide which incarnation each engine is, record it, and answer requests for it from then on."""
        write_at = 0.0
        while True:
            end_if_cancelled()
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    await self._record_due.wait()
            except TimeoutError:
                pass
            self._record_due.clear()
            if not self.link.connected or self._store.kept is None:
                continue
            try:
                await self._decide()
                if time.monotonic() >= write_at:
                    write_at = time.monotonic() + RECORD_SECONDS
                    await self._write_records()
            except (nats.errors.Error, TimeoutError, OSError) as error:
                self._warnings.warning("records", "NATS does not store published events: %r; trying again", error)

    async def _decide(self) -> None:
        for key, rank in list(self._ranks.items()):
            if not rank.decided:
                if key not in self._read:
                    self._read[key] = await self._store.load(*key)
                rank.decide(self._read[key])
            if rank.awaits_record and (record := rank.unwritten) is not None:
                await self._store.save(*key, record)
                rank.on_written(record)
            if self.config.local_indexer and key not in self._services and key in self._ranks:
                subject = self.link.names.recover(*key)
                self._services[key] = await serve_recovery(self.link.client, subject, rank.answer)

    async def _write_records(self) -> None:
        for key, rank in list(self._ranks.items()):
            if (record := rank.unwritten) is not None:
                await self._store.save(*key, record)
                rank.on_written(record)


def _address(spec: WorkerSpec, rank: WorkerRank) -> Hashable:
    """Return where a rank's events come from; None: nowhere."""
    return poll_address(spec) if is_polled(spec) else spec.event_endpoint(rank.dp_rank)


def problems(rank: BridgedRank) -> list[str]:
    """Return what is wrong with a rank's events, in words."""
    sequence, feed = rank.source.sequence, rank.source.feed
    stats = rank.index.worker_stats(rank.rank)
    incomplete = f"events are missing: {sequence.missing}" if sequence.history_incomplete else ""
    incompatible = stats.incompatible if stats is not None else ""
    return [text for text in (feed.broken, sequence.misconfigured, incompatible, feed.outage, incomplete) if text]
