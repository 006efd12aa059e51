"""Asks engines for their own metrics, every few seconds, all at once but bounded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial

from kvscout_common.engine_http import asking_engines, parsed, read_page
from kvscout_common.errors import KvscoutError, Unavailable
from kvscout_common.registry import Registry
from kvscout_common.telemetry import RateLimitedLog
from kvscout_common.transport.http import HttpClient
from kvscout_common.worker import EngineKind, WorkerRank, WorkerSpec
from kvscout_scheduler.engine_metrics import NO_METRICS, read_engine_metrics
from kvscout_scheduler.scheduler import Scheduler

log = logging.getLogger("kvscout.scheduler")

SCRAPES_AT_ONCE = 32
TIMEOUT_SECONDS = 2.0
SCRAPED = frozenset({EngineKind.VLLM, EngineKind.SGLANG, EngineKind.MOCK})


class EngineScraper:
    """A task that keeps the scheduler's engine metrics fresh.

    What an engine said is forgotten when it cannot be asked any more: an old reading is no reading.

    Args:
        scheduler: Is told.
        registry: Whom to ask.
        interval_seconds: Between two rounds.
    """

    def __init__(self, scheduler: Scheduler, registry: Registry, interval_seconds: float) -> None:
        self._scheduler = scheduler
        self._registry = registry
        self._interval_seconds = interval_seconds
        self._warnings = RateLimitedLog(log)
        self._slots = asyncio.Semaphore(SCRAPES_AT_ONCE)
        self._told: set[tuple[str, WorkerRank]] = set()
        self.failures = 0
        """Scrapes that brought nothing, since start."""

    async def run(self) -> None:
        """Asks until cancelled."""
        async with asking_engines() as http:
            while True:
                await self.round(http, [entry.spec for entry in self._registry.entries()])
                await asyncio.sleep(self._interval_seconds)

    async def round(self, http: HttpClient, specs: Iterable[WorkerSpec]) -> None:
        """Asks every engine once."""
        asked = [spec for spec in specs if spec.http_endpoint and spec.engine in SCRAPED]
        await asyncio.gather(*(self._scrape(http, spec) for spec in asked))

    async def _scrape(self, http: HttpClient, spec: WorkerSpec) -> None:
        ranks = [rank.dp_rank for rank in spec.ranks]
        async with self._slots:
            try:
                url = spec.http_endpoint.rstrip("/") + "/metrics"
                page = await read_page(http, url, timeout_seconds=TIMEOUT_SECONDS)
                if page is None:
                    raise Unavailable(f"there is no {url}")
                readings = await parsed(page, partial(read_engine_metrics, ranks=ranks))
            except (Unavailable, ValueError) as error:
                self.failures += 1
                self._warnings.warning(
                    (spec.tenant, spec.worker_id), "worker %s does not tell its metrics: %s", spec.worker_id, error
                )
                readings = {}
        for rank in spec.ranks:
            reading = readings.get(rank.dp_rank)
            name = (spec.tenant, rank)
            if reading is None and name not in self._told:
                continue
            (self._told.discard if reading is None else self._told.add)(name)
            try:
                self._scheduler.report_metrics(spec.tenant, rank, reading or NO_METRICS)
            except KvscoutError:
                # It was removed while it was asked.
                self._told.discard(name)
