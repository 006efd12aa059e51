"""Bringing one indexer or scheduler to what this gateway knows of the workers.

Pushed to a member: every worker registered here or in this gateway's file, in full; removals made here; the renewals
that workers send here. A worker's lease is timed by each member for itself, so that it ends everywhere at the same
time, whether or not this gateway still runs.

Read from a member: its list of workers. Three things may have happened to one of ours that it lists otherwise
or no longer lists, and each has its own answer:
* the member restarted, or could not be reached for as long as the lease: it is pushed again;
* another gateway changed it or removed it: that gateway has it from now on (`on_release`);
* it is declared to this gateway (file, Kubernetes, DNS): that wins, it is pushed again.

What was registered with one member alone, as publishers do that know indexers only, is passed on to the others, with a
lease that is renewed while it is listed there. Who was passed something passes nothing on: what is gone where it was
registered is gone everywhere one lease later, however many gateways there are.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvscout.v1 import workers_pb2
from kvscout_common.errors import FailedPrecondition, InvalidArgument, NotFound
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.registry.registry import DECLARED, Entry, Registry, Source, WorkerName
from kvscout_common.registry.worker_proto import spec_from_proto, spec_to_proto
from kvscout_common.rpc.channel import call
from kvscout_common.worker import WorkerSpec
from kvscout_gateway.members.member_list import CALL_SECONDS, MemberList, Peer, WorkerStub

if TYPE_CHECKING:
    from kvscout_gateway.members.registration import Registration

log = logging.getLogger("kvscout.gateway")

SYNC_SECONDS = 2.0
"""Between two readings of a member's list."""
SUSPECT_SECONDS = 0.2
"""Shortest time between two readings, however many requests meet a member that seems not to know a worker."""
FILE_LEASE_SECONDS = 300
"""Members forget workers of a gateway's file this long after the gateway is gone."""
PASSED_ON_AFTER_SECONDS = 1.0
"""A worker is passed on that others still list so long after a member was found not to: leases end everywhere, and
removals arrive, within half a second."""
PASSED_ON_LEASE_SECONDS = 10
CALLS_IN_PARALLEL = 32
"""Registrations under way to one member: a fleet of 1,000 is pushed in well under a second."""

LEARNED = (Source.PEER, Source.NATS)
"""Sources whose workers are not pushed: members have them, or follow the registry in NATS themselves."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A registration as it was pushed to a member last."""

    entry: Entry
    listed: WorkerSpec
    """As the member will list it."""
    at: float


class MemberSync:
    """One member. `sync` is one round.

    Args:
        name: For people.
        stub: Its rpcs.
        registry: The workers of this gateway.
        fleet: All members.
        clock: Monotonic seconds.
    """

    def __init__(
        self, name: str, stub: WorkerStub, registry: Registry, fleet: Registration, *, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self._stub = stub
        self._registry = registry
        self._fleet = fleet
        self._clock = clock
        self._list = MemberList(name, stub, clock)
        self._compared: object | None = None
        """State after a comparison that left nothing to be done; None = it left something."""
        self._own_workers: tuple[str, dict[WorkerName, Entry]] = ("", {})
        """Registrations that this member should have, and the version of the registry that they are of."""
        self.lists = 0
        """Lists that were compared."""
        self._sent: dict[WorkerName, _Sent] = {}
        self._to_remove: set[WorkerName] = set()
        self._to_renew: set[WorkerName] = set()
        self._listed_at: float | None = None
        self._list_due = 0.0
        self._resynced: asyncio.Future[float] | None = None
        """Future that callers of `resync` wait for; None = there are none."""
        self._syncing = False
        self._registered_at = -math.inf
        self._new = True
        """It has (re)started, and workers that other members know were not pushed to it yet."""
        self.changed = asyncio.Event()
        self.wanted = asyncio.Event()
        """A round is due immediately, though the last one failed."""
        self.synced = asyncio.Event()
        self.tried = False
        self.error = ""
        """Why the last round failed; "" = it did not."""
        self.refused: dict[WorkerName, str] = {}
        """Registrations that it refuses, and why."""
        self.peers: dict[WorkerName, Peer] = {}
        """The list that was compared last."""
        self.unaware = 0
        """Workers of the registry in NATS that it did not list twice in a row."""
        self._unlisted: set[WorkerName] = set()
        self.lacks: dict[WorkerName, float] = {}
        """Workers that others list and this one does not, and since when that is known."""
        self._warnings = RateLimitedLog(log)

    @property
    def pending(self) -> int:
        """Return the number of registrations and removals that are not pushed yet, or refused."""
        return len(self._to_remove) + len(self._missing())

    def touch(self, removed: WorkerName | None = None) -> None:
        """Have changes of the registry pushed."""
        if removed is not None:
            self._to_remove.add(removed)
        self.synced.clear()
        self.changed.set()

    def renew(self, names: Iterable[WorkerName]) -> None:
        """Pass renewals of leases on."""
        self._to_renew.update(names)
        self.changed.set()

    def resync(self) -> asyncio.Future[float]:
        """Bring the member up to date now: it does not know a worker that was pushed to it.

        Returns:
            When it was last registered a worker, on the gateway's clock; done when its list was read and what it
            lacked was pushed.
        """
        resynced = self._resynced or asyncio.get_running_loop().create_future()
        if self._listed_at is None or self._clock() - self._listed_at > SUSPECT_SECONDS:
            self._list_due = 0.0
            self.changed.set()
            self.wanted.set()
        elif not self._syncing and self._list_due:
            resynced.set_result(self._registered_at)
            return resynced
        self._resynced = resynced
        return resynced

    def failed(self, error: str) -> None:
        """Record that a round failed."""
        self.error = error
        self.tried = True
        self._list_due = 0.0
        self.synced.clear()

    async def sync(self) -> None:
        """Run one round.

        Raises:
            KvscoutError: If the member cannot be reached; what was done stays done.
        """
        self.changed.clear()
        self.wanted.clear()
        self._syncing = True
        try:
            if self._clock() >= self._list_due:
                await self._compare()
                self._list_due = self._clock() + SYNC_SECONDS
            await self._push()
        finally:
            self._syncing = False
        if self._list_due and self._resynced is not None:
            self._resynced.set_result(self._registered_at)
            self._resynced = None
        self.error = ""
        self.tried = True
        if not self.changed.is_set() and not self.refused:
            self.synced.set()

    def wait_seconds(self) -> float:
        """Return the seconds until the next round is due, if nothing changes."""
        return max(0.0, self._list_due - self._clock())

    def _own(self) -> dict[WorkerName, Entry]:
        """Return the registrations that this member should have."""
        version, own = self._own_workers
        if version != self._registry.version:
            own = {entry.name: entry for entry in self._registry.entries() if entry.source not in LEARNED}
            self._own_workers = self._registry.version, own
        return own

    def _missing(self) -> list[Entry]:
        return [entry for name, entry in self._own().items() if not self._knows(name, entry)]

    def _knows(self, name: WorkerName, entry: Entry) -> bool:
        sent = self._sent.get(name)
        return (
            sent is not None
            and (sent.entry.registered is entry.registered or sent.entry.registered == entry.registered)
            and sent.entry.lease_seconds == entry.lease_seconds
            and name not in self.refused
        )

    # Pushing

    async def _push(self) -> None:
        own = self._own()
        self.refused = {name: why for name, why in self.refused.items() if name in own}
        for name in list(self._to_remove):
            await self._remove(name)
        missing = self._missing()
        for start in range(0, len(missing), CALLS_IN_PARALLEL):
            await _all(self._register(entry) for entry in missing[start : start + CALLS_IN_PARALLEL])
        await self._keep_alive()

    async def _remove(self, name: WorkerName) -> None:
        request = workers_pb2.RemoveWorkerRequest(tenant=name.tenant, worker_id=name.worker_id)
        listed = self.peers.get(name)
        try:
            if listed is None or not listed.declared:
                await call(self._stub.RemoveWorker, request, timeout=CALL_SECONDS)
        except (NotFound, FailedPrecondition):
            pass  # gone already, or the member has it from a file of its own
        self._sent.pop(name, None)
        self.refused.pop(name, None)
        self.peers.pop(name, None)
        self._to_remove.discard(name)

    async def _register(self, entry: Entry) -> None:
        listed = self.peers.get(entry.name)
        if listed is not None and listed.declared:
            # It would refuse: what it is declared there is there to change.
            self._sent[entry.name] = _Sent(entry, listed.spec, self._clock())
            return
        lease = FILE_LEASE_SECONDS if entry.source in DECLARED else entry.lease_seconds
        proto = await self._register_worker(entry.name, entry.registered, lease)
        if proto is not None:
            self._sent[entry.name] = _Sent(entry, spec_from_proto(proto), self._clock())

    async def _register_worker(
        self, name: WorkerName, spec: WorkerSpec, lease_seconds: int, *, passed_on: bool = False
    ) -> workers_pb2.Worker | None:
        """Register a worker; None = the member refuses it, which is no reason to keep others from it."""
        proto = spec_to_proto(spec)
        request = workers_pb2.RegisterWorkerRequest(
            tenant=spec.tenant, worker=proto, lease_seconds=lease_seconds, passed_on=passed_on
        )
        try:
            await call(self._stub.RegisterWorker, request, timeout=CALL_SECONDS)
        except FailedPrecondition:
            pass  # the member has it from a file of its own
        except InvalidArgument as error:
            self.refused[name] = str(error)
            return None
        self.refused.pop(name, None)
        self._registered_at = self._clock()
        return proto

    async def _keep_alive(self) -> None:
        due = self._clock() - FILE_LEASE_SECONDS / 10
        due_files = {n for n, sent in self._sent.items() if sent.entry.source in DECLARED and sent.at <= due}
        names = self._to_renew | due_files
        by_tenant: defaultdict[str, list[WorkerName]] = defaultdict(list)
        for name in names:
            by_tenant[name.tenant].append(name)
        for tenant, members in by_tenant.items():
            request = workers_pb2.KeepAliveRequest(tenant=tenant, worker_ids=[name.worker_id for name in members])
            answer = await call(self._stub.KeepAlive, request, timeout=CALL_SECONDS)
            for name in members:
                sent = self._sent.get(name)
                if sent is not None and name.worker_id not in answer.unknown_worker_ids:
                    self._sent[name] = _Sent(sent.entry, sent.listed, self._clock())
            self._to_renew.difference_update(members)
            if answer.unknown_worker_ids:
                self.resync()

    # Reading

    async def _compare(self) -> None:
        """Read the list of workers, and draw the conclusions; there are none where nothing has changed anywhere."""
        requested_at = self._clock()
        if not await self._list.read() and self._compared is not None and self._compared == self._fleet.state():
            self._listed_at = requested_at
            return
        self._compared = None
        listed = dict(self._list.workers)
        lost = (self.peers.keys() | self._sent.keys()) - listed.keys()
        if lost and self._listed_at is not None and await self._list.restarted_since(self._listed_at):
            self._new = True
            self._sent.clear()
        self._compare_shared(listed)
        await asyncio.sleep(0)
        self._compare_own(listed)
        passes_on = await self._pass_on(listed)
        self.peers = listed
        self.lists += 1
        self._listed_at = requested_at
        if not (passes_on or self._unlisted):
            self._compared = self._fleet.state()

    def _compare_shared(self, listed: dict[WorkerName, Peer]) -> None:
        shared = {entry.name for entry in self._registry.entries() if entry.source is Source.NATS}
        before, self._unlisted = self._unlisted, shared - listed.keys()
        self.unaware = len(self._unlisted & before)

    def _compare_own(self, listed: dict[WorkerName, Peer]) -> None:
        own = self._own()
        for name, sent in list(self._sent.items()):
            entry, there = own.get(name), listed.get(name)
            if name in self._to_remove:
                continue  # that is pushed next
            if entry is None or (there is not None and there.source is Source.PEER):
                # Its lease ended, or another gateway has it; or the member restarted, and another gateway was faster.
                del self._sent[name]
                continue
            # The same object, nearly always: comparing all fields of a fleet takes as long as reading them.
            if there is not None and (there.declared or there.spec is sent.listed or there.spec == sent.listed):
                self._sent[name] = _Sent(sent.entry, there.spec, sent.at)
                continue
            lease = entry.lease_seconds
            lapsed = there is None and lease and self._clock() - sent.at >= lease
            del self._sent[name]
            changed_here = sent.entry.registered != entry.registered
            if entry.source not in DECLARED and not lapsed and not changed_here:
                self._fleet.release(there.spec if there is not None else entry.registered)

    async def _pass_on(self, listed: dict[WorkerName, Peer]) -> bool:
        """Push what is registered with others, for as long as it is there; return whether more is to be done later.

        A member that is new receives it immediately, and what has no lease as its own: whoever registered it may be
        gone. A lease is renewed by whoever registered it, perhaps with the other member only.
        """
        listed_by_others = self._fleet.peers_of_others(self)
        if listed_by_others is None:
            return True
        own, now = self._own(), self._clock()
        lacks, passes_on = dict[WorkerName, float](), False
        for name, peer in listed_by_others.items():
            if name in own or name in self._to_remove or not peer.registered_there:
                continue
            here = listed.get(name)
            if here is not None:
                passes_on |= here.source is Source.PEER
                if here.source is Source.PEER and here.spec == peer.spec:
                    self._to_renew.add(name)
                elif here.source is Source.PEER:
                    await self._pass_on_one(name, peer)
            elif self._new and not peer.lease_seconds:
                await self._register_worker(name, peer.spec, 0)
                listed[name] = peer
            else:
                lacks[name] = self.lacks.get(name, now)
                if self._new or peer.listed_at - lacks[name] >= PASSED_ON_AFTER_SECONDS:
                    await self._pass_on_one(name, peer)
        self.lacks, self._new = lacks, False
        return passes_on or bool(lacks)

    async def _pass_on_one(self, name: WorkerName, peer: Peer) -> None:
        if await self._register_worker(name, peer.spec, PASSED_ON_LEASE_SECONDS, passed_on=True) is None:
            why = self.refused.pop(name)
            self._warnings.warning(name, "%s refuses worker %s, which others know: %s", self.name, name.worker_id, why)


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Run calls together; raise the first error when all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
