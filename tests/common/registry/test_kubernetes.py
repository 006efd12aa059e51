"""Pods as workers: what becomes of a worker as its pod comes, is not ready, drains, restarts and goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from support.kubernetes_api import PODS, POOLS, FakeApi, fake_api, pod, pool, refusal
from support.mocker_process import running_mocker
from support.processes import eventually, running

from kvscout.v1 import indexer_pb2_grpc, workers_pb2
from kvscout_common.errors import ConfigError, Unavailable
from kvscout_common.http.http import HttpClient
from kvscout_common.kubernetes import listing
from kvscout_common.kubernetes.access import KubernetesAccess
from kvscout_common.registry import kubernetes as registry_kubernetes
from kvscout_common.registry.engine_facts import EngineFacts
from kvscout_common.registry.kubernetes import KubernetesWorkers
from kvscout_common.registry.registry import Registry, Source
from kvscout_common.rpc.channel import call, open_channel
from kvscout_common.rpc.service_info import shown
from kvscout_common.worker import EngineKind, WorkerSpec


class Engines:
    """Engines that are up, what they tell, and which were asked."""

    def __init__(self) -> None:
        self.models = {"": "m"}
        self.down: set[str] = set()
        self.asked: list[str] = []

    async def __call__(self, http: HttpClient, url: str, kind: EngineKind | None) -> EngineFacts:
        self.asked.append(url)
        if url in self.down:
            raise Unavailable("not up")
        return EngineFacts(url, (), (self.models.get(url, self.models[""]),), 16, engine=EngineKind.SGLANG)


class World:
    """An API, engines, and a registry that follows both."""

    def __init__(self, api: FakeApi, *selections: str) -> None:
        self.api = api
        self.engines = Engines()
        self.registry = Registry(lambda: 0.0)
        self.received: list[str] = []
        self.registry.listen(self)
        access = KubernetesAccess(api.url, "default")
        self.workers = KubernetesWorkers(selections, self.registry, access=access, query=self.engines)

    def worker_added(self, spec: WorkerSpec) -> None:
        self.received.append(f"+{spec.worker_id}")

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        self.received.append(f"~{new.worker_id}")

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        self.received.append(f"-{spec.worker_id}:{reason}")

    @property
    def now(self) -> list[str]:
        """The workers, those that drain in brackets."""
        ids = ((e.spec.worker_id.removeprefix("default/"), e.spec.draining) for e in self.registry.entries())
        return [f"({worker_id})" if draining else worker_id for worker_id, draining in ids]

    async def until(self, *expected: str) -> None:
        async def there() -> bool:
            return self.now == list(expected)

        await eventually(there, deadline_seconds=20, what=f"{expected}, not {self.now}, {self.warnings}")

    @property
    def warnings(self) -> list[str]:
        return shown(self.workers.warnings())

    async def warned(self, words: str) -> None:
        async def told() -> bool:
            return any(words in warning for warning in self.warnings)

        await eventually(told, deadline_seconds=20, what=f"{words!r} in {self.warnings}")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(listing, "LAST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(registry_kubernetes, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(registry_kubernetes, "LAST_RETRY_SECONDS", 0.05)


@asynccontextmanager
async def world(*selections: str) -> AsyncIterator[World]:
    async with fake_api() as api:
        made = World(api, *selections)
        task = asyncio.create_task(made.workers.run())
        try:
            yield made
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_ready_pods_are_workers_with_what_their_engines_tell() -> None:
    async with world("app=vllm") as made:
        await made.api.put(PODS, pod("a", "10.0.0.1"), pod("starting", "10.0.0.2", ready=False), pod("new", ""))
        await made.until("a:8000")
        spec = made.registry.get("default", "default/a:8000").spec
        assert (spec.model, spec.block_size, spec.engine) == ("m", 16, EngineKind.SGLANG)
        assert made.engines.asked == ["http://10.0.0.1:8000"], "who is not ready is not asked"
        await made.workers.read.wait()
        assert made.warnings == []


async def test_a_worker_drains_while_its_pod_is_not_ready_or_is_deleted_and_goes_with_the_pod() -> None:
    async with world("app=vllm") as made:
        await made.api.put(PODS, pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
        await made.until("a:8000", "b:8000")
        await made.api.put(PODS, pod("a", "10.0.0.1", ready=False))
        await made.until("(a:8000)", "b:8000")
        await made.api.put(PODS, pod("a", "10.0.0.1"), pod("b", "10.0.0.2", deleting=True))
        await made.until("a:8000", "(b:8000)")
        await made.api.delete(PODS, "b")
        await made.until("a:8000")
        assert made.received[-1] == "-default/b:8000:kubernetes"
        assert made.received.count("+default/a:8000") == 1, "its index was kept"


async def test_an_ended_pod_is_no_worker_though_its_object_stays() -> None:
    async with world("app=vllm") as made:
        await made.api.put(PODS, pod("a", "10.0.0.1"))
        await made.until("a:8000")
        await made.api.put(PODS, pod("a", "10.0.0.1", phase="Failed", ready=False))
        await made.until()


async def test_another_pod_of_the_same_name_is_another_worker() -> None:
    async with world("app=vllm") as made:
        await made.api.put(PODS, pod("a-0", "10.0.0.1"))
        await made.until("a-0:8000")
        made.engines.models["http://10.0.0.2:8000"] = "other"
        await made.api.kill()
        await made.api.put(PODS, pod("a-0", "10.0.0.2", uid="second"))
        await made.api.expire()
        await made.api.start()
        await eventually(lambda: [e.spec.model for e in made.registry.entries()] == ["other"])
        assert "-default/a-0:8000:kubernetes" in made.received


async def test_an_engine_is_asked_again_once_its_container_was_restarted() -> None:
    async with world("app=vllm") as made:
        await made.api.put(PODS, pod("a", "10.0.0.1"))
        await made.until("a:8000")
        made.engines.models[""] = "new"
        await made.api.put(PODS, pod("a", "10.0.0.1", ready=False, restarts=1))
        await made.until("(a:8000)")
        assert len(made.engines.asked) == 1
        await made.api.put(PODS, pod("a", "10.0.0.1", restarts=1))
        await eventually(lambda: made.registry.get("default", "default/a:8000").spec.model == "new")
        assert made.now == ["a:8000"]


async def test_an_engine_that_does_not_answer_is_no_worker_yet_and_holds_up_no_other() -> None:
    async with world("app=vllm") as made:
        made.engines.down.add("http://10.0.0.1:8000")
        await made.api.put(PODS, pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
        await made.until("b:8000")
        await made.warned("default/a:8000 is not a worker: not up")
        made.engines.down.clear()
        await made.until("a:8000", "b:8000")
        assert made.warnings == []


async def test_a_pool_says_which_pods_and_which_ports_and_may_change_its_mind() -> None:
    async with world("pool/llama?event_port=5557") as made:
        await made.warned("no such InferencePool in namespace 'default'")
        await made.api.put(PODS, pod("a", "10.0.0.1"), pod("b", "10.0.0.2", labels={"app": "other"}))
        await made.api.put(POOLS, pool("llama", {"app": "vllm"}, 8000, 8001), pool("x", {"app": "other"}, 1))
        await made.until("a:8000", "a:8001")
        second = made.registry.get("default", "default/a:8001").spec
        assert (second.dp_start_rank, second.event_endpoints[0].endpoint) == (1, "tcp://10.0.0.1:5558")
        await made.api.put(POOLS, pool("llama", {"app": "vllm"}, 8000))
        await made.until("a:8000")
        await made.api.put(POOLS, pool("llama", {"app": "other"}, 8000))
        await made.until("b:8000")
        await made.api.delete(POOLS, "llama")
        await made.until()


async def test_a_cluster_without_inference_pools_is_said() -> None:
    async with world("pool/llama") as made:

        async def none(request: web.Request) -> web.StreamResponse:
            return refusal(404, "the server could not find the requested resource")

        made.api.override = none
        await made.warned("404, the server could not find the requested resource")


async def test_while_the_api_is_away_all_workers_stay_and_the_warning_says_so() -> None:
    async with world("app=vllm", "app=other?port=9000") as made:
        await made.api.put(PODS, pod("a", "10.0.0.1"), pod("b", "10.0.0.2", labels={"app": "other"}))
        await made.until("a:8000", "b:9000")
        await made.api.kill()
        await made.warned("'app=vllm' is not followed, what is known stays (1): ")
        assert made.now == ["a:8000", "b:9000"]
        await made.api.delete(PODS, "a")
        await made.api.start()
        await made.until("b:9000")


async def test_draining_by_hand_lasts_until_the_pod_changes() -> None:
    async with world("app=vllm") as made:
        await made.api.put(PODS, pod("a", "10.0.0.1"))
        await made.until("a:8000")
        made.registry.set_draining("default", "default/a:8000", True)
        await made.api.put(PODS, pod("b", "10.0.0.2"))
        await made.until("(a:8000)", "b:8000")
        await made.api.put(PODS, pod("a", "10.0.0.1", ready=False), pod("c", "10.0.0.3"))
        await made.until("(a:8000)", "b:8000", "c:8000")
        await made.api.put(PODS, pod("a", "10.0.0.1"))
        await made.until("a:8000", "b:8000", "c:8000")


async def test_a_pod_that_says_something_wrong_is_named_and_many_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_kubernetes, "WARNED_PODS", 1)
    async with world("app=vllm") as made:
        wrong = {"kvscout/role": "king"}
        await made.api.put(PODS, pod("ok", "10.0.0.1"), *(pod(n, "10.0.0.2", annotations=wrong) for n in "xyz"))
        await made.until("ok:8000")
        await made.warned("default/x is not a worker: ")
        await made.warned("2 more pods are not workers")


async def test_twenty_engines_are_found_by_a_service_that_is_told_a_selector_and_nothing_else(tmp_path: Path) -> None:
    async with fake_api() as api, running_mocker() as mocker:
        host, port = mocker.url.removeprefix("http://").split(":")
        config = tmp_path / "kubeconfig"
        config.write_text(
            yaml.safe_dump(
                {
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "c"}}],
                    "clusters": [{"name": "c", "cluster": {"server": api.url}}],
                }
            )
        )
        await api.put(PODS, *(pod(f"vllm-{n}", host, ports={"http": int(port)}) for n in range(20)))
        flags = ("--workers-k8s", "app=vllm", "--kubeconfig", str(config))
        async with running("kvscout_indexer.main", *flags) as indexer:
            channel = open_channel(indexer.address)
            stub: indexer_pb2_grpc.IndexerAsyncStub = indexer_pb2_grpc.IndexerStub(channel)
            try:

                async def there() -> bool:
                    answer = await call(stub.ListWorkers, workers_pb2.ListWorkersRequest(), timeout=5)
                    complete = [e for e in answer.workers if e.worker.event_endpoints and e.worker.block_size]
                    assert {entry.source for entry in answer.workers} <= {workers_pb2.REGISTRATION_SOURCE_KUBERNETES}
                    return len(complete) == 20

                await eventually(there)
            finally:
                await channel.close()


def test_a_wrong_selection_ends_the_start_with_the_name_of_the_flag() -> None:
    with pytest.raises(ConfigError, match="workers_k8s"):
        KubernetesWorkers(["?"], Registry(lambda: 0.0), access=KubernetesAccess("http://h", "default"))


class Looks:
    """How often pods were looked at, in all and before others had their turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.most_at_once = 0
        look_at = KubernetesWorkers._look_at

        def counted(workers: KubernetesWorkers, *args: Any) -> None:
            self.count += 1
            look_at(workers, *args)

        monkeypatch.setattr(KubernetesWorkers, "_look_at", counted)

    async def watch(self) -> None:
        while True:
            before = self.count
            await asyncio.sleep(0)
            self.most_at_once = max(self.most_at_once, self.count - before)


@pytest.mark.parametrize("pods", [250, 1000])
async def test_what_many_pods_cost_is_in_proportion_and_holds_nobody_up(
    pods: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)
    async with fake_api() as api:
        await api.put(PODS, *(pod(f"p{n}", f"10.0.{n >> 8}.{n & 255}") for n in range(pods)))
        made = World(api, "app=vllm")
        tasks = [asyncio.create_task(made.workers.run()), asyncio.create_task(looks.watch())]
        await asyncio.wait_for(made.workers.read.wait(), 60)
        assert len(made.now) == pods
        # Once when it is listed, and once when its engine has answered.
        assert looks.count == 2 * pods
        assert looks.most_at_once <= registry_kubernetes.PODS_A_SLICE
        await api.delete(PODS, "p0")
        await api.put(PODS, pod("p1", "10.0.0.1", ready=False))
        await eventually(lambda: made.received[-2:] == ["-default/p0:8000:kubernetes", "~default/p1:8000"])
        assert looks.count == 2 * pods + 2, "what has not changed is not looked at"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_another_source_let_go_of_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_kubernetes, "REFRESH_SECONDS", 0.05)
    async with world("app=vllm") as made:
        await made.api.put(PODS, pod("a", "10.0.0.1"))
        await made.until("a:8000")
        spec = made.registry.get("default", "default/a:8000").spec
        made.registry.replace_source(Source.FILE, [spec])
        made.registry.replace_source(Source.FILE, [])
        await made.until("a:8000")
        assert made.registry.get("default", "default/a:8000").source is Source.KUBERNETES


async def test_what_an_earlier_life_told_goes_once_everything_is_listed() -> None:
    async with fake_api() as api:
        made = World(api, "app=vllm")
        made.registry.add_to_source(Source.KUBERNETES, [WorkerSpec("gone", "m", 16, http_endpoint="http://h:1")])
        await api.put(PODS, pod("a", "10.0.0.1"))
        task = asyncio.create_task(made.workers.run())
        await made.until("a:8000")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
