"""The worker registry: who is registered, where the registration comes from, and when it ends.

Backends (RPCs, a watched YAML file) write into one `Registry`; services listen to it. It does no I/O: the clock is
passed in, and whoever owns it calls `expire` regularly.

Invariants
1. A worker is one entry, named by (tenant, worker_id), whatever its source.
2. Listeners hear `added` before anything else of a worker and `removed` last, each exactly once an entry.
3. An entry from a file is changed and removed by the file alone; it wins over an RPC registration of the same name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvscout_common.errors import FailedPrecondition, NotFound
from kvscout_common.worker import WorkerSpec

log = logging.getLogger("kvscout.registry")

ALL_TENANTS = "*"


class WorkerName(NamedTuple):
    """What identifies a registration."""

    tenant: str
    worker_id: str


class Source(StrEnum):
    """Where a registration comes from."""

    RPC = "rpc"
    FILE = "file"
    PEER = "peer"
    """Another service knows it (a gateway learns it from its indexers and schedulers)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One registration."""

    spec: WorkerSpec
    source: Source
    lease_seconds: int = 0
    """0 = no lease."""
    expires_at: float | None = None
    """On the registry's clock; None = never."""

    @property
    def name(self) -> WorkerName:
        """What identifies it."""
        return WorkerName(self.spec.tenant, self.spec.worker_id)


class RegistryListener(Protocol):
    """Hears of every change, synchronously and in order; must not block or raise."""

    def worker_added(self, spec: WorkerSpec) -> None:
        """A worker is new."""

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        """A worker's registration changed."""

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        """A worker is gone: "removed", "lease" or "file"."""


class Registry:
    """The registered workers. Not thread-safe: one event loop owns it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[WorkerName, Entry] = {}
        self._listeners: list[RegistryListener] = []

    def listen(self, listener: RegistryListener) -> None:
        """Adds a listener; it hears of the workers that are there already at once."""
        self._listeners.append(listener)
        for entry in self._entries.values():
            listener.worker_added(entry.spec)

    def get(self, tenant: str, worker_id: str) -> Entry:
        """One entry.

        Raises:
            NotFound: If no such worker is registered.
        """
        entry = self._entries.get(WorkerName(tenant, worker_id))
        if entry is None:
            raise NotFound(f"no worker {worker_id!r} in tenant {tenant!r}")
        return entry

    def entries(self, tenant: str = ALL_TENANTS, model: str = "") -> list[Entry]:
        """Entries of a tenant ("*" = all) and model ("" = all), ordered by tenant and worker id."""
        return [
            self._entries[name]
            for name in sorted(self._entries)
            if tenant in (ALL_TENANTS, name.tenant) and model in ("", self._entries[name].spec.model)
        ]

    def lease_remaining(self, entry: Entry) -> float | None:
        """Seconds until an entry's lease ends; None = it has none."""
        return None if entry.expires_at is None else max(0.0, entry.expires_at - self._clock())

    def register(self, spec: WorkerSpec, *, source: Source = Source.RPC, lease_seconds: int = 0) -> bool:
        """Adds or replaces a worker.

        Args:
            spec: A validated registration.
            source: Where it comes from.
            lease_seconds: Ends without `keep_alive` for this long; 0 = never.

        Returns:
            True if it is new.

        Raises:
            FailedPrecondition: If the file has a worker of this name and `source` is not the file.
        """
        old = self._entries.get(WorkerName(spec.tenant, spec.worker_id))
        if old is not None:
            self._require_writable(old, source)
        expires_at = self._clock() + lease_seconds if lease_seconds else None
        self._put(Entry(spec, source, lease_seconds, expires_at))
        return old is None

    def update(self, spec: WorkerSpec) -> None:
        """Replaces the registration of a known worker; its lease and source stay.

        Raises:
            NotFound: If it is not registered.
            FailedPrecondition: If it comes from a file.
        """
        entry = self.get(spec.tenant, spec.worker_id)
        self._require_writable(entry, Source.RPC)
        self._put(replace(entry, spec=spec))

    def set_draining(self, tenant: str, worker_id: str, draining: bool) -> None:
        """Starts or ends draining; allowed for entries of a file too, until the file changes.

        Raises:
            NotFound: If it is not registered.
        """
        entry = self.get(tenant, worker_id)
        self._put(replace(entry, spec=entry.spec.with_draining(draining)))

    def keep_alive(self, tenant: str, worker_ids: Iterable[str]) -> list[str]:
        """Renews leases; returns the ids that are not registered."""
        unknown = []
        for worker_id in worker_ids:
            entry = self._entries.get(WorkerName(tenant, worker_id))
            if entry is None:
                unknown.append(worker_id)
            elif entry.lease_seconds:
                self._entries[entry.name] = replace(entry, expires_at=self._clock() + entry.lease_seconds)
        return unknown

    def remove(self, tenant: str, worker_id: str, *, source: Source = Source.RPC) -> None:
        """Removes a worker.

        Raises:
            NotFound: If it is not registered.
            FailedPrecondition: If it comes from a file and `source` is not the file.
        """
        entry = self.get(tenant, worker_id)
        self._require_writable(entry, source)
        self._drop(entry, "file" if source is Source.FILE else "removed")

    def expire(self) -> list[WorkerSpec]:
        """Removes every worker whose lease has ended; returns them."""
        now = self._clock()
        ended = [e for e in self._entries.values() if e.expires_at is not None and e.expires_at <= now]
        for entry in ended:
            log.warning("lease of worker %s ended", entry.spec.worker_id)
            self._drop(entry, "lease")
        return [entry.spec for entry in ended]

    def replace_source(self, source: Source, specs: Iterable[WorkerSpec]) -> None:
        """Makes `specs` the whole of what a source contributes: adds, updates, removes.

        Entries of other sources stay, except that a file takes over entries of the same name.
        """
        wanted = {WorkerName(spec.tenant, spec.worker_id): spec for spec in specs}
        for entry in [e for e in self._entries.values() if e.source is source and e.name not in wanted]:
            self._drop(entry, str(source))
        for name, spec in wanted.items():
            old = self._entries.get(name)
            if old is None or source is Source.FILE or old.source is source:
                self._put(Entry(spec, source))

    @staticmethod
    def _require_writable(entry: Entry, source: Source) -> None:
        if entry.source is Source.FILE and source is not Source.FILE:
            raise FailedPrecondition(f"worker {entry.spec.worker_id!r} comes from the workers file: change it there")

    def _put(self, entry: Entry) -> None:
        old = self._entries.get(entry.name)
        self._entries[entry.name] = entry
        if old is None:
            for listener in self._listeners:
                listener.worker_added(entry.spec)
        elif old.spec != entry.spec:
            for listener in self._listeners:
                listener.worker_updated(old.spec, entry.spec)

    def _drop(self, entry: Entry, reason: str) -> None:
        del self._entries[entry.name]
        for listener in self._listeners:
            listener.worker_removed(entry.spec, reason)
