"""Registry of this gateway and lists of the indexers and schedulers, brought in line with one another.

One loop a member (`member_sync`) brings it to what this gateway knows. Workers that the members know and this gateway
does not (registered at another gateway, or before a restart) are adopted as `peer` entries: routed to, but pushed to
nobody except a member that is new. The first call about one of them that comes here makes it this gateway's own.

Where the registry is shared, in NATS, members follow that themselves: what is in it is neither pushed to them nor read
from them, and a member that does not seem to follow is a problem of that member. Workers of this gateway's file, pods
and DNS names are pushed as ever.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from kvscout.v1 import gateway_pb2
from kvscout_common.errors import FailedPrecondition, KvscoutError, NotFound, Unavailable
from kvscout_common.registry.registry import DECLARED, Registry, Source, WorkerName
from kvscout_common.rpc.service_info import TenantWarning, Warned, about, shown, text_of
from kvscout_common.worker import WorkerSpec
from kvscout_gateway.members.member_list import CALL_SECONDS, WORKERS_A_SLICE, Peer
from kvscout_gateway.members.member_sync import MemberSync
from kvscout_gateway.upstreams.failover import Member

log = logging.getLogger("kvscout.gateway")

RETRY_SECONDS = 0.5


class Registration:
    """The syncs of all members, and the peers they bring. Watches the members, and listens to the registry.

    Args:
        registry: The workers of this gateway.
        clock: Monotonic seconds.
        shared: Worker rpcs take effect in the registry that services share.
    """

    def __init__(
        self, registry: Registry, clock: Callable[[], float] = time.monotonic, *, shared: bool = False
    ) -> None:
        self._registry = registry
        self._shared = shared
        self._clock = clock
        self._syncs: dict[Member[Any], MemberSync] = {}
        self._adopted: object | None = None
        """State of the lists whose workers were adopted last."""
        registry.listen(self)

    @property
    def members(self) -> list[MemberSync]:
        """The members, in the order in which they came."""
        return list(self._syncs.values())

    def join(self, member: Member[Any]) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return what is to run for a member as long as it is there, by name."""
        sync = self._syncs[member] = MemberSync(member.name, member.stub, self._registry, self, clock=self._clock)
        return {f"sync {member.name}": lambda: self._keep(sync)}

    def leave(self, member: Member[Any]) -> None:
        """Forget a member that is gone, and the workers that only it has listed."""
        del self._syncs[member]

    def fill_status(self, member: Member[Any], status: gateway_pb2.HelperStatus) -> None:
        """Add to the status of a member how it follows the workers."""
        sync = self._syncs[member]
        status.healthy &= not sync.error
        status.last_error = status.last_error or "".join(shown([problem(sync)]))
        status.pending_registrations = sync.pending

    def resync(self, member: Member[Any]) -> asyncio.Future[float]:
        """Bring one up to date that does not know workers which this gateway knows; return as `MemberSync.resync`."""
        if member in self._syncs:
            return self._syncs[member].resync()
        gone: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        gone.set_result(-math.inf)
        return gone

    def warnings(self) -> list[Warned]:
        """Return what keeps members from knowing every worker, one sentence each."""
        return [about(member.name, why) for member in self.members if (why := problem(member))]

    def worker_added(self, spec: WorkerSpec) -> None:
        """Push a new worker."""
        self._touch()

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        """Push a changed worker."""
        self._touch()

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        """Push a removal. Not the end of a lease: members time it too, and another gateway may have renewed
        it; nor of a peer that is gone: it is the members who said so."""
        if reason == "removed" or reason in DECLARED:
            self._touch(WorkerName(spec.tenant, spec.worker_id))

    def _touch(self, removed: WorkerName | None = None) -> None:
        for member in self.members:
            member.touch(removed)

    async def flush(self, timeout_seconds: float = CALL_SECONDS) -> None:
        """Wait until every member knows all changes of the registry; not where they follow it themselves.

        Raises:
            Unavailable: If a member does not within the time; it is brought up to date as soon as it is back.
        """
        if self._shared:
            return
        try:
            async with asyncio.timeout(timeout_seconds):
                for member in self.members:
                    await member.synced.wait()
        except TimeoutError:
            waiting = [member for member in self.members if not member.synced.is_set()]
            late = ", ".join(f"{m.name} ({''.join(shown([problem(m)])) or 'slow'})" for m in waiting)
            raise Unavailable(
                f"registered here, but not everywhere yet; retrying: {late}", retry_after_seconds=1.0
            ) from None

    async def _keep(self, member: MemberSync) -> None:
        """Sync one member, for ever."""
        while True:
            before = problem(member)
            try:
                await member.sync()
            except KvscoutError as error:
                member.failed(str(error) or type(error).__name__)
            after = problem(member)
            if after and not before:
                log.warning("%s", text_of(about(f"{member.name} has not received all workers", after)))
            elif before and not after:
                log.info("%s has received all workers again", member.name)
            await self._adopt()
            due = member.wanted if member.error else member.changed
            try:
                async with asyncio.timeout(RETRY_SECONDS if member.error else member.wait_seconds()):
                    await due.wait()
            except TimeoutError:
                pass  # time for the next round

    def announce(self, spec: WorkerSpec) -> None:
        """Push a worker that registered (again): its lease begins anew everywhere."""
        if not self._shared:
            self._touch()
            self.keep_alive(spec.tenant, [spec.worker_id])

    def keep_alive(self, tenant: str, worker_ids: Iterable[str]) -> None:
        """Pass renewals on to the members."""
        if self._shared:
            return
        names = [WorkerName(tenant, worker_id) for worker_id in worker_ids]
        for member in self.members:
            member.renew(names)

    def take_over(self, tenant: str, worker_id: str) -> None:
        """Make a peer's worker this gateway's own, so that a call about it here takes effect everywhere.

        Raises:
            FailedPrecondition: It comes from a member's file, which is where to change it.
        """
        name = WorkerName(tenant, worker_id)
        try:
            entry = self._registry.get(tenant, worker_id)
        except NotFound:
            return  # the call itself says so
        if entry.source is not Source.PEER:
            return
        for member in self.members:
            peer = member.peers.get(name)
            if peer is not None and peer.declared:
                raise FailedPrecondition(f"worker {worker_id!r} comes from {DECLARED[peer.source]} of {member.name}")
        lease = next((m.peers[name].lease_seconds for m in self.members if name in m.peers), 0)
        self._registry.register(entry.registered, lease_seconds=lease)

    def release(self, spec: WorkerSpec) -> None:
        """Take note of an own worker that another gateway changed or removed, as it is listed now or was last."""
        log.info("worker %s is now registered by another gateway", spec.worker_id)
        self._registry.register(spec, source=Source.PEER)

    def state(self) -> object | None:
        """Return the state of the registry and of all lists; None = workers are about to be passed on."""
        if any(member.lacks for member in self.members):
            return None
        return self._registry.version, [(member.lists, member.error, member.tried) for member in self.members]

    def peers_of_others(self, member: MemberSync) -> dict[WorkerName, Peer] | None:
        """Return what the other members list; None = one of them has not been read yet."""
        others = [other for other in self.members if other is not member]
        if not all(other.tried for other in others):
            return None
        return self._union([other for other in others if not other.error] or [member])

    @staticmethod
    def _union(members: Sequence[MemberSync]) -> dict[WorkerName, Peer]:
        """Return what members list; the first that lists a worker says how it is registered.

        Those that are out of reach count only where all are: their lists may be long out of date.
        """
        reachable = [member for member in members if not member.error]
        union: dict[WorkerName, Peer] = {}
        for member in reversed(reachable or members):
            for name, peer in member.peers.items():
                # Who was passed it on says what somebody else has said.
                if peer.source is not Source.PEER or name not in union:
                    union[name] = peer
        return union

    async def _adopt(self) -> None:
        """Make the registry's peers those that members list: new ones some at a time, the rest in one call."""
        if self._adopted == self.state() is not None:
            return
        while fresh := [spec for spec in self._peers() if not self._knows(spec)][:WORKERS_A_SLICE]:
            self._registry.add_to_source(Source.PEER, fresh)
            await asyncio.sleep(0)
        self._registry.replace_source(Source.PEER, self._peers())
        self._adopted = self.state()

    def _knows(self, spec: WorkerSpec) -> bool:
        return self._registry.has(WorkerName(spec.tenant, spec.worker_id))

    def _peers(self) -> list[WorkerSpec]:
        own = {entry.name for entry in self._registry.entries() if entry.source is not Source.PEER}
        return [
            peer.spec
            for name, peer in self._union(self.members).items()
            if name not in own and not (self._shared and peer.source == Source.NATS)
        ]


def problem(member: MemberSync) -> Warned:
    """Return what keeps a member from knowing every worker; "" = nothing."""
    if not member.error and not member.refused and member.unaware:
        return f"does not follow the registry in NATS: {member.unaware} of its workers are unknown there"
    if member.error or not member.refused:
        return member.error
    name, why = next(iter(member.refused.items()))
    more = f" and {len(member.refused) - 1} more" if len(member.refused) > 1 else ""
    return TenantWarning(name.tenant, f"refuses {name.worker_id}{more}: {why}")
