"""A registry that services share: each follows the bucket in NATS, and each may write to it.

What is followed is a watch, and once in a while the number of the last value: so a watch that broke, a bucket that was
deleted and a NATS that lost its store are noticed, and all of the bucket is read again.

Leases are timed here, by every follower for itself, because a value that ended sends watchers nothing. A lease ends
only once the server has shown, after that moment, that no renewal was missed. While NATS is away nothing ends: nobody
could have renewed. When it is back every lease runs its full length anew; a worker that died meanwhile goes then. The
same holds for leases that the server ended meanwhile, or lost with its store: their workers stay for one lease more,
and are registered again by whoever renews them. Registrations without a lease have nobody who does that: if the bucket
is a new one, followers put them back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

import nats.errors
from nats.js.api import StreamInfo
from nats.js.kv import KV_DEL, KeyValue

from kvscout_common.errors import InvalidArgument, KvscoutError, NotFound, Unavailable
from kvscout_common.nats.link import NatsLink, end_if_cancelled
from kvscout_common.nats.names import REGISTRY
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.registry.registry import DECLARED, Entry, Registry, Source, WorkerName, require_writable
from kvscout_common.registry.worker_bucket import CALL_SECONDS, Gone, Stored, WorkerBucket, decode
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.worker import ALL_TENANTS, WorkerSpec

log = logging.getLogger("kvscout.registry")

CHECK_SECONDS = 0.5
"""Seconds between two reads of the server's last value: leases end up to two such rounds late."""
LAG_SECONDS = 5.0
"""A watch that has not brought by then what the server has is broken."""
RETRY_SECONDS = 0.5
READ_SECONDS = 30.0
"""Longest wait for all of the bucket."""
IDLE_SECONDS = 60.0
"""The server forgets the watch of a process that is gone after so long."""
CONCURRENT_CALLS = 32
SHOWN = 3
"""Unreadable values named in a warning; the others are counted."""


class _Sample(NamedTuple):
    """State of the server at a time."""

    revision: int
    at: float


class _ReadAgain(Exception):
    """The watch no longer covers all of the bucket."""


class NatsRegistry:
    """Follows the bucket into a registry; a `Registrar`. `run` is a task of the process.

    Args:
        link: The connection to NATS.
        registry: What is kept equal to the bucket, as far as entries of `Source.NATS` go.
        clock: That of the registry.
    """

    def __init__(self, link: NatsLink, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._registry = registry
        self._clock = clock
        self._bucket = WorkerBucket(link)
        self._table: dict[WorkerName, Stored] = {}
        """Entries of the bucket, and those it lost that are still believed."""
        self._unreadable: dict[str, str] = {}
        self._revision = 0
        """Everything up to it is in the registry."""
        self._made_at: datetime | None = None
        """When the bucket was made that is followed."""
        self._advanced = asyncio.Event()
        self._reconnected = asyncio.Event()
        self._sample: _Sample | None = None
        self._away = True
        self._warnings = RateLimitedLog(log)
        self.unreadable = 0
        """Values met that could not be read."""
        self.problem = f"{REGISTRY} was not read yet"
        """Why it is not followed now; "" = it is."""
        self.read = asyncio.Event()
        """Set once all of the bucket was read."""
        link.on_connected(self._connected)

    def warnings(self) -> list[Warned]:
        """Return what an operator should know, one sentence each."""
        found: list[Warned] = []
        if self.problem:
            found.append(f"{self.problem}: what was known of its {len(self._table)} workers stays")
        if self._unreadable:
            some = "; ".join(f"{key}: {why}" for key, why in list(self._unreadable.items())[:SHOWN])
            text = f"{len(self._unreadable)} values of the registry in NATS cannot be read, such as {some}"
            found.append(TenantWarning(ALL_TENANTS, text))
        return found

    # Following

    async def run(self) -> None:
        """Follow the bucket for ever."""
        while True:
            try:
                await self._follow()
            except _ReadAgain as reason:
                log.info("reading the registry in NATS again: %s", reason)
                self._lost(str(reason))
            except (KvscoutError, nats.errors.Error, TimeoutError, OSError) as error:
                self._lost(str(error) if isinstance(error, KvscoutError) else repr(error))
                self._warnings.warning("follow", "%s", self.problem)
                end_if_cancelled()
                await asyncio.sleep(RETRY_SECONDS)

    def _lost(self, why: str) -> None:
        self._away = True
        self._sample = None
        self.problem = f"{REGISTRY} is not followed now ({why})"

    async def _connected(self) -> None:
        self._reconnected.set()

    async def _follow(self) -> None:
        self._reconnected.clear()
        bucket, info = await self._bucket.open()
        watcher: Any = await bucket.watchall(inactive_threshold=IDLE_SECONDS)
        try:
            await self._read_all(watcher, info)
            check_at = self._clock() + CHECK_SECONDS
            while True:
                end_if_cancelled()
                entry = None
                try:
                    async with asyncio.timeout(max(0.0, check_at - self._clock())):
                        entry = await anext(watcher)
                except TimeoutError:
                    pass  # time to ask the server
                if self._reconnected.is_set():
                    raise _ReadAgain("the connection was lost meanwhile")
                if entry is not None:
                    self._apply(entry)
                if self._clock() >= check_at:
                    await self._check()
                    check_at = self._clock() + CHECK_SECONDS
        finally:
            try:
                await watcher.stop()
            except nats.errors.Error as error:
                log.debug("watch not ended: %s", error)  # the server forgets it by itself

    async def _read_all(self, watcher: Any, info: StreamInfo) -> None:
        entries: list[KeyValue.Entry] = []
        async with asyncio.timeout(READ_SECONDS):
            while (entry := await anext(watcher)) is not None:
                entries.append(entry)
        new = self._made_at is not None and info.created != self._made_at
        if new:
            log.warning("the registry in NATS was recreated at %s", info.created)
            self._revision = 0
            self._unreadable.clear()
        self._made_at = info.created
        gone = set(self._table)
        for entry in entries:
            name = self._apply(entry)
            if name is not None:
                gone.discard(name)
        for name in gone:
            await self._missing(self._table[name], new=new)
        # In what was read all of the bucket is contained, and so is every number up to its last value's.
        self._advance(max(self._revision, info.state.last_seq))
        self._registry.restart_leases(Source.NATS)
        self._away = False
        self.problem = ""
        self._show_hidden()
        self.read.set()

    async def _missing(self, stored: Stored, *, new: bool) -> None:
        """A registration is no longer in the bucket, and there is no sign of its removal."""
        if stored.lease_seconds:
            self._table[stored.name] = replace(stored, revision=0)
        elif new:
            revision = await self._bucket.create(stored)
            self._table[stored.name] = replace(stored, revision=revision or 0)
        else:
            self._forget(stored.name, lease_ended=False)

    def _apply(self, entry: KeyValue.Entry) -> WorkerName | None:
        """Take one value or marker; return whose, None = nobody's."""
        revision = entry.revision or 0
        try:
            name = WorkerName(*self._link.names.parse_worker_key(entry.key))
        except InvalidArgument as error:
            self._refuse(entry.key, error)
            self._advance(revision)
            return None
        if entry.operation is not None:
            self._unreadable.pop(entry.key, None)
            # Deletions say that a lease ended (`WorkerBucket.end`), purges that somebody took the worker out.
            self._forget(name, lease_ended=entry.operation == KV_DEL)
        else:
            try:
                stored = decode(name, entry.value or b"", revision)
                self._registry.admit(stored.spec)
            except InvalidArgument as error:
                self._refuse(entry.key, error)
            else:
                self._unreadable.pop(entry.key, None)
                self._table[name] = stored
                self._show(stored)
        self._advance(revision)
        return name

    def _refuse(self, key: str, error: InvalidArgument) -> None:
        self.unreadable += 1
        self._unreadable[key] = str(error)
        self._warnings.warning(key, "value %s of the registry in NATS cannot be read: %s", key, error)

    def _show(self, stored: Stored) -> None:
        known = self._registry.find(stored.name)
        if known is None or known.source not in DECLARED:
            self._registry.register(stored.spec, source=Source.NATS, lease_seconds=stored.lease_seconds)

    def _show_hidden(self) -> None:
        """Show what one of `DECLARED` had in front of it."""
        for name, stored in self._table.items():
            if self._registry.find(name) is None:
                self._show(stored)

    def _forget(self, name: WorkerName, *, lease_ended: bool) -> None:
        self._table.pop(name, None)
        known = self._registry.find(name)
        if known is not None and known.source is Source.NATS:
            self._registry.remove(*name, source=Source.NATS, lease_ended=lease_ended)

    def _advance(self, revision: int) -> None:
        self._revision = max(self._revision, revision)
        self._advanced.set()
        self._advanced = asyncio.Event()

    async def _check(self) -> None:
        """Compare with the server; end the leases of which that says that they were not renewed."""
        asked_at = self._clock()
        try:
            info = await self._bucket.state(CALL_SECONDS)
        except Unavailable as error:
            self._lost(error.message)
            return
        if info.created != self._made_at:
            raise _ReadAgain("the bucket was created again")
        if self._away:
            self._registry.restart_leases(Source.NATS)
            self._away = False
            self.problem = ""
        if self._sample is not None:
            if self._revision >= self._sample.revision:
                await self._end_leases(self._sample.at)
            elif asked_at - self._sample.at < LAG_SECONDS:
                return
            else:
                raise _ReadAgain("the watch is broken")
        self._sample = _Sample(info.state.last_seq, asked_at)
        self._show_hidden()

    async def _end_leases(self, by: float) -> None:
        for spec in self._registry.expire_shared(by):
            stored = self._table.pop(WorkerName(spec.tenant, spec.worker_id), None)
            if stored is not None and stored.revision and not self._bucket.keeps_time:
                await self._bucket.end(stored)

    # Writing

    async def register(self, spec: WorkerSpec, lease_seconds: int) -> bool:
        """See `Registrar.register`."""
        name = WorkerName(spec.tenant, spec.worker_id)
        known = self._registry.find(name)
        if known is not None:
            require_writable(known, Source.NATS)
        await self._shown(await self._bucket.put(Stored(spec, lease_seconds)))
        return known is None

    async def update(self, spec: WorkerSpec) -> None:
        """See `Registrar.update`; it renews the lease, too."""
        entry = self._writable(WorkerName(spec.tenant, spec.worker_id))
        if entry.source is Source.NATS:
            await self._change(entry.name, lambda stored: replace(stored, spec=spec))
        else:
            await self._shown(await self._bucket.put(Stored(spec, entry.lease_seconds)))

    async def set_draining(self, tenant: str, worker_id: str, draining: bool) -> None:
        """See `Registrar.set_draining`; it renews the lease, too."""
        entry = self._registry.get(tenant, worker_id)
        if entry.source is not Source.NATS:
            self._registry.set_draining(tenant, worker_id, draining)
        elif entry.registered.draining != draining:
            await self._change(entry.name, lambda stored: replace(stored, spec=stored.spec.with_draining(draining)))

    async def keep_alive(self, tenant: str, worker_ids: Iterable[str]) -> list[str]:
        """See `Registrar.keep_alive`."""
        names = [WorkerName(tenant, worker_id) for worker_id in dict.fromkeys(worker_ids)]
        unknown: list[str] = []
        for start in range(0, len(names), CONCURRENT_CALLS):
            several = names[start : start + CONCURRENT_CALLS]
            kept = await asyncio.gather(*map(self._renew, several))
            unknown += [name.worker_id for name, known in zip(several, kept, strict=True) if not known]
        return unknown

    async def remove(self, tenant: str, worker_id: str) -> None:
        """See `Registrar.remove`."""
        entry = self._writable(WorkerName(tenant, worker_id))
        await self._shown(await self._bucket.remove(entry.name))
        if entry.source is not Source.NATS and self._registry.find(entry.name) is not None:
            self._registry.remove(tenant, worker_id)

    async def _renew(self, name: WorkerName) -> bool:
        entry = self._registry.find(name)
        if entry is not None and (entry.source in DECLARED or not entry.lease_seconds):
            return True
        try:
            return isinstance(await self._bucket.change(name, self._table.get(name)), Stored)
        except InvalidArgument:
            return False  # unreadable: what registers again, in our version, heals it

    async def _change(self, name: WorkerName, edit: Callable[[Stored], Stored]) -> None:
        written = await self._bucket.change(name, self._table.get(name), edit)
        if isinstance(written, Gone):
            raise NotFound(f"worker {name.worker_id!r} is no longer in the registry in NATS")
        await self._shown(written.revision)

    def _writable(self, name: WorkerName) -> Entry:
        entry = self._registry.get(*name)
        require_writable(entry, Source.NATS)
        return entry

    async def _shown(self, revision: int) -> None:
        """Wait until the registry shows what was written."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                while self._revision < revision:
                    await self._advanced.wait()
        except TimeoutError:
            raise Unavailable(
                "written to the registry in NATS, which this service does not follow now", retry_after_seconds=1.0
            ) from None
