"""Pools and their workers, as the registry reports them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from kvscout_common.errors import NotFound, Unavailable
from kvscout_common.known_names import or_known
from kvscout_common.observability.warnings import TenantWarning
from kvscout_common.registry.registry import Source
from kvscout_common.worker import ALL_TENANTS, WorkerRank, WorkerSpec
from kvscout_scheduler.load.pool import LeavingRank, Pool
from kvscout_scheduler.values.reservation import EndReason, PoolId
from kvscout_scheduler.values.settings import SchedulerSettings

TAKEN_OUT = frozenset({"removed", Source.NATS, Source.FILE, Source.KUBERNETES})
"""Reasons of the registry for which a worker does not come back by itself; "nats" is a removal that somebody wrote to
the bucket. All others (its lease, an address that DNS leaves out) may be the registry's trouble, not the worker's."""

MAX_ENDS = 256
"""Bookings that end in one go, a few milliseconds; of more, the others follow a slice at a time."""

NAMED_RANKS = 5
"""Worker ranks that a warning names."""


class SlotBookings(Protocol):
    """Bookings by slot, of which those of a worker that left end."""

    tenants: int
    """Tenants that have workers."""

    def drop_slot(self, pool: Pool, slot: int, reason: EndReason, now: float, limit: int) -> int:
        """End bookings of a slot, `limit` at most, and return their number."""

    def flush_log(self) -> None:
        """Log the bookings that ended."""


class Workers:
    """Workers by name, pools by id. A registry listener; a pool is there while it has workers, or load of some.

    Args:
        settings: Settings of the scheduler.
        bookings: Ends the bookings of workers that go.
        clock: Monotonic seconds.
        make_pool: Makes an empty pool.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        bookings: SlotBookings,
        clock: Callable[[], float],
        make_pool: Callable[[PoolId], Pool],
    ) -> None:
        self._settings = settings
        self._bookings = bookings
        self._clock = clock
        self._make_pool = make_pool
        self._pools: dict[PoolId, Pool] = {}
        self._specs: dict[tuple[str, str], WorkerSpec] = {}
        self._tenants: Counter[str] = Counter()
        """Workers of each."""
        self._seen: set[tuple[str, str]] = set()

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def worker_added(self, spec: WorkerSpec) -> None:
        """Add a worker."""
        pool_id = pool_of(spec)
        pool = self._pools.get(pool_id)
        if pool is None:
            pool = self._pools[pool_id] = self._make_pool(pool_id)
        pool.add(spec)
        self._specs[spec.tenant, spec.worker_id] = spec
        self._tenants[spec.tenant] += 1
        self._bookings.tenants = len(self._tenants)
        self._seen.add((spec.tenant, spec.model))

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        """Update the registration of a worker; its bookings stay. Those that it cannot have any more (it serves another
        model, other blocks, fewer ranks) are load of nobody's until they end by themselves."""
        if pool_of(old) == pool_of(new):
            self._pools[pool_of(new)].update(old, new)
            self._specs[new.tenant, new.worker_id] = new
        else:
            self._remove(old, LeavingRank(math.inf))
            self.worker_added(new)

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        """Remove a worker. If somebody took it out, its bookings end; else they stay for the grace time, in which it
        may come back to them."""
        taken_out, now = reason in TAKEN_OUT, self._clock()
        grace = 0.0 if taken_out else self._settings.worker_grace_seconds
        self._remove(spec, LeavingRank(now + grace, taken_out))
        self.expire(now, MAX_ENDS)

    def expire(self, now: float, limit: int) -> int:
        """End bookings on ranks whose grace time is over, and pools that have neither workers nor bookings. Ends are
        logged once there are no more of them for now.

        Args:
            now: On the scheduler's clock.
            limit: How many bookings.

        Returns:
            Bookings that ended.
        """
        ended = 0
        for pool in list(self._pools.values()):
            for slot, leaving in list(pool.leaving.items()):
                if leaving.until <= now and ended < limit:
                    reason = EndReason.WORKER_REMOVED if leaving.taken_out else EndReason.WORKER_GONE
                    ended += self._bookings.drop_slot(pool, slot, reason, now, limit - ended)
            if not pool.order and not pool.leaving:
                del self._pools[pool.id]
        if ended < limit:
            self._bookings.flush_log()
        return ended

    def _remove(self, spec: WorkerSpec, leaving: LeavingRank) -> None:
        self._pools[pool_of(spec)].remove(spec, leaving)
        del self._specs[spec.tenant, spec.worker_id]
        self._tenants[spec.tenant] -= 1
        if not self._tenants[spec.tenant]:
            del self._tenants[spec.tenant]
        self._bookings.tenants = len(self._tenants)

    def pool(self, pool_id: PoolId) -> Pool:
        """Return a pool that has workers.

        Raises:
            NotFound: The model was never seen.
            Unavailable: It was, but has no worker of this role now.
        """
        pool = self._pools.get(pool_id)
        if pool is None or not pool.order:
            self.require_model(pool_id.tenant, pool_id.model)
            others = {key.role for key, one in self._pools.items() if one.order and key[:2] == pool_id[:2]}
            but = f"; it has {' and '.join(sorted(others))} workers" if others else ""
            raise Unavailable(f"model {pool_id.model!r} has no {pool_id.role} worker now{but}")
        return pool

    def ranks(self, pool_id: PoolId) -> int:
        """Return how many ranks a pool has; 0 = none, or there is no such pool."""
        pool = self._pools.get(pool_id)
        return len(pool.order) if pool is not None else 0

    def require_model(self, tenant: str, model: str) -> None:
        """Refuse a model that no worker ever served; tenant "*" is any.

        Raises:
            NotFound: The model was never seen.
        """
        if (tenant, model) in self._seen:
            return
        if tenant != ALL_TENANTS or all(seen != model for _, seen in self._seen):
            known = (name for owner, name in self._seen if tenant in (ALL_TENANTS, owner))
            raise NotFound(f"model {model!r} was never seen in tenant {tenant!r}{or_known(model, known)}")

    def require_worker(self, tenant: str, worker_id: str) -> WorkerSpec:
        """Return the registration of a worker.

        Raises:
            NotFound: No such worker.
        """
        spec = self._specs.get((tenant, worker_id))
        if spec is None:
            known = (name for owner, name in self._specs if owner == tenant)
            raise NotFound(f"no worker {worker_id!r} in tenant {tenant!r}{or_known(worker_id, known)}")
        return spec

    def slot(self, tenant: str, rank: WorkerRank) -> tuple[Pool, int]:
        """Return the pool and slot of a worker rank.

        Raises:
            NotFound: No such worker, or it has no such rank.
        """
        spec = self.require_worker(tenant, rank.worker_id)
        pool = self._pools[pool_of(spec)]
        slot = pool.slot_of.get(rank)
        if slot is None:
            raise NotFound(f"worker {rank.worker_id!r} has no rank {rank.dp_rank}")
        return pool, slot

    def models(self, tenant: str) -> set[str]:
        """Return models of a tenant that were ever seen."""
        return {model for owner, model in self._seen if owner == tenant}

    def warnings(self) -> list[TenantWarning]:
        """Return warnings for operators."""
        seconds = self._settings.engine_metrics_seconds
        found = []
        for pool in self:
            if pool.silent:
                ranks = [pool.ranks[slot] for slot in pool.order if slot in pool.silent]
                names = ", ".join(f"{rank.worker_id}/{rank.dp_rank}" for rank in ranks[:NAMED_RANKS])
                more = ", …" if len(ranks) > NAMED_RANKS else ""
                text = f"model {pool.id.model}: engine metrics older than {seconds:g} s count no more: {names}{more}"
                found.append(TenantWarning(pool.id.tenant, text))
        revisions = {name for pool in self for name in pool.by_revision()}
        unused = self._settings.revision_weights.keys() - revisions
        if unused and revisions:
            names = ", ".join(repr(name) for name in sorted(unused))
            found.append(TenantWarning(ALL_TENANTS, f"revision weights: no worker has the revision {names}"))
        return found


def pool_of(spec: WorkerSpec) -> PoolId:
    """Return the pool that a worker belongs to."""
    return PoolId(spec.tenant, spec.model, spec.role)
