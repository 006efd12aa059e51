"""Health checks of engines, so that no request has to find out.

Each worker with an API that has `/health` is checked once a period, at moments of its own. What puts out tokens is well
and is not checked; what has no such path answers, which is enough.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable

from kvscout_common.http.http import HttpClient, HttpFailed, HttpRequest
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.worker import EngineKind, WorkerSpec
from kvscout_gateway.engines.health import WorkerHealth

log = logging.getLogger("kvscout.gateway")

CHECKED = frozenset({EngineKind.VLLM, EngineKind.SGLANG, EngineKind.MOCK})
"""Engines that have a health URL."""
TIMEOUT_SECONDS = 2.0
GROUP_SECONDS = 0.5
"""Between two groups of checks of a large fleet, each of which is one wake-up."""
CONCURRENT_CHECKS = 32
"""Checks under way: a fleet that hangs costs no more connections."""
BODY_BYTES = 64 * 1024


class HealthChecks:
    """The health checks of one gateway."""

    def __init__(
        self,
        client: HttpClient,
        health: WorkerHealth,
        workers: Callable[[], Iterable[WorkerSpec]],
        has_output: Callable[[WorkerSpec, float], bool],
        lost: Callable[[WorkerSpec, str, float], object],
        *,
        period_seconds: float,
    ) -> None:
        """Ask nobody yet.

        Args:
            client: Reaches engines.
            health: Told of what is found.
            workers: Those that are registered now.
            has_output: Tells whether a worker has put out anything within that many seconds.
            lost: Told of each failed check of a worker that gets no requests for that: what was wrong, and when it was
                checked on the loop's clock. What waits for it waits in vain.
            period_seconds: Between two checks of a worker.
        """
        self._client = client
        self._health = health
        self._workers = workers
        self._has_output = has_output
        self._lost = lost
        self._period = period_seconds
        self._places = asyncio.Semaphore(CONCURRENT_CHECKS)
        self._warnings = RateLimitedLog(log, period_seconds=10.0)

    async def run(self) -> None:
        """Check, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self.round(group)

    async def round(self, group: asyncio.TaskGroup) -> None:
        """Begin one check of each worker, spread over a period."""
        due = [spec for spec in self._workers() if spec.http_endpoint and spec.engine in CHECKED]
        random.shuffle(due)
        count = max(1, min(len(due), int(self._period / GROUP_SECONDS)))
        for place in range(count):
            await asyncio.sleep(self._period / count * random.uniform(0.5, 1.5))
            for spec in due[place::count]:
                if self._has_output(spec, self._period):
                    self._report(spec)
                    continue
                await self._places.acquire()
                group.create_task(self._check(spec), name=f"check {spec.worker_id}")

    async def _check(self, spec: WorkerSpec) -> None:
        asked_at = asyncio.get_running_loop().time()
        try:
            problem = await self._ask(spec)
        finally:
            self._places.release()
        if problem:
            self._warnings.warning(spec.worker_id, "worker %s: %s", spec.worker_id, problem)
        self._report(spec, problem)
        if self._health.is_silent(spec.tenant, spec.worker_id):
            self._lost(spec, f"does not answer its health checks: {problem}", asked_at)

    async def _ask(self, spec: WorkerSpec) -> str:
        """Return what is wrong with it; "" = nothing."""
        request = HttpRequest(f"{spec.http_endpoint}/health", method="GET")
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                answer = await self._client.send(request, connect_seconds=TIMEOUT_SECONDS)
                await answer.read(BODY_BYTES)
        except HttpFailed as error:
            return f"{request.url}: {error}"
        except TimeoutError:
            return f"{request.url}: no answer within {TIMEOUT_SECONDS:g} s"
        return f"{request.url} answers {answer.status}" if answer.status >= 500 else ""

    def _report(self, spec: WorkerSpec, problem: str = "") -> None:
        if self._health.checked(spec.tenant, spec.worker_id, problem):
            gets = "no requests: it does not answer its health checks" if problem else "requests again"
            log.warning("worker %s gets %s", spec.worker_id, gets)
