"""Health checks of engines, so that no request has to find out.

Each worker with an API that has `/health` is checked once a period, at moments of its own. What puts out tokens is well
and is not checked; what has no such path answers, which is enough. Whoever is in doubt is checked at once: a request to
it failed, or waits for output and none comes, or it missed its last check.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Protocol

from kvscout_common.http.http import HttpClient, HttpFailed, HttpRequest
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.worker import ALL_TENANTS, EngineKind, WorkerSpec
from kvscout_gateway.engines.health import WorkerHealth

log = logging.getLogger("kvscout.gateway")

CHECKED = frozenset({EngineKind.VLLM, EngineKind.SGLANG, EngineKind.MOCK})
"""Engines that have a health URL."""
TIMEOUT_SECONDS = 2.0
GROUP_SECONDS = 0.5
"""Between two groups of checks of a large fleet, each of which is one wake-up."""
LOOK_SECONDS = 0.5
"""Between two looks for workers in doubt."""
DOUBT_SECONDS = 1.0
"""Shortest time between two checks of a worker; silence for so long, while a request waits, puts it in doubt."""
CHECK_ALL_SECONDS = 2.5
"""Longest wait of whoever wants all workers checked."""
FRESH_SECONDS = 0.25
"""Age of a check up to which it is not made again for whoever wants all workers checked."""
CONCURRENT_CHECKS = 32
"""Checks under way: a fleet that hangs costs no more connections."""
BODY_BYTES = 64 * 1024


class Outputs(Protocol):
    """Outputs of workers, as observed: `Observations`."""

    def has_output_within(self, spec: WorkerSpec, seconds: float) -> bool:
        """Tell whether a worker has put out anything within that many seconds."""

    def silent(self, seconds: float) -> list[tuple[str, str]]:
        """Return who has put out nothing for so long though requests wait, by tenant and worker id."""

    def lose(self, spec: WorkerSpec, problem: str, asked_at: float, silent_seconds: float) -> None:
        """Take a failed check of a worker that gets no requests for that: what waits for it waits in vain.

        Args:
            spec: The worker.
            problem: What was wrong.
            asked_at: When it was checked, on the loop's clock.
            silent_seconds: For how long it has failed its checks.
        """


class HealthChecks:
    """The health checks of one gateway."""

    def __init__(
        self,
        client: HttpClient,
        health: WorkerHealth,
        workers: Callable[[], Iterable[WorkerSpec]],
        outputs: Outputs,
        *,
        period_seconds: float,
    ) -> None:
        """Ask nobody yet.

        Args:
            client: Reaches engines.
            health: Told of what is found.
            workers: Those that are registered now.
            outputs: Knows who has put out something, and is told who is lost.
            period_seconds: Between two checks of a worker.
        """
        self._client = client
        self._health = health
        self._workers = workers
        self._outputs = outputs
        self._period = period_seconds
        self._places = asyncio.Semaphore(CONCURRENT_CHECKS)
        self._warnings = RateLimitedLog(log, period_seconds=10.0)
        self._group: asyncio.TaskGroup | None = None
        """None = no checks are made."""
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Checks under way, by tenant and worker id."""
        self._asked_at: dict[tuple[str, str], float] = {}
        """When each worker was last checked, on the loop's clock."""
        self._failed: set[tuple[str, str]] = set()
        """Workers that failed a request since they were last checked."""

    async def run(self) -> None:
        """Check, for ever."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._watch(), name="watch engines in doubt")
            while True:
                await self._round()

    def failed(self, tenant: str, worker_id: str) -> None:
        """Take the failure of a request: the worker is checked at once."""
        if self._group is not None:
            self._failed.add((tenant, worker_id))

    async def check_all(self, tenant: str) -> None:
        """Check all workers of a tenant, "*" = of all, but those that have just been checked."""
        if self._group is None:
            return
        recent = asyncio.get_running_loop().time() - FRESH_SECONDS
        due = [
            spec
            for spec in self._due()
            if tenant in (ALL_TENANTS, spec.tenant) and self._asked_at.get(_name(spec), recent) <= recent
        ]
        for spec in due:
            self._begin(spec)
        if checks := [self._running[_name(spec)] for spec in due if _name(spec) in self._running]:
            await asyncio.wait(checks, timeout=CHECK_ALL_SECONDS)

    def _due(self) -> list[WorkerSpec]:
        return [spec for spec in self._workers() if spec.http_endpoint and spec.engine in CHECKED]

    async def _round(self) -> None:
        """Begin one check of each worker, spread over a period."""
        due = self._due()
        for gone in self._asked_at.keys() - {_name(spec) for spec in due}:
            del self._asked_at[gone]
        random.shuffle(due)
        count = max(1, min(len(due), int(self._period / GROUP_SECONDS)))
        for place in range(count):
            await asyncio.sleep(self._period / count * random.uniform(0.5, 1.5))
            for spec in due[place::count]:
                if self._outputs.has_output_within(spec, self._period):
                    self._report(spec)
                    continue
                await self._places.acquire()
                self._places.release()
                self._begin(spec)

    async def _watch(self) -> None:
        """Check whoever is in doubt, for ever."""
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            doubtful = {*self._health.doubtful(), *self._outputs.silent(DOUBT_SECONDS), *self._failed}
            if not doubtful:
                continue
            due = {_name(spec): spec for spec in self._due()}
            for name in doubtful - due.keys():  # removed, or no longer checked
                self._failed.discard(name)
                self._health.forget(*name)
            for name in doubtful & due.keys():
                spec, asked_at = due[name], self._asked_at.get(name, float("-inf"))
                if now() - asked_at < DOUBT_SECONDS or self._places.locked():
                    continue
                self._failed.discard(name)
                if self._outputs.has_output_within(spec, DOUBT_SECONDS):
                    self._report(spec)
                else:
                    self._begin(spec)

    def _begin(self, spec: WorkerSpec) -> None:
        """Begin a check, unless one of the worker is under way."""
        name = _name(spec)
        if self._group is not None and name not in self._running:
            self._running[name] = self._group.create_task(self._check(spec), name=f"check {spec.worker_id}")

    async def _check(self, spec: WorkerSpec) -> None:
        try:
            async with self._places:
                self._asked_at[_name(spec)] = asked_at = asyncio.get_running_loop().time()
                problem = await self._ask(spec)
        finally:
            del self._running[_name(spec)]
        if problem:
            self._warnings.warning(spec.worker_id, "worker %s: %s", spec.worker_id, problem)
        self._report(spec, problem)
        if self._health.is_silent(spec.tenant, spec.worker_id):
            silent_seconds = self._health.silent_seconds(spec.tenant, spec.worker_id)
            self._outputs.lose(spec, f"does not answer its health checks: {problem}", asked_at, silent_seconds)

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


def _name(spec: WorkerSpec) -> tuple[str, str]:
    return spec.tenant, spec.worker_id
