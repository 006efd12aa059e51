"""Completes registrations with what the engines report: a worker may be registered with its HTTP endpoint alone.

One task an engine that is queried: until it answers, with pauses that grow, and then again once in a while, since
an engine behind the same address may be restarted with other flags.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from kvscout_common.errors import InvalidArgument, Unavailable
from kvscout_common.http.factory import http_client
from kvscout_common.http.http import HttpClient
from kvscout_common.registry.engine_facts import EngineFacts, lacks_event_endpoints
from kvscout_common.registry.engine_query import query_engine
from kvscout_common.registry.registry import Registry, WorkerName
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.worker import EngineKind, WorkerSpec

log = logging.getLogger("kvscout.discovery")

FIRST_RETRY_SECONDS = 0.5
LAST_RETRY_SECONDS = 10.0
AGAIN_SECONDS = 60.0
"""Seconds until an engine that answered is queried again."""
QUERIES_PER_SECOND = 5.0
"""Most queries of a fleet whose engines do not answer, or are queried again: pauses grow with their number."""
CONCURRENT_QUERIES = 32

EngineQuery = Callable[[HttpClient, str, EngineKind | None], Awaitable[EngineFacts]]


class Discovery:
    """Asks the engines of a registry; a listener of it. `run` is a task of the process.

    Args:
        registry: What is completed (`Registry.complete`).
        wanted: Predicate of the workers, as registered, that are queried.
        query: How.
    """

    def __init__(
        self,
        registry: Registry,
        wanted: Callable[[WorkerSpec], bool] = lacks_event_endpoints,
        query: EngineQuery = query_engine,
    ) -> None:
        self._registry = registry
        self._wanted = wanted
        self._query = query
        self._changed = asyncio.Event()
        self._tasks: dict[WorkerName, tuple[WorkerSpec, asyncio.Task[None]]] = {}
        self._problems: dict[WorkerName, str] = {}
        self._slots = asyncio.Semaphore(CONCURRENT_QUERIES)
        registry.listen(self)

    def warnings(self) -> list[Warned]:
        """Return what an operator should know, one sentence a worker."""
        return [
            TenantWarning(name.tenant, f"worker {name.worker_id}: {why}")
            for name, why in sorted(self._problems.items())
        ]

    def worker_added(self, spec: WorkerSpec) -> None:
        """Look at it soon."""
        self._changed.set()

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        """Look at it soon."""
        self._changed.set()

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        """End its queries."""
        self._changed.set()

    async def run(self) -> None:
        """Query engines for ever."""
        async with http_client() as http:
            try:
                while True:
                    self._changed.clear()
                    self._compare(http)
                    await self._changed.wait()
            finally:
                running = [task for _, task in self._tasks.values()]
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def _compare(self, http: HttpClient) -> None:
        """Start to query the workers that are to be, as they are registered now, and stop for the others."""
        wanted = {entry.name: entry.registered for entry in self._registry.entries() if self._wanted(entry.registered)}
        for name, (spec, task) in list(self._tasks.items()):
            if task.done():
                task.result()  # a defect of ours ends the process
            if wanted.get(name) != spec:
                task.cancel()
                del self._tasks[name]
                self._problems.pop(name, None)
        for name, spec in wanted.items():
            if name not in self._tasks:
                task = asyncio.create_task(self._follow(http, name, spec), name=f"discovery {name.worker_id}")
                task.add_done_callback(self._ended)
                self._tasks[name] = (spec, task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._changed.set()

    async def _follow(self, http: HttpClient, name: WorkerName, spec: WorkerSpec) -> None:
        pause = FIRST_RETRY_SECONDS
        while True:
            try:
                async with self._slots:
                    facts = await self._query(http, spec.http_endpoint, spec.engine)
            except Unavailable as error:
                self._tell(name, f"its engine is not known yet: {error.message}")
                await asyncio.sleep(max(pause, len(self._problems) / QUERIES_PER_SECOND))
                pause = min(2 * pause, LAST_RETRY_SECONDS)
                continue
            pause = FIRST_RETRY_SECONDS
            self._take(name, facts)
            await asyncio.sleep(max(AGAIN_SECONDS, len(self._tasks) / QUERIES_PER_SECOND))

    def _take(self, name: WorkerName, facts: EngineFacts) -> None:
        entry = self._registry.find(name)
        if entry is None:
            return  # removed in this iteration of the loop: this task is about to be cancelled
        found = []
        if not facts.event_endpoints:
            found.append("the engine reports no event endpoints: start it with KV events, or register them")
        try:
            self._registry.admit(facts.complete(entry.registered))
        except InvalidArgument as error:
            found.append(f"of what the engine reports, {error}")
            facts = replace(facts, event_endpoints=())
        self._registry.complete(*name, facts)
        found = [*facts.contradictions(self._registry.get(*name).spec).values(), *found]
        self._tell(name, "; ".join(found))

    def _tell(self, name: WorkerName, problem: str) -> None:
        if problem and self._problems.get(name) != problem:
            log.warning("worker %s: %s", name.worker_id, problem)
        if problem:
            self._problems[name] = problem
        else:
            self._problems.pop(name, None)
