"""Periodic snapshots of a kvscout, and its schedulers' decisions in between."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc
from kvscout_common.doctor.collection import Collection, NamedService
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.snapshot import RankName, Service, Snapshot
from kvscout_common.errors import KvscoutError
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.rpc.channel import call, open_channel, stream
from kvscout_common.worker import ALL_TENANTS

MAX_WATCHED = 64
"""Schedulers and tenants whose decisions are watched; more are left out."""


class Gathering:
    """Asks all services of one kvscout."""

    def __init__(
        self,
        security: ClientSecurity,
        *,
        tenant: str = ALL_TENANTS,
        timeout_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask nobody yet.

        Args:
            security: How services are talked to.
            tenant: Whose workers are queried; "*" = all that the caller may see.
            timeout_seconds: For each answer.
            clock: Seconds.
        """
        self._security = security
        self._tenant = tenant
        self._timeout = timeout_seconds
        self._clock = clock

    async def snapshot(
        self,
        named: Iterable[NamedService],
        *,
        known: Iterable[Service] = (),
        engines: bool,
        proxies: Sequence[str] = (),
    ) -> Snapshot:
        """Return what they, and some proxies, say of themselves; see `Collection.snapshot`."""
        collection = Collection(self._security, tenant=self._tenant, timeout_seconds=self._timeout)
        return await collection.snapshot(named, known=known, engines=engines, proxies=proxies)

    async def look(self, named: Iterable[NamedService], *, known: Iterable[Service] = ()) -> Moment:
        """Return what is known now; never fails.

        Args:
            named: Whom to ask first.
            known: Services that need not be queried.
        """
        snapshot = await self.snapshot(named, known=known, engines=False)
        schedulers = list(snapshot.statuses(scheduler_pb2.SchedulerGetStatusResponse))
        loads = await self._loads(*schedulers[0]) if schedulers else {}
        return Moment(self._clock(), snapshot, loads)

    @asynccontextmanager
    async def decisions(self, *, kept: int, explain: bool = False) -> AsyncIterator[Decisions]:
        """Watch the schedulers' decisions until exit.

        Args:
            kept: Number of the last ones that are kept; of more between two looks, the first.
            explain: Each with its candidates.
        """
        async with asyncio.TaskGroup() as group:
            decisions = Decisions(group, self._security, self._tenant, kept=kept, explain=explain)
            try:
                yield decisions
            finally:
                decisions.follow(Snapshot(()))

    async def _loads(
        self, scheduler: Service, status: scheduler_pb2.SchedulerGetStatusResponse
    ) -> dict[RankName, scheduler_pb2.WorkerLoad]:
        """Return the load of every worker rank, as one scheduler has it."""
        channel = open_channel(scheduler.address, self._security)
        stub: scheduler_pb2_grpc.SchedulerAsyncStub = scheduler_pb2_grpc.SchedulerStub(channel)
        found: dict[RankName, scheduler_pb2.WorkerLoad] = {}
        try:
            for pool in status.pools:
                request = scheduler_pb2.SchedulerGetPotentialLoadsRequest(
                    model=pool.model, tenant=pool.tenant, role=pool.role
                )
                answer = await call(stub.GetPotentialLoads, request, timeout=self._timeout)
                for load in answer.loads:
                    found[RankName(pool.tenant, load.worker.worker_id, load.worker.dp_rank)] = load
        except KvscoutError:
            return found  # it has just gone: the next look says so
        finally:
            await channel.close()
        return found


class Decisions:
    """The last decisions of all schedulers. A scheduler is watched until it has sent as many as are retained, then left
    alone until the next snapshot: to send and explain every one of thousands a second would cost it more than to make
    them."""

    def __init__(
        self, group: asyncio.TaskGroup, security: ClientSecurity, tenant: str, *, kept: int, explain: bool
    ) -> None:
        self.last: deque[scheduler_pb2.WatchDecisionsResponse] = deque(maxlen=kept)
        """The newest first."""
        self._group = group
        self._security = security
        self._tenant = tenant
        self._kept = kept
        self._explain = explain
        self._watches: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._next_look = asyncio.Event()

    def follow(self, snapshot: Snapshot) -> None:
        """Watch the schedulers of the last look, and no others."""
        wanted = {
            (service.address, tenant)
            for service, status in snapshot.statuses(scheduler_pb2.SchedulerGetStatusResponse)
            for tenant in ({pool.tenant for pool in status.pools} if self._tenant == ALL_TENANTS else {self._tenant})
        }
        for key in self._watches.keys() - wanted:
            self._watches.pop(key).cancel()
        for key in sorted(wanted - self._watches.keys())[: max(0, MAX_WATCHED - len(self._watches))]:
            self._watches[key] = self._group.create_task(self._watch(*key), name=f"decisions of {key[0]}")
        self._next_look.set()
        self._next_look = asyncio.Event()

    async def _watch(self, address: str, tenant: str) -> None:
        channel = open_channel(address, self._security)
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        request = scheduler_pb2.WatchDecisionsRequest(tenant=tenant, explain=self._explain)
        try:
            while True:
                try:
                    async with aclosing(stream(stub.WatchDecisions, request)) as decisions:
                        look, received = self._next_look, 0
                        async for decision in decisions:
                            if look is not self._next_look:
                                look, received = self._next_look, 0
                            self.last.appendleft(decision)
                            received += 1
                            if received >= self._kept:
                                break
                except KvscoutError:
                    pass  # the next look shows that it does not answer
                await self._next_look.wait()
        finally:
            await channel.close()
