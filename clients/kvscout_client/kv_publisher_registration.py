"""A worker's registration at one service, by rpc, for as long as its process runs."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from kvscout.v1 import workers_pb2
from kvscout_common.errors import FailedPrecondition, KvscoutError
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.registry.leases import RENEWALS, RETRY_SECONDS
from kvscout_common.registry.worker_proto import spec_to_proto
from kvscout_common.rpc.channel import call
from kvscout_common.worker import WorkerSpec

log = logging.getLogger("kvscout.publisher")

CALL_SECONDS: Final = 2.0
REMOVE_SECONDS: Final = 1.0


class RpcRegistration:
    """Registers a worker, renews its lease, and registers it again where it is not known any more.

    Draining, which operators set, is retained where this process registers a worker that is there already.

    Args:
        stub: Stub of a service with the worker rpcs.
        address: Its address, for people.
        spec: The worker.
        lease_seconds: The registration is gone this long after the process.
    """

    def __init__(self, stub: Any, address: str, spec: WorkerSpec, *, lease_seconds: int) -> None:
        self.registered = asyncio.Event()
        """Set while the worker is registered, as far as is known."""
        self.problem = "not registered yet"
        """Reason for which it is not registered, or not renewed; "" = it is."""
        self._stub = stub
        self._address = address
        self._spec = spec
        self._lease_seconds = lease_seconds
        self._changed = asyncio.Event()
        self.times = 0
        """Number of times that this process has registered it."""
        self._warnings = RateLimitedLog(log)

    def lost(self) -> None:
        """Register again: the service does not know the worker."""
        self.registered.clear()
        self._changed.set()

    async def run(self) -> None:
        """Keep the registration until cancelled."""
        while True:
            self._changed.clear()
            pause = self._lease_seconds / RENEWALS
            try:
                await self._keep()
                self.problem = ""
                self.registered.set()
            except KvscoutError as error:
                self.problem = str(error)
                pause = RETRY_SECONDS
                self._warnings.warning(
                    "keep", "worker %s is not renewed at %s: %s", self._spec.worker_id, self._address, error
                )
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                pass  # time to renew

    async def remove(self) -> None:
        """Remove it, after `run` has ended; where that fails the lease ends by itself."""
        if not self.registered.is_set():
            return
        request = workers_pb2.RemoveWorkerRequest(tenant=self._spec.tenant, worker_id=self._spec.worker_id)
        try:
            await call(self._stub.RemoveWorker, request, timeout=REMOVE_SECONDS)
        except KvscoutError as error:
            log.warning(
                "the registration of worker %s at %s was not removed: %s", self._spec.worker_id, self._address, error
            )

    async def _keep(self) -> None:
        spec = self._spec
        if self.times:
            alive = workers_pb2.KeepAliveRequest(tenant=spec.tenant, worker_ids=[spec.worker_id])
            if not (await call(self._stub.KeepAlive, alive, timeout=CALL_SECONDS)).unknown_worker_ids:
                return
            log.warning("worker %s was no longer registered at %s: registered again", spec.worker_id, self._address)
        listing = workers_pb2.ListWorkersRequest(tenant=spec.tenant, model=spec.model)
        workers = (await call(self._stub.ListWorkers, listing, timeout=CALL_SECONDS)).workers
        known = next((entry.worker for entry in workers if entry.worker.worker_id == spec.worker_id), None)
        if known is not None:
            spec = spec.with_draining(known.draining)
        request = workers_pb2.RegisterWorkerRequest(
            tenant=spec.tenant, worker=spec_to_proto(spec), lease_seconds=self._lease_seconds
        )
        try:
            await call(self._stub.RegisterWorker, request, timeout=CALL_SECONDS)
        except FailedPrecondition as error:
            if known is None:
                raise
            # A file or DNS names it; that registration holds.
            log.warning(
                "the registration of worker %s at %s could not be renewed: %s", spec.worker_id, self._address, error
            )
        self.times += 1
