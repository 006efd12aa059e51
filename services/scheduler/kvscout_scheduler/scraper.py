"""Asks engines for their own metrics, every few seconds, all at once but bounded.

Until a pool has observed a request, what its engines say of requests before is what it begins with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from kvscout_common.errors import KvscoutError, Unavailable
from kvscout_common.http.engine_http import parsed, read_page
from kvscout_common.http.factory import http_client
from kvscout_common.http.http import HttpClient
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.registry.registry import Registry
from kvscout_common.worker import EngineKind, WorkerRank, WorkerSpec
from kvscout_scheduler.estimates.engine_metrics import NO_METRICS, read_engine_metrics
from kvscout_scheduler.estimates.engine_rates import NOTHING, RateSums, rates_by, read_rate_sums
from kvscout_scheduler.load.workers import pool_of
from kvscout_scheduler.values.reservation import PoolId

if TYPE_CHECKING:
    from kvscout_scheduler.scheduler import Scheduler

log = logging.getLogger("kvscout.scheduler")

CONCURRENT_SCRAPES = 32
TIMEOUT_SECONDS = 2.0
SCRAPED = frozenset({EngineKind.VLLM, EngineKind.SGLANG, EngineKind.MOCK})


class EngineScraper:
    """A task that keeps the scheduler's engine metrics fresh.

    The metrics of an engine are forgotten when it cannot be scraped any more: an old reading is no reading.

    Args:
        scheduler: Receives the metrics.
        registry: Engines to scrape.
        interval_seconds: Between two rounds.
    """

    def __init__(self, scheduler: Scheduler, registry: Registry, interval_seconds: float) -> None:
        self._scheduler = scheduler
        self._registry = registry
        self._interval_seconds = interval_seconds
        self._warnings = RateLimitedLog(log)
        self._slots = asyncio.Semaphore(CONCURRENT_SCRAPES)
        self._reported: set[tuple[str, WorkerRank]] = set()
        self._sums: dict[tuple[str, str], RateSums] = {}
        """Sums of each worker at the last round, of pools that have observed nothing."""
        self.failures = 0
        """Scrapes that brought nothing, since start."""

    async def run(self) -> None:
        """Scrape until cancelled."""
        async with http_client() as http:
            while True:
                await self.round(http, [entry.spec for entry in self._registry.entries()])
                await asyncio.sleep(self._interval_seconds)

    async def round(self, http: HttpClient, specs: Iterable[WorkerSpec]) -> None:
        """Scrape every engine once."""
        scraped = [spec for spec in specs if spec.http_endpoint and spec.engine in SCRAPED]
        totals = await asyncio.gather(*(self._scrape(http, spec) for spec in scraped))
        pools: dict[PoolId, RateSums] = {}
        sums: dict[tuple[str, str], RateSums] = {}
        for spec, total in zip(scraped, totals, strict=True):
            if total is not None:
                name = (spec.tenant, spec.worker_id)
                sums[name] = total
                # What it did lately, if that is anything.
                lately = total.since(self._sums.get(name, NOTHING))
                pools[pool_of(spec)] = pools.get(pool_of(spec), NOTHING).plus(lately)
        self._sums = sums
        for pool in self._scheduler.workers:
            found = pools.get(pool.id)
            if found is not None and pool.times.is_belief:
                rates = rates_by(found, pool.times.rates)
                if rates is not None:
                    pool.times.believe(rates)

    def _begins(self, spec: WorkerSpec) -> bool:
        """Return whether its pool has observed nothing."""
        try:
            pool, _ = self._scheduler.workers.slot(spec.tenant, spec.ranks[0])
        except KvscoutError:
            return False
        return pool.times.is_belief

    async def _scrape(self, http: HttpClient, spec: WorkerSpec) -> RateSums | None:
        """Scrape an engine, and return its sums if its pool has observed nothing."""
        ranks = [rank.dp_rank for rank in spec.ranks]
        sums = None
        async with self._slots:
            try:
                url = spec.http_endpoint.rstrip("/") + "/metrics"
                page = await read_page(http, url, timeout_seconds=TIMEOUT_SECONDS)
                if page is None:
                    raise Unavailable(f"there is no {url}")
                readings = await parsed(page, partial(read_engine_metrics, ranks=ranks))
                if self._begins(spec):
                    sums = await parsed(page, _rate_sums)
            except (Unavailable, ValueError) as error:
                self.failures += 1
                self._warnings.warning(
                    (spec.tenant, spec.worker_id), "metrics of worker %s cannot be read: %s", spec.worker_id, error
                )
                readings = {}
        for rank in spec.ranks:
            reading = readings.get(rank.dp_rank)
            name = (spec.tenant, rank)
            if reading is None and name not in self._reported:
                continue
            (self._reported.discard if reading is None else self._reported.add)(name)
            try:
                self._scheduler.report_metrics(spec.tenant, rank, reading or NO_METRICS)
            except KvscoutError:
                # It was removed meanwhile.
                self._reported.discard(name)
        return sums


def _rate_sums(page: bytes) -> RateSums | None:
    """Return the sums of a page; None where they cannot be read: there is a first estimate without them."""
    try:
        return read_rate_sums(page)
    except ValueError:
        return None
