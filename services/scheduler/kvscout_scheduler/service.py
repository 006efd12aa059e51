"""The scheduler's parts, put together: decisions, replicas and what runs beside the server."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

from kvscout_common.errors import ConfigError, InvalidArgument
from kvscout_common.process.ticks import sleep_to_tick
from kvscout_common.registry.backends import Backends, Task
from kvscout_scheduler.config import SchedulerConfig
from kvscout_scheduler.load.workers import MAX_ENDS
from kvscout_scheduler.replicas.replication import Replication
from kvscout_scheduler.rpc.metrics import SchedulerCollector
from kvscout_scheduler.rpc.operations import RemoteOperations
from kvscout_scheduler.rpc.servicer import SchedulerServicer
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.scraper import EngineScraper

if TYPE_CHECKING:
    from kvscout_scheduler.replicas.replicas import Replicas

IDLE_EXPIRY_SECONDS = 1.0
"""Interval of looking for what is overdue while nothing is booked: shorter than any lease."""


class SchedulerService:
    """A scheduler over the workers of its process.

    Args:
        config: Checked.
        backends: The workers, and NATS; their owner runs and closes them.

    Raises:
        ConfigError: The policy is unknown.
    """

    def __init__(self, config: SchedulerConfig, backends: Backends) -> None:
        registry = backends.registry
        try:
            self.scheduler = Scheduler(
                config.settings, clock=time.monotonic, rng=random.Random(config.seed), limits=registry.limits
            )
        except ConfigError:
            raise
        except InvalidArgument as error:
            raise ConfigError(error.message, field="router_mode") from error
        registry.listen(self.scheduler.workers)
        self.replicas: Replicas | None = None
        """None = bookings are not shared."""
        if config.replica_id and backends.link is not None:
            from kvscout_scheduler.replicas.replicas import Replicas

            replication = Replication(self.scheduler, config.replica_id)
            registry.listen(replication.ownership)
            self.replicas = Replicas(self.scheduler, replication, backends.link)
        self.servicer = SchedulerServicer(self.scheduler, registry, backends, self.replicas)
        self.collector = SchedulerCollector(self.scheduler, self.replicas)
        self._expiry_seconds = config.settings.expiry_seconds
        self._backends = backends
        self._scraper = (
            EngineScraper(self.scheduler, registry, config.scrape_seconds) if config.scrape_seconds else None
        )

    @property
    def remote_operations(self) -> RemoteOperations | None:
        """Return operations on bookings of other replicas; None = there are none."""
        return self.replicas.forwarding if self.replicas is not None else None

    def tasks(self) -> dict[str, Task]:
        """Return what runs beside the server, by name."""
        tasks: dict[str, Task] = {"booking-leases": self._expire}
        if self.replicas is not None:
            tasks["replicas"] = self.replicas.link.run
        if self._scraper is not None:
            tasks["engine-metrics"] = self._scraper.run
        return tasks

    async def _expire(self) -> None:
        while True:
            ended = self.scheduler.expire()
            if ended >= MAX_ENDS:
                await asyncio.sleep(0)  # other calls are served between two slices of many ends
            else:
                await sleep_to_tick(self._expiry_seconds if len(self.scheduler.bookings) else IDLE_EXPIRY_SECONDS)

    async def warm(self) -> None:
        """Wait until workers and replicas are known, in bounded time."""
        await self._backends.warm()
        if self.replicas is not None:
            await self.replicas.link.join()

    async def drain(self) -> None:
        """Refuse new requests, and send owners and replicas away."""
        self.scheduler.drain()
        await self.servicer.drain_streams()
        if self.replicas is not None:
            await self.replicas.link.leave()
