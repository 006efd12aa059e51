"""Registers bridged engines in NATS and keeps their leases, for as long as the bridge runs."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from kvscout_bridge.config import BridgeConfig
from kvscout_common.errors import Unavailable
from kvscout_common.nats.link import NatsLink
from kvscout_common.registry.registry import WorkerName
from kvscout_common.registry.worker_lease import WorkerLease
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.worker import WorkerSpec

log = logging.getLogger("kvscout.bridge")


class Registrations:
    """The registrations of a bridge's workers, as others see them: events come over NATS, through this bridge.

    When the bridge stops, leases end by themselves, so that one that is replaced loses nobody its blocks.

    Args:
        link: The connection.
        config: Transport, lease and address.
    """

    def __init__(self, link: NatsLink, config: BridgeConfig) -> None:
        self._link = link
        self._config = config
        self._bridge_endpoint = config.advertised
        self._leases: dict[WorkerName, WorkerLease] = {}
        self._changed = asyncio.Event()
        self._connected = asyncio.Event()
        link.on_connected(self._on_connected)

    def warnings(self) -> list[Warned]:
        """Return what an operator should know, one sentence a worker."""
        return [
            TenantWarning(name.tenant, f"worker {name.worker_id} is not registered: {lease.problem}")
            for name, lease in sorted(self._leases.items())
            if lease.problem
        ]

    def reached_at(self, endpoint: str) -> None:
        """Have the registrations say where the bridge's gRPC server is."""
        self._bridge_endpoint = endpoint
        for lease in self._leases.values():
            lease.update(replace(lease.spec, bridge_endpoint=endpoint))

    def add(self, spec: WorkerSpec) -> None:
        """Register a worker, or replace its registration."""
        advertised = replace(spec, transport=self._config.transport, bridge_endpoint=self._bridge_endpoint)
        name = WorkerName(spec.tenant, spec.worker_id)
        lease = self._leases.get(name)
        if lease is not None:
            lease.update(advertised)
        else:
            self._leases[name] = WorkerLease(self._link, advertised, lease_seconds=self._config.lease_seconds)
            self._changed.set()

    def remove(self, spec: WorkerSpec) -> None:
        """Remove a registration."""
        if self._leases.pop(WorkerName(spec.tenant, spec.worker_id), None) is not None:
            self._changed.set()

    async def run(self) -> None:
        """Keep them for ever."""
        await self._connected.wait()
        kept: dict[WorkerName, tuple[WorkerLease, asyncio.Task[None]]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for name, (lease, task) in list(kept.items()):
                    if self._leases.get(name) is not lease:
                        del kept[name]
                        task.cancel()
                        await self._end(lease)
                for name, lease in self._leases.items():
                    if name not in kept:
                        kept[name] = lease, group.create_task(lease.run(), name=f"lease {name.worker_id}")
                await self._changed.wait()

    async def _on_connected(self) -> None:
        self._connected.set()

    @staticmethod
    async def _end(lease: WorkerLease) -> None:
        try:
            await lease.remove()
        except Unavailable as error:
            log.warning("the lease of worker %s was not removed and will expire: %s", lease.name.worker_id, error)
