"""Gateway, indexer and scheduler over one registry of workers, put together as one app."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import grpc
from prometheus_client import CollectorRegistry

from kvscout_common.registry.backends import Backends, Task
from kvscout_common.registry.registry import any_worker
from kvscout_common.rpc.serving import App
from kvscout_gateway.gateway import Gateway
from kvscout_gateway.main import gateway_app
from kvscout_indexer.indexer import Indexer
from kvscout_indexer.rpc.metrics import IndexerCollector
from kvscout_indexer.rpc.servicer import SERVICE as INDEXER
from kvscout_indexer.rpc.servicer import IndexerServicer
from kvscout_scheduler.rpc.servicer import SERVICE as SCHEDULER
from kvscout_scheduler.service import SchedulerService
from kvscout_serve.config import ServeConfig
from kvscout_serve.embedded_indexer import EmbeddedIndexer
from kvscout_serve.embedded_scheduler import EmbeddedScheduler


class Process:
    """The services of one process.

    Args:
        config: Checked.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        admit = config.indexer.admit if config.indexer is not None else any_worker
        self._backends = backends = Backends.of_process("kvscout-serve", config.server, config.nats, admit)
        self._metrics = CollectorRegistry()
        self._services: list[tuple[str, Callable[[grpc.aio.Server], None]]] = []
        # Listens before the gateway does: a worker that requests may be sent to is known to all of them.
        self._indexer: Indexer | None = None
        self._scheduler: SchedulerService | None = None
        self.indexer: EmbeddedIndexer | None = None
        self.scheduler: EmbeddedScheduler | None = None
        if config.indexer is not None:
            self._indexer = Indexer(config.indexer, backends)
            indexer_servicer = IndexerServicer(self._indexer, self._indexer.queries)
            self.indexer = EmbeddedIndexer(self._indexer, indexer_servicer)
            self._services.append((INDEXER, indexer_servicer.add_to))
            self._metrics.register(IndexerCollector(self._indexer))
        if config.scheduler is not None:
            self._scheduler = SchedulerService(config.scheduler, backends)
            self.scheduler = EmbeddedScheduler(self._scheduler, queue_wait_seconds=config.gateway.queue_wait_seconds)
            self._services.append((SCHEDULER, self._scheduler.servicer.add_to))
            self._metrics.register(self._scheduler.collector)
        self.gateway = Gateway(config.gateway, self._metrics, backends, indexer=self.indexer, scheduler=self.scheduler)

    def app(self) -> App:
        """Return the process as an app to serve."""
        app = gateway_app(self._config.gateway, self.gateway, self._metrics)
        return replace(
            app,
            name="serve",
            services=[*app.services, *self._services],
            bound=self._bound,
            tasks={**self._backends.tasks, **app.tasks, **self._tasks()},
            warm=self._warm,
            drain=self._drain,
            close=self._close,
        )

    def _bound(self, port: int) -> None:
        self.gateway.bound(port)
        host = self._config.server.host
        for upstream in (self.indexer, self.scheduler):
            if upstream is not None:
                upstream.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _tasks(self) -> dict[str, Task]:
        tasks: dict[str, Task] = {}
        for service in (self._indexer, self._scheduler):
            if service is not None:
                tasks |= service.tasks()
        if self.indexer is not None:
            indexer, seen = self.indexer, self.gateway.observations
            tasks["routing-decisions"] = indexer.record_decisions
            tasks["indexer-check"] = lambda: indexer.check(seen.eventful, seen.reports_cached_tokens, seen.caches)
        return tasks

    async def _warm(self) -> None:
        for service in (self._indexer, self._scheduler, self.gateway):
            if service is not None:
                await service.warm()

    async def _drain(self) -> None:
        # The gateway first: its last requests are freed at a scheduler that still takes them.
        for service in (self.gateway, self._scheduler, self._indexer):
            if service is not None:
                await service.drain()

    async def _close(self) -> None:
        await self.gateway.close()
        if self._indexer is not None:
            await self._indexer.close()
        await self._backends.close()
