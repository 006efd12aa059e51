"""Target of the worker rpcs of a service: its own registry, or one that services share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvscout_common.registry.registry import Registry
from kvscout_common.worker import WorkerSpec


class Registrar(Protocol):
    """Changes registrations. When a call returns, the registry of this service shows the change."""

    async def register(self, spec: WorkerSpec, lease_seconds: int) -> bool:
        """Add or replace a worker; return whether it is new. See `Registry.register`."""

    async def update(self, spec: WorkerSpec) -> None:
        """Replace the registration of a known worker; its lease and source stay. See `Registry.update`."""

    async def set_draining(self, tenant: str, worker_id: str, draining: bool) -> None:
        """Start or end draining. See `Registry.set_draining`."""

    async def keep_alive(self, tenant: str, worker_ids: Iterable[str]) -> list[str]:
        """Renew leases; return the ids that are not registered. See `Registry.keep_alive`."""

    async def remove(self, tenant: str, worker_id: str) -> None:
        """Remove a worker. See `Registry.remove`."""


class OwnRegistrar:
    """Changes the registry of this service alone.

    Args:
        registry: What is changed.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def register(self, spec: WorkerSpec, lease_seconds: int) -> bool:
        """See `Registrar.register`."""
        return self._registry.register(spec, lease_seconds=lease_seconds)

    async def update(self, spec: WorkerSpec) -> None:
        """See `Registrar.update`."""
        self._registry.update(spec)

    async def set_draining(self, tenant: str, worker_id: str, draining: bool) -> None:
        """See `Registrar.set_draining`."""
        self._registry.set_draining(tenant, worker_id, draining)

    async def keep_alive(self, tenant: str, worker_ids: Iterable[str]) -> list[str]:
        """See `Registrar.keep_alive`."""
        return self._registry.keep_alive(tenant, worker_ids)

    async def remove(self, tenant: str, worker_id: str) -> None:
        """See `Registrar.remove`."""
        self._registry.remove(tenant, worker_id)
