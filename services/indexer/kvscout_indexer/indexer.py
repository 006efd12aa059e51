"""The indexer's parts, put together: who is registered, whose events are read, what is indexed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvscout_blocks.index.backend import make_index, make_queries
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source.feed import Feed, SourceCut
from kvscout_blocks.source.held import HeldBudget
from kvscout_blocks.source.peer_search import PeerLookup
from kvscout_blocks.source.published import with_last_digest
from kvscout_blocks.source.source import Source
from kvscout_common.errors import NotFound
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.process.endings import Closing, FirstDefect
from kvscout_common.process.heap import trim
from kvscout_common.process.ticks import sleep_to_tick
from kvscout_common.registry.backends import Backends
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.shards import Shard, shard_of
from kvscout_common.worker import PoolKey, Transport, WorkerRank, WorkerSpec
from kvscout_indexer.config import IndexerConfig
from kvscout_indexer.feeds.peers import Peers
from kvscout_indexer.feeds.push import GrpcPush
from kvscout_indexer.feeds.transports import EngineStreams, EventTransport, ZmqDirect
from kvscout_indexer.index.cache_evidence import Finding, Missed, is_proven
from kvscout_indexer.index.pools import Pools
from kvscout_indexer.index.routed import RoutedPrompts

if TYPE_CHECKING:
    from kvscout_indexer.feeds.nats_core import NatsCore
    from kvscout_indexer.streams.jetstream import JetStream

log = logging.getLogger("kvscout.indexer")

MAX_RECOVERIES = 16
"""Replays that run at once."""
UPKEEP_SECONDS = 1.0
"""Interval of looking at sources, and for dropped blocks."""
SOURCES_A_SLICE = 256
"""Sources that are looked at in one iteration of the event loop: half a millisecond."""
SOURCES_A_TICK = 4096
"""Sources that are looked at in one interval, at most: of 16,000, each is every four seconds."""
MAINTAIN_BUDGET = 256
"""Dropped blocks freed, or predictions ended, in one iteration of the event loop: 0.1 and 0.7 ms."""
TRIM_BLOCKS = 65_536
"""Freed blocks after which their memory is given back to the system."""
TRIM_SECONDS = 1.0
"""From then on, so that what goes together is trimmed together."""
WARM_SECONDS = 10.0
"""Longest time at start that health waits for the peers' states of the workers known then."""


class Indexer:
    """Indexes, and sources of events of the registered workers.

    Args:
        config: Checked.
        backends: The workers, and NATS; their owner runs and closes them.
    """

    def __init__(self, config: IndexerConfig, backends: Backends) -> None:
        self.started = time.monotonic()
        self.registry, self.backends, self.nats = backends.registry, backends, backends.link
        self.queries = make_queries()
        self.pools = Pools(self._make_index, self.queries)
        self._config = config
        self.shard = config.shard
        self.routed = RoutedPrompts(
            self.registry,
            self.pools,
            ttl_seconds=config.routed_ttl_seconds,
            served=self._count_served,
            judge=self._judge_cache,
            shard=config.shard,
        )
        if not config.kv_events and config.router_predicted_ttl_seconds is not None:
            log.warning("--router-predicted-ttl has no effect with --no-kv-events: predictions last --router-ttl")
        self._sources: dict[tuple[str, WorkerRank], Source] = {}
        self._closing = Closing()
        """Replays of closed sources that have not ended yet."""
        self._unseen: Iterator[tuple[str, WorkerRank]] = iter(())
        """Sources that are looked at next."""
        self._recoveries = asyncio.Semaphore(MAX_RECOVERIES)
        self.held = HeldBudget()
        self._warnings = RateLimitedLog(log)
        self._defect = FirstDefect()
        self._trim_at: float | None = None
        """Time to give free memory back to the system, on the clock; None = nothing was dropped."""
        self.push = GrpcPush(self.registry, failed=self._defect.report)
        self._transports: dict[Transport, EventTransport] = {
            Transport.ZMQ: ZmqDirect(
                threads=config.ingest_threads, warnings=self._warnings, failed=self._defect.report
            ),
            Transport.GRPC: self.push,
            Transport.SUBSCRIBE: EngineStreams(
                security=config.client, warnings=self._warnings, failed=self._defect.report
            ),
        }
        self.nats_core: NatsCore | None = None
        """None as well, then."""
        if self.nats is not None:
            from kvscout_indexer.feeds.nats_core import NatsCore

            self.nats_core = NatsCore(
                self.nats,
                security=config.client,
                shard=config.shard,
                warnings=self._warnings,
                failed=self._defect.report,
            )
            self._transports[Transport.NATS_CORE] = self.nats_core
        self.jetstream = self._make_jetstream(config)
        """None without NATS."""
        self.peers = Peers(config.peers, security=config.client, warnings=self._warnings)
        self.registry.listen(self)

    def _make_jetstream(self, config: IndexerConfig) -> JetStream | None:
        if self.nats is None or not config.kv_events:
            if config.reset_states:
                log.warning("--router-reset-states has no effect without --nats-server or with --no-kv-events")
            return None
        from kvscout_indexer.streams.jetstream import JetStream

        jetstream = JetStream(
            self.nats,
            max_age_seconds=config.stream_max_age_seconds,
            snapshot_threshold=config.snapshot_threshold,
            reset_states=config.reset_states,
            security=config.client,
            shard=config.shard,
            warnings=self._warnings,
        )
        self._transports[Transport.JETSTREAM] = jetstream
        return jetstream

    def _make_index(self, pool: PoolKey) -> BlockIndex:
        return make_index(
            pool.block_size,
            pool.eagle,
            max_blocks=self._config.max_blocks,
            max_predicted_blocks=self._config.max_predicted_blocks,
            prune_ratio=self._config.prune_target_ratio,
        )

    def tasks(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return what runs beside the server, by name."""
        tasks = {"ingest": self._defect.watch, "upkeep": self._upkeep}
        if self._config.kv_events:
            for transport in self._transports.values():
                tasks.update(transport.tasks())
        return tasks

    def warnings(self) -> list[Warned]:
        """Return what an operator should know, in sentences."""
        nats = [f"NATS: {self.nats.problem}"] if self.nats is not None and self.nats.problem else []
        streams = self.jetstream.warnings() if self.jetstream is not None else []
        full = [warned for pool, _ in self.pools.by_key() if (warned := self._beyond_bound(pool)) is not None]
        shared = [warned for pool, index in self.pools.by_key() for warned in _disagreements(pool, index)]
        return [*self.backends.warnings(), *self.peers.warnings(), *nats, *streams, *self._lacking(), *full, *shared]

    def _lacking(self) -> list[str]:
        if not self.held.lacking:
            return []
        return [
            f"{self.held.lacking:,} worker ranks had live events dropped, since all may hold {self.held.most >> 20} MiB"
            " while their histories are replayed; the events are requested again"
        ]

    def _beyond_bound(self, pool: PoolKey) -> TenantWarning | None:
        """Return a warning if the engines of a pool have room for more blocks than its index."""
        most = self._config.max_blocks
        if not most or (capacity := self.pools.capacity(pool)) <= most:
            return None
        return TenantWarning(
            pool.tenant,
            f"the engines of model {pool.model!r} have room for {capacity} blocks, its index for {most}: what was used"
            " longest ago is not found; raise --max-blocks, or share the workers among indexers with --shard",
        )

    async def warm(self) -> None:
        """Wait for the workers, until streams are read, and peers have answered for the workers known then.

        For each of them in bounded time; for peers `WARM_SECONDS`.
        """
        await self.backends.warm()
        if self.jetstream is not None:
            await self.jetstream.warm()
        try:
            async with asyncio.timeout(WARM_SECONDS):
                for source in list(self._sources.values()):
                    await source.peers.over.wait()
        except TimeoutError:
            log.warning("serving before peers have answered for every worker")

    async def drain(self) -> None:
        """End the streams of publishers that push."""
        self.push.drain()

    async def close(self) -> None:
        """End every source and transport."""
        for source in self._sources.values():
            self._closing.add(source.close())
        await self._closing.wait()
        for transport in self._transports.values():
            await transport.close()
        await self.peers.close()

    def sources(self, tenant: str) -> Iterator[tuple[WorkerSpec, WorkerRank, Source | None]]:
        """Return every registered rank of a tenant ("*" = all) in order, and its source; None = without events."""
        for entry in self.registry.entries(tenant):
            for rank in entry.spec.ranks:
                yield entry.spec, rank, self._sources.get((entry.spec.tenant, rank))

    async def dump_messages(self, spec: WorkerSpec, rank: WorkerRank) -> list[bytes]:
        """Return one consistent cut of a worker rank as serialised `KvEventBatch` messages; none if it is gone."""
        index = self.pools.get(spec.pool)
        if index is None:
            return []
        source = self._sources.get((spec.tenant, rank))
        if source is not None:
            # What is missing as of the cut, for which it may wait: events may be lost meanwhile.
            taken = await source.cut()
        else:
            incomplete, cut = rank in self.pools.incomplete(spec.pool), index.cut(rank)
            taken = SourceCut(cut, 0, incomplete, None) if cut is not None else None
        if taken is None:
            return []
        incomplete = taken.history_incomplete
        messages = await taken.cut.encode(spec.pool, history_incomplete=incomplete) or []
        if messages and not taken.epoch and taken.last_digest is not None:
            messages[-1] = with_last_digest(messages[-1], taken.last_digest)
        return messages

    def recover(self, tenant: str, worker_id: str, dp_rank: int | None) -> int:
        """Drop and fetch again what is known of a worker; return the number of ranks.

        Raises:
            NotFound: If the worker, or the rank, is unknown.
        """
        spec = self.registry.get(tenant, worker_id).spec
        ranks = [rank for rank in spec.ranks if dp_rank in (None, rank.dp_rank)]
        if not ranks:
            raise NotFound(f"worker {worker_id!r} has no rank {dp_rank}")
        for rank in ranks:
            source = self._sources.get((tenant, rank))
            if source is not None:
                source.recover(any_epoch=True)
            else:
                self.pools.of(spec).reset(rank)
        return len(ranks)

    def unread(self, spec: WorkerSpec) -> str:
        """Return why no events of a worker are read here, whatever its registration says; "" = they are."""
        shard = self.shard
        if not shard.has(spec.tenant, spec.worker_id):
            theirs = Shard(shard_of(spec.tenant, spec.worker_id, shard.count), shard.count)
            return f"the worker belongs to shard {theirs}, this indexer has {shard}"
        return "" if self._config.kv_events else "no events are read (--no-kv-events): what was routed is predicted"

    def worker_added(self, spec: WorkerSpec) -> None:
        """Index a worker and reads its events; of another shard's, only knows that it is there."""
        indexed = self.shard.has(spec.tenant, spec.worker_id)
        index = self.pools.add(spec, indexed=indexed)
        if not indexed:
            return
        beyond = self._beyond_bound(spec.pool)
        if beyond is not None:
            self._warnings.warning(("bound", spec.pool), "%s", beyond.text)
        for rank in spec.ranks:
            self._open(spec, rank, self._feed(spec, rank, index), index)

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        """Take over what changed; a rank whose events have another source now starts anew."""
        if old.pool != new.pool:
            self.worker_removed(old, "replaced")
            self.worker_added(new)
            return
        indexed = self.shard.has(new.tenant, new.worker_id)
        index = self.pools.add(new, indexed=indexed)
        if not indexed:
            return
        for rank in old.ranks:
            if rank not in new.ranks:
                self._close(old, rank)
                self.pools.drop_rank(old, rank)
        for rank in new.ranks:
            feed = self._feed(new, rank, index)
            source = self._sources.get((new.tenant, rank))
            if source is not None and feed is not None and source.feed.address == feed.address:
                source.spec = new
                continue
            if source is not None or feed is not None:  # else predictions are all there is
                self._close(new, rank)
                index.reset(rank)
            self._open(new, rank, feed, index)

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        """Forget a worker."""
        self._trim_soon()
        for rank in spec.ranks:
            self._close(spec, rank)
        self.pools.remove(spec)

    def _feed(self, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex) -> Feed | None:
        transport = self._transports.get(spec.transport) if self._config.kv_events else None
        return transport.feed(spec, rank, index) if transport is not None else None

    def _open(self, spec: WorkerSpec, rank: WorkerRank, feed: Feed | None, index: BlockIndex) -> None:
        if feed is None:
            if not self._config.kv_events:
                self.pools.set_incomplete(spec.pool, rank, incomplete=True)
            return
        source = Source(
            spec,
            rank,
            feed,
            index,
            recoveries=self._recoveries,
            budget=self.held,
            clock=time.monotonic,
            ttl_seconds=self._config.router_ttl_seconds,
            warnings=self._warnings,
            incomplete=lambda incomplete: self.pools.set_incomplete(spec.pool, rank, incomplete),
            failed=self._defect.report,
            peer_lookup=self._peer_lookup(spec, index),
        )
        self._sources[spec.tenant, rank] = source
        source.open()

    def _peer_lookup(self, spec: WorkerSpec, index: BlockIndex) -> PeerLookup | None:
        """Return the lookup of states among peers, before the source; None where snapshots are better."""
        if not self._config.peers or spec.transport is Transport.JETSTREAM:
            return None
        return lambda spec, rank: self.peers.state_of(spec, rank, index)

    def _close(self, spec: WorkerSpec, rank: WorkerRank) -> None:
        source = self._sources.pop((spec.tenant, rank), None)
        if source is not None:
            self._closing.add(source.close())
        elif not self._config.kv_events:
            self.pools.set_incomplete(spec.pool, rank, incomplete=False)

    def _count_served(self, tenant: str, rank: WorkerRank) -> None:
        source = self._sources.get((tenant, rank))
        if source is not None:
            source.served += 1

    def _judge_cache(self, spec: WorkerSpec, rank: WorkerRank, evidence: Sequence[Missed]) -> None:
        """Fence a rank whose engine emptied its cache without an event, or end the fence."""
        source = self._sources.get((spec.tenant, rank))
        if source is None:
            return
        found = evidence[0].evidence
        if found.finding is Finding.EMPTIED:
            if is_proven(self.pools.of(spec), rank, evidence):
                source.fence(found.intact_event_id)
        elif source.fenced and found.finding is Finding.AGREES:
            source.end_fence()
        elif source.fenced:
            self._warnings.warning((rank, "kept"), "worker %s/%d still has what was fenced: recovering", *rank)
            source.recover()

    async def _upkeep(self) -> None:
        while True:
            await sleep_to_tick(UPKEEP_SECONDS)
            await self._tick_all()
            await self._maintain_all()
            if self._trim_at is not None and time.monotonic() >= self._trim_at:
                self._trim_at = None
                await asyncio.to_thread(trim)

    async def _tick_all(self) -> None:
        """Do what is due at sources, a slice an iteration of the event loop; at what is left, the next time."""
        for slice_ in range(SOURCES_A_TICK // SOURCES_A_SLICE):
            some = list(islice(self._unseen, SOURCES_A_SLICE))
            if not some and slice_ == 0:
                self._unseen = iter(list(self._sources))
                some = list(islice(self._unseen, SOURCES_A_SLICE))
            if not some:
                return
            self._tick(some)
            await asyncio.sleep(0)

    def _tick(self, names: list[tuple[str, WorkerRank]]) -> None:
        # Not in the loop of the task, which would keep the last one until there is another.
        for name in names:
            source = self._sources.get(name)
            if source is not None:
                source.tick()

    async def _maintain_all(self) -> None:
        """Free what was dropped, a slice an iteration of the event loop, so that no query waits for it."""
        for _, index in self.pools.by_key():
            slices = 1
            while index.maintain(now=time.monotonic(), budget=MAINTAIN_BUDGET):
                slices += 1
                await asyncio.sleep(0)
            if slices * MAINTAIN_BUDGET > TRIM_BLOCKS:
                self._trim_soon()

    def _trim_soon(self) -> None:
        # Not later for what is dropped meanwhile: where workers come and go all the time it would never be.
        if self._trim_at is None:
            self._trim_at = time.monotonic() + TRIM_SECONDS


def _disagreements(pool: PoolKey, index: BlockIndex) -> Iterator[TenantWarning]:
    """Return a warning for each shared cache whose members name blocks differently."""
    for cache in index.shared_caches():
        if cache.disagreeing:
            yield TenantWarning(
                pool.tenant,
                f"{cache.disagreeing:,} of {cache.members:,} worker ranks that share the cache {cache.name!r} of model"
                f" {pool.model!r} name blocks otherwise than the others, so that their engines cannot read what those"
                " stored: start all with the same hash algorithm and hash seed (vLLM: PYTHONHASHSEED)",
            )
