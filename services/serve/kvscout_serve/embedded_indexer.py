"""The indexer of this process, as its gateway calls it: a function call where `RemoteIndexer` has a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from kvscout.v1 import events_pb2, gateway_pb2, indexer_pb2, types_pb2
from kvscout_common.errors import KvscoutError
from kvscout_common.rank_sets import RankSet
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.worker import ALL_TENANTS, PoolKey, WorkerRank
from kvscout_gateway.upstreams.indexer.blindness import BlindRanks, Reports, Served
from kvscout_gateway.upstreams.indexer.check import CHECK_SECONDS, REST
from kvscout_gateway.upstreams.indexer.emptied_caches import EmptiedCaches
from kvscout_gateway.upstreams.interfaces import NO_RANKS
from kvscout_gateway.values.cache_reports import CacheReports
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.overlaps import ALL_THAT_DIFFER, FEW_ROWS_FROM, Columns, Others, Overlaps, Rows, row_of
from kvscout_gateway.values.prompt import HASH_BYTES, Geometry
from kvscout_indexer.index.routed import RoutedPrompt
from kvscout_indexer.indexer import Indexer
from kvscout_indexer.rpc.servicer import IndexerServicer
from kvscout_scheduler.values.overlaps import NO_OVERLAPS, AnyOverlaps, PackedOverlaps
from kvscout_scheduler.values.overlaps import Overlaps as ColumnOverlaps

log = logging.getLogger("kvscout.serve")

_UNKNOWN = RankSet()

MAX_DECISIONS = 1_024
"""Routing decisions that wait to be recorded; the oldest are dropped, and counted."""


class FoundRows(NamedTuple):
    """See `Rows`: what an index of this process found."""

    overlaps: AnyOverlaps
    """As the scheduler of this process reads them."""
    has_predictions: bool
    lower_bound: bool
    """Workers may have more than is found."""
    incomplete_rows: Sequence[int]
    """Rows of workers whose history is incomplete."""

    @property
    def columns(self) -> Columns:
        """See `Rows`."""
        plain = self.overlaps.plain
        slower = (plain.host_blocks, plain.disk_blocks, plain.external_blocks)
        return (plain.worker_ids, plain.dp_ranks, plain.device_blocks, *slower, plain.predicted_blocks)

    @property
    def others(self) -> Others | None:
        """See `Rows`."""
        return self.overlaps.plain.others

    def confirmed(self, tenant: str, worker: WorkerRank, overlap_blocks: int) -> int | None:
        """See `Rows`."""
        if not self.lower_bound and not self.has_predictions:
            return overlap_blocks  # the usual case: no need to look for the row
        row = row_of(self.columns, worker)
        if row is None:
            # Ranks of which not all is known have a row, unless nothing is known.
            device = self.others[0] if self.others else 0
            return device or (None if self.lower_bound else 0)
        return None if row in self.incomplete_rows else self.overlaps.plain.device_blocks[row]


class EmbeddedIndexer:
    """An indexer in this process.

    Args:
        indexer: The indexer.
        servicer: Answers its rpcs.
    """

    def __init__(self, indexer: Indexer, servicer: IndexerServicer) -> None:
        self.address = ""
        """host:port of this process's own server; "" = not bound yet."""
        self.calls = self.failures = 0
        self.decisions_recorded = self.decisions_lost = 0
        self._indexer = indexer
        self._servicer = servicer
        self._blind: Mapping[tuple[str, WorkerRank], str] = {}
        """Why ranks are BLIND, by tenant and rank."""
        self._no_events: Mapping[tuple[str, WorkerRank], str] = {}
        """What says that the events of ranks are missing, by tenant and rank."""
        self._decisions: deque[Decision] = deque()
        self._waiting = asyncio.Event()
        self._predicts = indexer.routed.predicts

    async def match(
        self,
        model: str,
        tenant: str,
        hashes: Mapping[Geometry, bytes],
        *,
        prompt_tokens: int = 0,
        ranks: Mapping[Geometry, RankSet] = NO_RANKS,
    ) -> Overlaps:
        """Return the overlaps of a prompt with every cache; see `Indexer.match` of the gateway."""
        rows: dict[Geometry, Rows] = {}
        problems: dict[str, str] = {}
        for pool, packed in hashes.items():
            if not packed:
                continue
            self.calls += 1
            # A caller that sends hashes may have given any length.
            tokens = prompt_tokens if prompt_tokens >= len(packed) // HASH_BYTES * pool.block_size else 0
            try:
                rows[pool] = self._find(PoolKey(model, tenant, *pool), packed, tokens, ranks.get(pool, _UNKNOWN))
            except KvscoutError as error:
                self.failures += 1
                problems["indexer"] = f"indexer: {error}"
        return Overlaps(hashes, rows, problems)

    def _find(self, key: PoolKey, hashes: bytes, prompt_tokens: int, known: RankSet) -> Rows:
        """Return the overlaps of a prompt with the caches of one pool, which are those of the ranks that are known.

        Raises:
            KvscoutError: There is no such pool.
        """
        now = time.monotonic()
        if self._indexer.queries is not None:
            top_k = ALL_THAT_DIFFER if known.ranks >= FEW_ROWS_FROM else 0
            found = self._indexer.queries.find(key, hashes, prompt_tokens, top_k=top_k, now=now)
            if top_k and found is not None and found[3] != known:
                # What the index says of its other ranks would be taken for what those have that only others know.
                found = self._indexer.queries.find(key, hashes, prompt_tokens, now=now)
            if found is not None:
                native, lower_bound, incomplete_rows, _ = found
                return FoundRows(PackedOverlaps(native), native.has_predictions, lower_bound, incomplete_rows)
        pool = self._indexer.pools.find(key.tenant, key.model, key.block_size, key.eagle)
        if pool is None:
            return FoundRows(NO_OVERLAPS, has_predictions=False, lower_bound=False, incomplete_rows=())
        usable = (prompt_tokens - 1) // key.block_size if prompt_tokens else None
        matched = pool[1].find_matches(hashes, now=now, usable=usable)
        workers, incomplete = matched.workers, self._indexer.pools.incomplete(key)
        ids, ranks = [rank.worker_id for rank in workers], [rank.dp_rank for rank in workers]
        return FoundRows(
            ColumnOverlaps(ids, ranks, *matched[1:]),
            matched.predicted != matched.device,
            bool(incomplete),
            [row for row, rank in enumerate(workers) if rank in incomplete],
        )

    def routed(self, decision: Decision) -> None:
        """Predict the blocks of a prompt on its worker, where predictions are on."""
        if not self._predicts or not decision.block_hashes:
            return
        self._decisions.append(decision)
        if len(self._decisions) > MAX_DECISIONS:
            self._decisions.popleft()
            self.decisions_lost += 1
        self._waiting.set()

    async def dump(self, request: indexer_pb2.DumpRequest) -> AsyncGenerator[events_pb2.KvEventBatch, None]:
        """Yield the state of every worker rank.

        Raises:
            NotFound: Unknown model.
        """
        async with aclosing(self._servicer.dump_messages(request, None)) as messages:
            async for message in messages:
                yield events_pb2.KvEventBatch.FromString(message)

    def warnings(self) -> list[Warned]:
        """Return the worker ranks whose events never come."""
        return [
            TenantWarning(tenant, f"worker {rank.worker_id}/{rank.dp_rank} is blind: {reason}")
            for (tenant, rank), reason in self._blind.items()
        ]

    def no_events(self) -> Mapping[tuple[str, WorkerRank], str]:
        """Return the worker ranks whose events are missing; see `Indexer.no_events` of the gateway."""
        return self._no_events

    def status(self) -> gateway_pb2.HelperStatus:
        """Return its state, as of an upstream."""
        return gateway_pb2.HelperStatus(
            kind=gateway_pb2.HELPER_KIND_INDEXER,
            address=self.address,
            healthy=True,
            calls=self.calls,
            failures=self.failures,
            decisions_delivered=self.decisions_recorded,
            decisions_lost=self.decisions_lost,
            decisions_waiting=len(self._decisions),
        )

    async def record_decisions(self) -> None:
        """Record routing decisions, for ever."""
        while True:
            await self._waiting.wait()
            while self._decisions:
                decision = self._decisions.popleft()
                if decision.withdrawn:
                    continue
                prompt = RoutedPrompt(
                    decision.worker, decision.block_hashes, decision.pool.block_size, decision.pool.eagle
                )
                try:
                    await self._indexer.routed.record(decision.tenant, decision.model, [prompt])
                    self.decisions_recorded += 1
                except KvscoutError as error:
                    self.decisions_lost += 1
                    log.debug("a routing decision of %s was not recorded: %s", decision.model, error)
            self._waiting.clear()

    async def check(self, served: Served, reports: Reports, caches: CacheReports) -> None:
        """Compare its sources with the requests that workers served, every `CHECK_SECONDS`, for ever.

        Args:
            served: Gives when a worker rank was sent requests that should have brought events.
            reports: Tells whether a worker reports the prompt tokens that it had cached.
            caches: What engines report as cached.
        """
        ranks, emptied = BlindRanks(served, reports), EmptiedCaches(caches)
        took = 0.0
        while True:
            await asyncio.sleep(max(CHECK_SECONDS, REST * took))
            began = time.monotonic()
            status = await self._servicer.GetStatus(types_pb2.GetStatusRequest(tenant=ALL_TENANTS), None)
            now = time.perf_counter()
            requests = [*ranks.judge(status.sources, now), *emptied.judge(status.sources, now)]
            self._blind, self._no_events = ranks.blind, ranks.no_events
            took = time.monotonic() - began
            for request in requests:
                try:
                    await self._servicer.RecordRouting(request, None)
                except KvscoutError as error:
                    log.debug("what workers' requests show was not recorded: %s", error)
