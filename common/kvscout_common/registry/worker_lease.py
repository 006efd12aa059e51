"""A registration that lives as long as the process that made it, in the registry in NATS: no service is needed."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from kvscout_common.errors import FailedPrecondition, InvalidArgument, KvscoutError
from kvscout_common.nats.link import NatsLink, end_if_cancelled
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.registry.leases import DEFAULT_LEASE_SECONDS, RENEWALS, RETRY_SECONDS
from kvscout_common.registry.registry import WorkerName
from kvscout_common.registry.worker_bucket import Gone, Stored, WorkerBucket
from kvscout_common.worker import WorkerSpec

log = logging.getLogger("kvscout.registry")


class WorkerLease:
    """Registers a worker, renews its lease, and removes it at the end. `run` is a task of the process.

    A lease that ended or was lost with NATS' store is registered again; a worker that somebody removed is not, until a
    new process registers it: then `removed` is True and `run` only waits. Draining, which operators set, is kept.

    Args:
        link: The connection to NATS, run by whoever made it.
        spec: The worker.
        lease_seconds: The worker is gone this long after the process; at least 1.
    """

    def __init__(self, link: NatsLink, spec: WorkerSpec, *, lease_seconds: int = DEFAULT_LEASE_SECONDS) -> None:
        self._bucket = WorkerBucket(link)
        self._wanted = Stored(spec.validate(), lease_seconds)
        self._written: Stored | None = None
        self._changed = asyncio.Event()
        self._warnings = RateLimitedLog(log)
        self.registered = asyncio.Event()
        """Set while the registration is written as wanted."""
        self.removed = False
        self._settled = asyncio.Event()
        """Set while it is registered, or never will be."""
        self.problem = "not registered yet"
        """Why it is not registered, or not renewed; "" = it is."""

    @property
    def name(self) -> WorkerName:
        """Return what identifies the registration."""
        return self._wanted.name

    @property
    def spec(self) -> WorkerSpec:
        """The worker, as it is to be registered."""
        return self._wanted.spec

    def update(self, spec: WorkerSpec) -> None:
        """Has the worker registered otherwise; immediately, or when NATS is back.

        Raises:
            ValueError: It is another worker.
        """
        changed = replace(self._wanted, spec=spec.validate())
        if changed.name != self.name:
            raise ValueError(f"{changed.name} is not {self.name}")
        self._wanted = changed
        self._unsettle()
        self._changed.set()

    async def until_registered(self) -> None:
        """Wait until it is.

        Raises:
            FailedPrecondition: Somebody removed it.
        """
        await self._settled.wait()
        if self.removed:
            raise FailedPrecondition(f"worker {self.name.worker_id!r}: {self.problem}")

    async def run(self) -> None:
        """Keep the registration until cancelled."""
        while True:
            end_if_cancelled()
            self._changed.clear()
            pause = self._wanted.lease_seconds / RENEWALS
            try:
                await self._keep()
            except KvscoutError as error:
                self.problem = error.message
                self._warnings.warning("keep", "worker %s is not renewed: %s", self.name.worker_id, self.problem)
                pause = RETRY_SECONDS
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                pass  # time to renew

    async def remove(self) -> None:
        """Remove the registration; after `run` was cancelled.

        Raises:
            Unavailable: NATS is away; the lease will end by itself.
        """
        if not self.removed:
            await self._bucket.remove(self.name)
        self._written = None
        self._unsettle()

    def _unsettle(self) -> None:
        self.registered.clear()
        if not self.removed:
            self._settled.clear()

    async def _keep(self) -> None:
        wanted = self._wanted
        if self.removed:
            return
        try:
            outcome: Stored | Gone = await self._bucket.change(
                self.name, self._written, lambda stored: _as_wanted(stored, wanted)
            )
        except InvalidArgument as error:
            log.warning("replacing the unreadable registration of worker %s: %s", self.name.worker_id, error)
            outcome = Gone.LOST
        if outcome is Gone.REMOVED and self._written is not None:
            self.removed = True
            self.registered.clear()
            self.problem = "somebody removed it; it is not registered again by this process"
            self._settled.set()
            log.warning("worker %s: %s", self.name.worker_id, self.problem)
            return
        if isinstance(outcome, Gone):
            if self._written is not None:
                log.warning("the lease of worker %s had expired: registered again", self.name.worker_id)
            outcome = replace(wanted, revision=await self._bucket.put(wanted))
        self._written = outcome
        self.problem = ""
        if wanted is self._wanted:
            self.registered.set()
            self._settled.set()


def _as_wanted(stored: Stored, wanted: Stored) -> Stored:
    draining = stored.spec.draining or wanted.spec.draining
    return replace(wanted, spec=wanted.spec.with_draining(draining), revision=stored.revision)
