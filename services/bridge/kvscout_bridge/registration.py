"""Registers bridged engines in NATS and keeps their leases, for as long as the bridge runs."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from kvscout_bridge.config import BridgeConfig
from kvscout_common.errors import KvscoutError
from kvscout_common.nats_link import NatsLink
from kvscout_common.registry import WorkerName
from kvscout_common.telemetry import RateLimitedLog
from kvscout_common.worker import WorkerSpec
from kvscout_common.worker_bucket import Renewal, Stored, WorkerBucket

log = logging.getLogger("kvscout.bridge")

RENEWALS_A_LEASE = 3
RETRY_SECONDS = 0.5


class Registrations:
    """The registrations of a bridge's workers, as others see them: events come over NATS, through this bridge.

    A registration that somebody removed stays removed until the bridge starts anew. When the bridge stops, leases end
    by themselves, so that a bridge that is replaced loses nobody its blocks.

    Args:
        link: The connection.
        config: Transport, lease and address.
    """

    def __init__(self, link: NatsLink, config: BridgeConfig) -> None:
        self.problem = ""
        """Why a registration is not in effect; "" = all are."""
        self.bridge_endpoint = config.advertised
        """Where others reach this bridge's gRPC server."""
        self._config = config
        self._link = link
        self._bucket = WorkerBucket(link)
        self._wanted: dict[WorkerName, WorkerSpec] = {}
        self._stored: dict[WorkerName, Stored | None] = {}
        """What was written; None: somebody removed it."""
        self._ended: list[WorkerName] = []
        self._due = asyncio.Event()
        self._warnings = RateLimitedLog(log)
        link.on_connected(self._connected)

    def add(self, spec: WorkerSpec) -> None:
        """Registers a worker, or replaces its registration."""
        name = WorkerName(spec.tenant, spec.worker_id)
        self._wanted[name] = spec
        self._stored.pop(name, None)
        self._due.set()

    def remove(self, spec: WorkerSpec) -> None:
        """Removes a registration."""
        name = WorkerName(spec.tenant, spec.worker_id)
        self._wanted.pop(name, None)
        if self._stored.pop(name, None) is not None:
            self._ended.append(name)
            self._due.set()

    async def run(self) -> None:
        """Keeps them for ever."""
        while True:
            wait = self._config.lease_seconds / RENEWALS_A_LEASE
            self._due.clear()
            try:
                if self._link.connected:
                    await self._keep()
                    self.problem = ""
            except KvscoutError as error:
                self.problem = f"the engine is not registered: {error}"
                self._warnings.warning("registration", "%s; trying again", self.problem)
                wait = RETRY_SECONDS
            try:
                async with asyncio.timeout(wait):
                    await self._due.wait()
            except TimeoutError:
                pass

    async def _connected(self) -> None:
        self._due.set()

    async def _keep(self) -> None:
        while self._ended:
            await self._bucket.remove(self._ended[0])
            self._ended.pop(0)
        for name, spec in list(self._wanted.items()):
            if name not in self._stored:
                await self._write(name, spec)
                continue
            known = self._stored[name]
            if known is None:
                continue
            renewed = await self._bucket.change(name, known)
            if isinstance(renewed, Stored):
                self._stored[name] = renewed
            elif renewed is Renewal.LOST:
                log.warning("the lease of worker %s was lost; it is registered again", name.worker_id)
                await self._write(name, spec)
            else:
                log.warning("somebody removed worker %s: it is not registered any more", name.worker_id)
                self._stored[name] = None

    async def _write(self, name: WorkerName, spec: WorkerSpec) -> None:
        advertised = replace(spec, transport=self._config.transport, bridge_endpoint=self.bridge_endpoint)
        stored = Stored(advertised, self._config.lease_seconds)
        revision = await self._bucket.put(stored)
        self._stored[name] = replace(stored, revision=revision)
        log.info("worker %s is registered", name.worker_id)
