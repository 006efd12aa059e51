"""Workers that are pods of Kubernetes: selected by labels or by an InferencePool, followed by the API's watch.

::

    pod is Ready                          worker
    not Ready, or being deleted           draining: nothing new, what runs and what is known of its cache stay
    deleted, ended, another of its name   removed
    the API is away                       as last known

A pod becomes a worker when it is first Ready; what it leaves open of model, block size and engine is asked of its
engine then, and again after a container of it was restarted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import aiohttp

from kvscout_common.engine_discovery import ASKED_AT_ONCE, FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, Ask
from kvscout_common.engine_facts import EngineFacts
from kvscout_common.engine_http import asking_engines
from kvscout_common.engine_query import ask_engine
from kvscout_common.errors import InvalidArgument, Unavailable
from kvscout_common.kubernetes.access import KubernetesAccess, find_access
from kvscout_common.kubernetes.listing import ListWatch, api_session
from kvscout_common.kubernetes.objects import InferencePool, ObjectProblem, Pod
from kvscout_common.kubernetes.selection import PodWorker, Selection
from kvscout_common.registry import Registry, Source, WorkerName
from kvscout_common.service_info import TenantWarning, Warned
from kvscout_common.transport.http import HttpClient
from kvscout_common.worker import ALL_TENANTS, WorkerSpec

log = logging.getLogger("kvscout.registry")

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
PODS = "/api/v1/namespaces/{}/pods"
WARNED_PODS = 20
"""Of one selection, by name; the others are counted."""


class _Life(NamedTuple):
    """One life of one engine: what it told is true for so long."""

    uid: str
    restarts: int
    endpoint: str


@dataclass(slots=True)
class _Question:
    """What an engine is asked, or was."""

    life: _Life
    task: asyncio.Task[None]
    facts: EngineFacts | None = None
    """Of this life, or until it has answered of the one before."""
    problem: str = ""
    tried: bool = False


class _Offer(NamedTuple):
    """What a pod has to offer, worked out once for as long as it and the pool are what they are."""

    pod: Pod
    pool: InferencePool | None
    workers: Sequence[PodWorker]
    problem: str


class _Spec(NamedTuple):
    """A worker, worked out once for as long as what it is made from stands."""

    worker: PodWorker
    facts: EngineFacts | None
    spec: WorkerSpec


@dataclass(slots=True)
class _Followed:
    """One selection and what is known of it."""

    selection: Selection
    namespace: str
    pools: ListWatch[InferencePool] | None
    pods: ListWatch[Pod] | None = None
    labels: str = ""
    """What `pods` is selected by."""
    following: asyncio.Task[None] | None = None
    admitted: set[str] = field(default_factory=set)
    """Uids of the pods that have been Ready."""
    offers: dict[str, _Offer] = field(default_factory=dict)
    """What each pod was found to offer."""
    problems: dict[str, str] = field(default_factory=dict)
    """Pods, or ports of them, that are no workers, and why."""

    @property
    def pool(self) -> InferencePool | None:
        """The pool of now, if the selection names one that is there."""
        return next(iter(self.pools.objects.values()), None) if self.pools is not None else None

    def offer(self, pod: Pod) -> _Offer:
        """What a pod has to offer."""
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
        """Whether everything was read once."""
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
        ask: How an engine is asked.

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
        ask: Ask = ask_engine,
    ) -> None:
        parsed = [Selection.parse(text) for text in selections]
        self._access = access or find_access(kubeconfig)
        self._registry = registry
        self._ask = ask
        self._changed = asyncio.Event()
        self._slots = asyncio.Semaphore(ASKED_AT_ONCE)
        self._questions: dict[str, _Question] = {}
        """By worker id."""
        self._specs: dict[str, _Spec] = {}
        """By worker id."""
        self._uids: dict[WorkerName, str] = {}
        """Of the pods whose workers the registry was told."""
        self._followed = [self._begin(selection) for selection in parsed]
        self.read = asyncio.Event()
        """Set when everything was listed, and every engine that is up asked once."""

    def warnings(self) -> list[Warned]:
        """What an operator should know, one sentence each."""
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
            problems = sorted(followed.problems.items())
            found += [f"pod {name} is no worker: {why}" for name, why in problems[:WARNED_PODS]]
            if len(problems) > WARNED_PODS:
                found.append(f"{of}: {len(problems) - WARNED_PODS} more pods are no workers")
        return [TenantWarning(ALL_TENANTS, text) for text in found]

    async def run(self) -> None:
        """Follows the selections for ever."""
        async with api_session() as http, asking_engines() as engines, asyncio.TaskGroup() as tasks:
            for followed in self._followed:
                if followed.pools is not None:
                    tasks.create_task(followed.pools.run(http), name=f"kubernetes {followed.selection.text}")
            while True:
                self._changed.clear()
                for followed in self._followed:
                    self._follow_pods(followed, http, tasks)
                self._reconcile(engines, tasks)
                await self._changed.wait()

    def _begin(self, selection: Selection) -> _Followed:
        namespace = selection.namespace or self._access.namespace
        if not selection.pool:
            return _Followed(selection, namespace, None)
        named = {"fieldSelector": f"metadata.name={selection.pool}"}
        path = POOLS.format(namespace)
        return _Followed(
            selection, namespace, ListWatch(self._access, path, named, InferencePool.read, self._changed.set)
        )

    def _follow_pods(self, followed: _Followed, http: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        """Sees to it that the pods of a selection are followed: those of a pool are others when its selector is."""
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
        if labels:
            path = PODS.format(followed.namespace)
            followed.pods = ListWatch(self._access, path, {"labelSelector": labels}, Pod.read, self._changed.set)
            if before is not None:
                followed.pods.objects = before.objects  # until the new ones are listed
            followed.following = tasks.create_task(followed.pods.run(http), name=f"kubernetes pods {labels}")

    def _reconcile(self, http: HttpClient, tasks: asyncio.TaskGroup) -> None:
        """Makes the registry's workers those of the pods as they are known now."""
        specs: dict[WorkerName, WorkerSpec] = {}
        uids: dict[WorkerName, str] = {}
        asked: set[str] = set()
        for followed in self._followed:
            followed.problems.clear()
            pods = followed.pods.objects if followed.pods is not None else {}
            followed.admitted.intersection_update({pod.uid for pod in pods.values()})
            for key in followed.offers.keys() - pods.keys():
                del followed.offers[key]
            for pod in pods.values():
                if pod.ended or not pod.ip:
                    continue
                up = pod.ready and not pod.deleting
                if up:
                    followed.admitted.add(pod.uid)
                if pod.uid not in followed.admitted:
                    continue
                offer = followed.offer(pod)
                if offer.problem:
                    followed.problems[pod.key] = offer.problem
                for worker in offer.workers:
                    asked.add(worker.worker_id)
                    try:
                        spec = self._spec(worker, pod, http, tasks)
                        self._registry.admit(spec)
                    except (Unavailable, InvalidArgument) as error:
                        followed.problems[worker.worker_id] = str(error)
                        continue
                    name = WorkerName(spec.tenant, spec.worker_id)
                    specs.setdefault(name, spec if up else spec.with_draining(True))
                    uids.setdefault(name, pod.uid)
        for worker_id in self._questions.keys() - asked:
            self._questions.pop(worker_id).task.cancel()
        for worker_id in self._specs.keys() - asked:
            del self._specs[worker_id]
        if not all(followed.listed for followed in self._followed):
            # Of what is not listed yet, an earlier life of this process may have told others.
            self._registry.add_to_source(Source.KUBERNETES, specs.values())
        else:
            same = [spec for name, spec in specs.items() if self._uids.get(name, uids[name]) == uids[name]]
            if len(same) < len(specs):
                # What is known of a pod's cache and its requests is nothing of the next one of that name.
                self._registry.replace_source(Source.KUBERNETES, same)
            self._registry.replace_source(Source.KUBERNETES, specs.values())
            self._uids = uids
            if all(question.tried for question in self._questions.values()):
                self.read.set()

    def _spec(self, worker: PodWorker, pod: Pod, http: HttpClient, tasks: asyncio.TaskGroup) -> WorkerSpec:
        """A worker with what its engine told.

        Raises:
            Unavailable: It has not told yet what is open.
            InvalidArgument: What it told is wrong.
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
            task = tasks.create_task(self._learn(worker, http), name=f"ask {worker.worker_id}")
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

    async def _learn(self, worker: PodWorker, http: HttpClient) -> None:
        """Asks an engine until it answers."""
        pause = FIRST_RETRY_SECONDS
        while True:
            try:
                async with self._slots:
                    facts = await self._ask(http, worker.http_endpoint, worker.shared.engine)
                worker.shared.worker(worker.worker_id, worker.http_endpoint, facts)
            except (Unavailable, InvalidArgument) as error:
                question = self._questions[worker.worker_id]
                if not question.problem:
                    log.warning("pod worker %s is not known yet: %s", worker.worker_id, error)
                question.problem, question.tried = str(error), True
                self._changed.set()
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_RETRY_SECONDS)
            else:
                question = self._questions[worker.worker_id]
                question.facts, question.problem, question.tried = facts, "", True
                self._changed.set()
                return
