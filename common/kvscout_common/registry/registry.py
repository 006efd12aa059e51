"""The worker registry: who is registered, where the registration comes from, and when it ends.

Backends (RPCs, a watched YAML file, a bucket in NATS, DNS, Kubernetes) write into one `Registry`; services listen to
it. It does no I/O: the clock is passed in, and whoever owns it calls `expire` regularly.

Invariants
1. A worker is one entry, named by (tenant, worker_id), whatever its source.
2. Listeners get `added` before anything else of a worker and `removed` last, each exactly once an entry.
3. An entry from the file is changed and removed by the file alone; it wins over every other one of the same name. So
   does one from Kubernetes, except over the file's, and one from DNS, except over both (`DECLARED`).
4. What an engine reported of itself (`complete`) fills in what its registration leaves open, for as long as that
stands:
   listeners see the completed worker, and `Entry.registered` is what was registered.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvscout_common.errors import FailedPrecondition, NotFound
from kvscout_common.identity.tenant_limits import Limit, TenantLimits
from kvscout_common.known_names import or_known
from kvscout_common.registry.engine_facts import EngineFacts
from kvscout_common.worker import ALL_TENANTS, WorkerSpec

log = logging.getLogger("kvscout.registry")


class WorkerName(NamedTuple):
    """Identity of a registration."""

    tenant: str
    worker_id: str


class Source(StrEnum):
    """Source of a registration."""

    RPC = "rpc"
    FILE = "file"
    NATS = "nats"
    """The key-value bucket that services share."""
    DNS = "dns"
    KUBERNETES = "kubernetes"
    PEER = "peer"
    """Another service knows it: a gateway learns it from its indexers and schedulers, and passes it on to others."""


DECLARED = {Source.FILE: "the workers file", Source.KUBERNETES: "Kubernetes", Source.DNS: "DNS"}
"""Sources that alone change and remove what comes from them; of one name, that of the first counts."""
_RANK = {source: rank for rank, source in enumerate(DECLARED)}


@dataclass(frozen=True, slots=True)
class Entry:
    """One registration."""

    spec: WorkerSpec
    """The worker as it is known: as registered, completed with what its engine reported."""
    source: Source
    registered: WorkerSpec
    reported: WorkerSpec | None = None
    """Last declaration by one of `DECLARED`: `registered` but for the draining that was requested since."""
    lease_seconds: int = 0
    """0 = no lease."""
    expires_at: float | None = None
    """On the registry's clock; None = never."""

    @property
    def name(self) -> WorkerName:
        """Return what identifies it."""
        return WorkerName(self.spec.tenant, self.spec.worker_id)


class RegistryListener(Protocol):
    """Receives every change, synchronously and in order; must not block or raise."""

    def worker_added(self, spec: WorkerSpec) -> None:
        """Handle a new worker."""

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        """Handle a changed registration."""

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        """Handle a worker that is gone: "removed", "lease", or the source that no longer has it."""


def any_worker(spec: WorkerSpec) -> None:
    """Take every registration."""


class Registry:
    """The registered workers. Not thread-safe: one event loop owns it.

    Args:
        clock: Monotonic seconds.
        admit: Raises `InvalidArgument`, naming the field, for a valid registration that this service does not take.
            Whatever brings registrations asks it first, and reports the answer in its own way.
    """

    def __init__(self, clock: Callable[[], float], admit: Callable[[WorkerSpec], None] = any_worker) -> None:
        self.admit = admit
        self.limits = TenantLimits()
        """Tenant limits of the service that has this registry."""
        self.limits.use[Limit.WORKERS] = lambda: Counter(name.tenant for name in self._entries)
        self._clock = clock
        self._entries: dict[WorkerName, Entry] = {}
        self._names: list[WorkerName] | None = None
        """Names of `_entries`, sorted; None = not since one came or went."""
        self._facts: dict[WorkerName, EngineFacts] = {}
        self._listeners: list[RegistryListener] = []
        self._salt = secrets.token_hex(4)
        self._changes = 0

    @property
    def version(self) -> str:
        """Return the name of this state of the registry, another one after each change; renewals of leases are none."""
        return f"{self._salt}-{self._changes}"

    def listen(self, listener: RegistryListener) -> None:
        """Add a listener; workers that exist are reported to it immediately."""
        self._listeners.append(listener)
        for entry in self._entries.values():
            listener.worker_added(entry.spec)

    def get(self, tenant: str, worker_id: str) -> Entry:
        """Return an entry.

        Raises:
            NotFound: If no such worker is registered.
        """
        entry = self.find(WorkerName(tenant, worker_id))
        if entry is None:
            known = (one.spec.worker_id for one in self.entries(tenant))
            raise NotFound(f"no worker {worker_id!r} in tenant {tenant!r}{or_known(worker_id, known)}")
        return entry

    def find(self, name: WorkerName) -> Entry | None:
        """Return an entry, or None if no such worker is registered."""
        return self._entries.get(name)

    def entries(self, tenant: str = ALL_TENANTS, model: str = "") -> list[Entry]:
        """Return the entries of a tenant ("*" = all) and model ("" = all), ordered by tenant and worker id."""
        if self._names is None:
            self._names = sorted(self._entries)
        every = [self._entries[name] for name in self._names]
        if tenant == ALL_TENANTS and not model:
            return every
        return [each for each in every if tenant in (ALL_TENANTS, each.spec.tenant) and model in ("", each.spec.model)]

    def require_room(self, name: WorkerName) -> None:
        """Raise unless a tenant may register a worker: it is registered, or there is room for one more.

        Raises:
            ResourceExhausted: The tenant has all the workers that it may have.
        """
        if name not in self._entries and self.limits.of(name.tenant, Limit.WORKERS) is not None:
            used = sum(other.tenant == name.tenant for other in self._entries)
            self.limits.require(Limit.WORKERS, name.tenant, used)

    def has(self, name: WorkerName) -> bool:
        """Return whether a worker is registered."""
        return name in self._entries

    def lease_remaining(self, entry: Entry) -> float | None:
        """Return seconds until an entry's lease ends; None = it has none."""
        return None if entry.expires_at is None else max(0.0, entry.expires_at - self._clock())

    def register(self, spec: WorkerSpec, *, source: Source = Source.RPC, lease_seconds: int = 0) -> bool:
        """Add or replace a worker.

        Args:
            spec: A validated registration.
            source: Where it comes from.
            lease_seconds: Ends without `keep_alive` for this long; 0 = never.

        Returns:
            True if it is new.

        Raises:
            FailedPrecondition: If one of `DECLARED` has a worker of this name and is not `source`.
        """
        old = self._entries.get(WorkerName(spec.tenant, spec.worker_id))
        if old is not None:
            require_writable(old, source)
        expires_at = self._clock() + lease_seconds if lease_seconds else None
        self._put(Entry(spec, source, spec, None, lease_seconds, expires_at))
        return old is None

    def learn(self, spec: WorkerSpec, lease_seconds: int) -> bool:
        """Add or replace a worker that another service knows, unless it was registered here.

        Args:
            spec: A validated registration.
            lease_seconds: As for `register`.

        Returns:
            True if it is new.
        """
        old = self._entries.get(WorkerName(spec.tenant, spec.worker_id))
        if old is None or old.source is Source.PEER:
            self.register(spec, source=Source.PEER, lease_seconds=lease_seconds)
        return old is None

    def update(self, spec: WorkerSpec) -> None:
        """Replace the registration of a known worker; its lease and source stay.

        Raises:
            NotFound: If it is not registered.
            FailedPrecondition: If it comes from one of `DECLARED`.
        """
        entry = self.get(spec.tenant, spec.worker_id)
        require_writable(entry, Source.RPC)
        self._put(replace(entry, registered=spec))

    def complete(self, tenant: str, worker_id: str, facts: EngineFacts) -> None:
        """Fill in what a registration leaves open; kept until the worker is removed or its engine another one.

        Raises:
            NotFound: If it is not registered.
        """
        entry = self.get(tenant, worker_id)
        self._facts[entry.name] = facts
        self._put(entry)

    def set_draining(self, tenant: str, worker_id: str, draining: bool) -> None:
        """Start or end draining; allowed for entries of `DECLARED` too, until they change there.

        Raises:
            NotFound: If it is not registered.
        """
        entry = self.get(tenant, worker_id)
        self._put(replace(entry, registered=entry.registered.with_draining(draining)))

    def keep_alive(self, tenant: str, worker_ids: Iterable[str]) -> list[str]:
        """Renew leases; return the ids that are not registered."""
        unknown = []
        for worker_id in worker_ids:
            entry = self._entries.get(WorkerName(tenant, worker_id))
            if entry is None:
                unknown.append(worker_id)
            elif entry.lease_seconds:
                self._entries[entry.name] = replace(entry, expires_at=self._clock() + entry.lease_seconds)
        return unknown

    def remove(self, tenant: str, worker_id: str, *, source: Source = Source.RPC, lease_ended: bool = False) -> None:
        """Remove a worker; listeners learn whether somebody took it out, or the source saw its lease end.

        Raises:
            NotFound: If it is not registered.
            FailedPrecondition: If it comes from one of `DECLARED` that is not `source`.
        """
        entry = self.get(tenant, worker_id)
        require_writable(entry, source)
        self._drop(entry, "lease" if lease_ended else "removed" if source is Source.RPC else str(source))

    def restart_leases(self, source: Source) -> None:
        """Give every lease of a source its full length again, as no renewal could be received for a while."""
        for entry in self._entries.values():
            if entry.source is source and entry.lease_seconds:
                self._entries[entry.name] = replace(entry, expires_at=self._clock() + entry.lease_seconds)

    def expire(self) -> list[WorkerSpec]:
        """Remove every worker whose lease has ended and return them; those of the bucket are left to
        `expire_shared`."""
        now = self._clock()
        return self._expire(lambda entry: entry.source is not Source.NATS, now)

    def expire_shared(self, by: float) -> list[WorkerSpec]:
        """Remove every worker of the bucket whose lease has ended by a time, and return them.

        Args:
            by: On the registry's clock; every renewal made before must have been received.
        """
        return self._expire(lambda entry: entry.source is Source.NATS, by)

    def _expire(self, concerned: Callable[[Entry], bool], by: float) -> list[WorkerSpec]:
        ended = [e for e in self._entries.values() if e.expires_at is not None and e.expires_at <= by and concerned(e)]
        for entry in ended:
            log.warning("lease of worker %s expired", entry.spec.worker_id)
            self._drop(entry, "lease")
        return [entry.spec for entry in ended]

    def replace_source(self, source: Source, specs: Iterable[WorkerSpec]) -> None:
        """Make `specs` the whole of what a source contributes: add, update, remove.

        Entries of other sources stay, except that the ones of `DECLARED` take over entries of the same name from all
        that come after them.
        """
        wanted = {WorkerName(spec.tenant, spec.worker_id): spec for spec in specs}
        self.remove_from_source(source, [name for name in self.names_of_source(source) if name not in wanted])
        self.add_to_source(source, wanted.values())

    def names_of_source(self, source: Source) -> list[WorkerName]:
        """Return the names of all that a source contributes, in the order in which they came."""
        return [name for name, entry in self._entries.items() if entry.source is source]

    def remove_from_source(self, source: Source, names: Iterable[WorkerName]) -> None:
        """Remove some of what a source contributes; names of which another source has the entry stay."""
        for name in names:
            entry = self._entries.get(name)
            if entry is not None and entry.source is source:
                self._drop(entry, str(source))

    def add_to_source(self, source: Source, specs: Iterable[WorkerSpec]) -> None:
        """Add and update some of what a source contributes, by the rules of `replace_source`."""
        for spec in specs:
            old = self._entries.get(WorkerName(spec.tenant, spec.worker_id))
            last = None if old is None else old.reported or old.registered
            if old is not None and old.source is source and not old.lease_seconds and last == spec:
                continue
            if old is None or old.source is source or _takes_over(source, old.source):
                self._put(Entry(spec, source, spec, spec if source in DECLARED else None))

    def _put(self, entry: Entry) -> None:
        self._changes += 1
        old = self._entries.get(entry.name)
        facts = self._facts.get(entry.name)
        if facts is not None and facts.http_endpoint != entry.registered.http_endpoint:
            facts = None
            del self._facts[entry.name]
        spec = entry.registered if facts is None else facts.complete(entry.registered)
        entry = replace(entry, spec=spec)
        self._entries[entry.name] = entry
        if old is None:
            self._names = None
            for listener in self._listeners:
                listener.worker_added(entry.spec)
        elif old.spec != entry.spec:
            for listener in self._listeners:
                listener.worker_updated(old.spec, entry.spec)

    def _drop(self, entry: Entry, reason: str) -> None:
        self._changes += 1
        del self._entries[entry.name]
        self._names = None
        self._facts.pop(entry.name, None)
        for listener in self._listeners:
            listener.worker_removed(entry.spec, reason)


def require_writable(entry: Entry, source: Source) -> None:
    """Raise unless a source may change an entry.

    Raises:
        FailedPrecondition: If it comes from one of `DECLARED` that is not `source`.
    """
    if entry.source in DECLARED and entry.source is not source and not _takes_over(source, entry.source):
        where = DECLARED[entry.source]
        raise FailedPrecondition(f"worker {entry.spec.worker_id!r} comes from {where}: change it there")


def _takes_over(source: Source, other: Source) -> bool:
    """Return whether an entry of one source counts where another has one of the same name."""
    return source in DECLARED and _RANK[source] < _RANK.get(other, len(_RANK))
