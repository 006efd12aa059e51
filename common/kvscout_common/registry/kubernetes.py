"""Workers that are pods of Kubernetes: selected by labels or by an InferencePool, followed by the API's watch.

::

    pod is Ready                          worker
    not Ready, or being deleted           draining: nothing new, what runs and what is known of its cache stay
    deleted, ended, another of its name   removed
    the API is away                       as last known

A pod becomes a worker when it is first Ready; what it leaves open of model, block size and engine comes from its
engine then, and again after a container of it was restarted.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import aiohttp

from kvscout_common.errors import InvalidArgument, Unavailable
from kvscout_common.http.factory import http_client
from kvscout_common.http.http import HttpClient
from kvscout_common.kubernetes.access import KubernetesAccess, find_access
from kvscout_common.kubernetes.listing import ListWatch, api_session
from kvscout_common.kubernetes.objects import InferencePool, ObjectProblem, Pod
from kvscout_common.registry.engine_discovery import (
    CONCURRENT_QUERIES,
    FIRST_RETRY_SECONDS,
    LAST_RETRY_SECONDS,
    EngineQuery,
)
from kvscout_common.registry.engine_facts import EngineFacts
from kvscout_common.registry.engine_query import query_engine
from kvscout_common.registry.pod_selection import PodWorker, Selection
from kvscout_common.registry.registry import Registry, Source, WorkerName
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.worker import ALL_TENANTS, WorkerSpec

log = logging.getLogger("kvscout.registry")

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
PODS = "/api/v1/namespaces/{}/pods"
PODS_A_SLICE = 32
"""Pods examined in a row: a few milliseconds, after which other tasks run."""
REFRESH_SECONDS = 60.0
"""Interval at which all pods are examined again: another source may have let go of a worker of theirs."""
WARNED_PODS = 20
"""Pods of one selection that warnings name; the others are counted."""


class _Life(NamedTuple):
    """One life of one engine: what it reported holds as long."""

    uid: str
    restarts: int
    endpoint: str


@dataclass(slots=True)
class _Question:
    """Query of an engine, running or over."""

    life: _Life
    task: asyncio.Task[None]
    facts: EngineFacts | None = None
    """Facts of this life of the engine, or, until it has answered, of the one before."""
    problem: str = ""
    tried: bool = False


class _Offer(NamedTuple):
    """Workers that a pod offers, computed once for as long as it and the pool do not change."""

    pod: Pod
    pool: InferencePool | None
    workers: Sequence[PodWorker]
    problem: str


class _Spec(NamedTuple):
    """A worker, worked out once for as long as what it is made from stands."""

    worker: PodWorker
    facts: EngineFacts | None
    spec: WorkerSpec


class _Standing(NamedTuple):
    """Result of one pod."""

    specs: dict[WorkerName, WorkerSpec]
    uid: str
    worker_ids: frozenset[str]
    """Ids of the workers of all its ports, also of those that are not known yet."""


_GONE = _Standing({}, "", frozenset())


@dataclass(slots=True)
class _Followed:
    """One selection and what is known of it."""

    selection: Selection
    namespace: str
    pools: ListWatch[InferencePool] | None
    pods: ListWatch[Pod] | None = None
    labels: str = ""
    """Selection of `pods`."""
    following: asyncio.Task[None] | None = None
    admitted: dict[str, str] = field(default_factory=dict)
    """The uids of the pods that have been Ready, by key."""
    offers: dict[str, _Offer] = field(default_factory=dict)
    """Offer of each pod."""
    problems: dict[str, dict[str, str]] = field(default_factory=dict)
    """By pod: the pod, or ports of it, that are no workers, and why."""

    @property
    def pool(self) -> InferencePool | None:
        """The pool of now, if the selection names one that is there."""
        return next(iter(self.pools.objects.values()), None) if self.pools is not None else None

    def offer(self, pod: Pod) -> _Offer:
        """Return what a pod has to offer."""
        known = self.offers.get(pod.key)
        if known is not None and known.pod is pod and known.pool is self.pool:
            return known
        workers: Sequence[PodWorker] = ()
        problem = ""
        try:
            workers = self.selection.workers(pod, self.pool)
        except (ObjectProblem, InvalidArgument) as error:
            problem = str(error)
        self.offers[pod.key] = made = _Offer(pod, self.pool, workers, problem)
        return made

    @property
    def listed(self) -> bool:
        """Return whether everything was read once."""
        if self.pools is not None and not self.pools.listed:
            return False
        return self.pods.listed if self.pods is not None else self.pools is not None


class KubernetesWorkers:
    """Keeps a registry equal to what selections select. `run` is a task of the process.

    Args:
        selections: As `Selection.parse` reads them.
        registry: What is kept.
        kubeconfig: How the API is reached; None = as a pod does, or kubectl.
        access: How it is reached; None = by `kubeconfig`.
        query: Query of an engine.

    Raises:
        ConfigError: A selection is wrong, or there is no way to the API.
    """

    def __init__(
        self,
        selections: Sequence[str],
        registry: Registry,
        kubeconfig: Path | None = None,
        *,
        access: KubernetesAccess | None = None,
        query: EngineQuery = query_engine,
    ) -> None:
        parsed = [Selection.parse(text) for text in selections]
        self._access = access or find_access(kubeconfig)
        self._registry = registry
        self._query = query
        self._changed = asyncio.Event()
        self._stale: dict[str, None] = {}
        """Keys of the pods to be looked at, in order."""
        self._standings: dict[str, _Standing] = {}
        """By pod."""
        self._replaced = False
        """Workers of pods that are gone, from an earlier life of this process, are removed."""
        self._slots = asyncio.Semaphore(CONCURRENT_QUERIES)
        self._questions: dict[str, _Question] = {}
        """By worker id."""
        self._specs: dict[str, _Spec] = {}
        """By worker id."""
        self._followed = [self._begin(selection) for selection in parsed]
        self.read = asyncio.Event()
        """Set when everything was listed, and every engine that is up queried once."""

    def warnings(self) -> list[Warned]:
        """Return what an operator should know, one sentence each."""
        found = []
        for followed in self._followed:
            of = f"kubernetes {followed.selection.text!r}"
            for source in (followed.pools, followed.pods):
                if source is not None and source.problem:
                    found.append(f"{of} is not followed, what is known stays ({len(source.objects)}): {source.problem}")
                if source is not None and source.unreadable:
                    found.append(f"{of}: {source.unreadable}")
            if followed.pools is not None and followed.pools.listed and followed.pool is None:
                found.append(f"{of}: there is no such InferencePool in namespace {followed.namespace!r}")
            count = sum(map(len, followed.problems.values()))
            problems = itertools.chain.from_iterable(one.items() for one in followed.problems.values())
            found += [f"pod {name} is not a worker: {why}" for name, why in heapq.nsmallest(WARNED_PODS, problems)]
            if count > WARNED_PODS:
                found.append(f"{of}: {count - WARNED_PODS} more pods are not workers")
        return [TenantWarning(ALL_TENANTS, text) for text in found]

    async def run(self) -> None:
        """Follow the selections for ever."""
        async with api_session() as http, http_client() as engines, asyncio.TaskGroup() as tasks:
            for followed in self._followed:
                if followed.pools is not None:
                    tasks.create_task(followed.pools.run(http), name=f"kubernetes {followed.selection.text}")
            while True:
                self._changed.clear()
                for followed in self._followed:
                    self._follow_pods(followed, http, tasks)
                await self._reconcile(engines, tasks)
                try:
                    async with asyncio.timeout(REFRESH_SECONDS):
                        await self._changed.wait()
                except TimeoutError:
                    self._all_changed(())

    def _begin(self, selection: Selection) -> _Followed:
        namespace = selection.namespace or self._access.namespace
        if not selection.pool:
            return _Followed(selection, namespace, None)
        named = {"fieldSelector": f"metadata.name={selection.pool}"}
        path = POOLS.format(namespace)
        pools = ListWatch(self._access, path, named, InferencePool.read, self._all_changed)
        return _Followed(selection, namespace, pools)

    def _follow_pods(self, followed: _Followed, http: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        """See to it that the pods of a selection are followed: those of a pool are others when its selector is."""
        labels = followed.selection.labels
        if followed.pools is not None:
            if not followed.pools.listed:
                return
            labels = followed.pool.selector if followed.pool is not None else ""
        if labels == followed.labels and (followed.pods is not None or not labels):
            return
        if followed.following is not None:
            followed.following.cancel()
        followed.labels, before = labels, followed.pods
        followed.pods = followed.following = None
        if before is not None:
            self._stale.update(dict.fromkeys(before.objects))
        if labels:
            path = PODS.format(followed.namespace)
            followed.pods = ListWatch(self._access, path, {"labelSelector": labels}, Pod.read, self._pods_changed)
            if before is not None:
                followed.pods.objects = dict(before.objects)  # until the new ones are listed
            followed.following = tasks.create_task(followed.pods.run(http), name=f"kubernetes pods {labels}")

    def _pods_changed(self, keys: Collection[str]) -> None:
        self._stale.update(dict.fromkeys(keys))
        self._changed.set()

    def _all_changed(self, _: Collection[str]) -> None:
        for followed in self._followed:
            if followed.pods is not None:
                self._stale.update(dict.fromkeys(followed.pods.objects))
        self._changed.set()

    async def _reconcile(self, http: HttpClient, tasks: asyncio.TaskGroup) -> None:
        """Make the registry's workers those of the pods that have changed, as they are known now."""
        while self._stale:
            keys = list(itertools.islice(self._stale, PODS_A_SLICE))
            for key in keys:
                del self._stale[key]
                self._look_at(key, http, tasks)
            await asyncio.sleep(0)
        if not all(followed.listed for followed in self._followed):
            return
        if not self._replaced:
            # Of what was not listed yet, an earlier life of this process may have registered others.
            self._replaced = True
            known = {name for standing in self._standings.values() for name in standing.specs}
            registered = self._registry.names_of_source(Source.KUBERNETES)
            self._registry.remove_from_source(Source.KUBERNETES, [name for name in registered if name not in known])
        if not self.read.is_set() and all(question.tried for question in self._questions.values()):
            self.read.set()

    def _look_at(self, key: str, http: HttpClient, tasks: asyncio.TaskGroup) -> None:
        """Write what one pod comes to into the registry."""
        old = self._standings.get(key, _GONE)
        new = self._standing(key, http, tasks)
        if new.worker_ids or new.specs:
            self._standings[key] = new
        else:
            self._standings.pop(key, None)
        for worker_id in old.worker_ids - new.worker_ids:
            if (question := self._questions.pop(worker_id, None)) is not None:
                question.task.cancel()
            self._specs.pop(worker_id, None)
        # What is known of a pod's cache and its requests is nothing of the next one of that name.
        kept = new.specs.keys() if new.uid == old.uid else ()
        self._registry.remove_from_source(Source.KUBERNETES, [name for name in old.specs if name not in kept])
        self._registry.add_to_source(Source.KUBERNETES, new.specs.values())

    def _standing(self, key: str, http: HttpClient, tasks: asyncio.TaskGroup) -> _Standing:
        """Return what a pod comes to by all selections; of two that select it, the first counts."""
        specs: dict[WorkerName, WorkerSpec] = {}
        uid, worker_ids = "", set[str]()
        for followed in self._followed:
            problems: dict[str, str] = {}
            followed.problems.pop(key, None)
            pod = followed.pods.objects.get(key) if followed.pods is not None else None
            if pod is None:
                followed.admitted.pop(key, None)
                followed.offers.pop(key, None)
                continue
            if pod.ended or not pod.ip:
                continue
            up = pod.ready and not pod.deleting
            if up:
                followed.admitted[key] = pod.uid
            if followed.admitted.get(key) != pod.uid:
                continue
            uid = uid or pod.uid
            offer = followed.offer(pod)
            if offer.problem:
                problems[key] = offer.problem
            for worker in offer.workers:
                worker_ids.add(worker.worker_id)
                try:
                    spec = self._spec(worker, pod, http, tasks)
                    self._registry.admit(spec)
                except (Unavailable, InvalidArgument) as error:
                    problems[worker.worker_id] = str(error)
                    continue
                specs.setdefault(WorkerName(spec.tenant, spec.worker_id), spec if up else spec.with_draining(True))
            if problems:
                followed.problems[key] = problems
        return _Standing(specs, uid, frozenset(worker_ids))

    def _spec(self, worker: PodWorker, pod: Pod, http: HttpClient, tasks: asyncio.TaskGroup) -> WorkerSpec:
        """Return a worker completed with what its engine reported.

        Raises:
            Unavailable: It has not reported yet what is open.
            InvalidArgument: What it reported is wrong.
        """
        if not worker.shared.open:
            return self._made(worker, None)
        life = _Life(pod.uid, pod.restarts, worker.http_endpoint)
        question = self._questions.get(worker.worker_id)
        if question is None or (question.life != life and pod.ready):
            facts = None
            if question is not None:
                question.task.cancel()
                facts = question.facts if question.life.uid == pod.uid else None
            task = tasks.create_task(self._learn(worker, pod.key, http), name=f"query {worker.worker_id}")
            question = self._questions[worker.worker_id] = _Question(life, task, facts)
        if question.facts is None:
            raise Unavailable(question.problem or f"{worker.http_endpoint} has not answered yet")
        return self._made(worker, question.facts)

    def _made(self, worker: PodWorker, facts: EngineFacts | None) -> WorkerSpec:
        known = self._specs.get(worker.worker_id)
        if known is None or known.worker is not worker or known.facts is not facts:
            spec = worker.shared.worker(worker.worker_id, worker.http_endpoint, facts)
            known = self._specs[worker.worker_id] = _Spec(worker, facts, spec)
        return known.spec

    async def _learn(self, worker: PodWorker, pod_key: str, http: HttpClient) -> None:
        """Ask an engine until it answers."""
        pause = FIRST_RETRY_SECONDS
        while True:
            try:
                async with self._slots:
                    facts = await self._query(http, worker.http_endpoint, worker.shared.engine)
                worker.shared.worker(worker.worker_id, worker.http_endpoint, facts)
            except (Unavailable, InvalidArgument) as error:
                question = self._questions[worker.worker_id]
                if not question.problem:
                    log.warning("pod worker %s is not registered yet: %s", worker.worker_id, error)
                question.problem, question.tried = str(error), True
                self._pods_changed((pod_key,))
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_RETRY_SECONDS)
            else:
                question = self._questions[worker.worker_id]
                question.facts, question.problem, question.tried = facts, "", True
                self._pods_changed((pod_key,))
                return
