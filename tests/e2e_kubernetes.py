"""`make e2e-kubernetes`: kvscout and its chart on a real Kubernetes API, with the rights that the chart gives alone.

The engines are mockers, the pods are written by hand: there is no kubelet. `KVSCOUT_KUBERNETES` is the folder that
`tests/build_kubernetes.sh` has filled.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import yaml
from deploy.test_helm_chart import CHART, KUBE_VERSION, tool
from support.gateway_stack import GatewayClient, together
from support.kubernetes_cluster import Cluster, Refused
from support.mocker_process import running_mocker
from support.processes import eventually, running

from kvscout.v1 import workers_pb2
from kvscout_common.kubernetes.access import from_service_account
from kvscout_common.registry.kubernetes import KubernetesWorkers
from kvscout_common.registry.registry import Registry
from kvscout_common.rpc.service_info import shown

BINARIES = Path(os.environ.get("KVSCOUT_KUBERNETES", Path.home() / ".cache" / "kvscout" / "kubernetes"))
NAMESPACE = "llm"
HOST = "127.0.1.1"
"""Of the engines: the API takes no pod at 127.0.0.1."""
VLLM = {"app": "vllm"}
RANKS = {"app": "ranks"}
VALUES = {
    "auth": {"allowAnonymous": True},
    "workers": {"selections": ["app=vllm"]},
    "inferencePool": {"create": True, "matchLabels": RANKS, "targetPorts": [8000, 8001]},
}
PROMPT = list(range(64))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with the chart's objects."""
    made = Cluster(BINARIES)
    try:
        made.install_pools()
        made.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        command = [tool("helm"), "template", "kvscout", str(CHART), "--namespace", NAMESPACE]
        command += ["--no-hooks", "--kube-version", KUBE_VERSION, "--values", "-"]
        text = subprocess.run(command, input=json.dumps(VALUES), capture_output=True, text=True, check=True).stdout
        made.create(*(one for one in yaml.safe_load_all(text) if one))
        yield made
    finally:
        made.close()


@pytest.fixture
def account(cluster: Cluster, tmp_path: Path) -> Path:
    """What a pod of the chart has mounted."""
    (tmp_path / "token").write_text(cluster.token_of(NAMESPACE, "kvscout"))
    (tmp_path / "ca.crt").write_bytes(cluster.ca.read_bytes())
    (tmp_path / "namespace").write_text(NAMESPACE)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_pods_are_left(cluster: Cluster) -> Iterator[None]:
    yield
    for pod in cluster.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]:
        cluster.delete_pod(NAMESPACE, pod["metadata"]["name"], at_once=True)


class Followed:
    """A registry that follows the cluster."""

    def __init__(self, workers: KubernetesWorkers, registry: Registry) -> None:
        self.workers = workers
        self.registry = registry

    async def until(self, *expected: str) -> None:
        """Waits for these workers, those that drain in brackets."""

        def now() -> list[str]:
            ids = [(e.spec.worker_id.removeprefix(f"{NAMESPACE}/"), e.spec.draining) for e in self.registry.entries()]
            return [f"({one})" if draining else one for one, draining in ids]

        async def there() -> bool:
            return now() == list(expected)

        await eventually(there, what=f"{expected}, not {now()}, {shown(self.workers.warnings())}")

    async def warned(self, words: str) -> None:
        """Waits for a warning."""

        async def told() -> bool:
            return any(words in warning for warning in shown(self.workers.warnings()))

        await eventually(told, what=f"{words!r} in {shown(self.workers.warnings())}")


@asynccontextmanager
async def following(cluster: Cluster, account: Path, *selections: str) -> AsyncIterator[Followed]:
    """A registry that follows the cluster as the chart's service account."""
    registry = Registry(lambda: 0.0)
    access = from_service_account(cluster.url, account)
    workers = KubernetesWorkers(selections, registry, access=access)
    task = asyncio.create_task(workers.run())
    try:
        yield Followed(workers, registry)
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("one_process", [False, True], ids=["services", "one-process"])
async def test_services_route_to_pods_of_which_they_were_told_a_selector_and_nothing_else(
    cluster: Cluster, account: Path, *, one_process: bool
) -> None:
    config = account / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
                "clusters": [{"name": "c", "cluster": {"server": cluster.url, "certificate-authority": "ca.crt"}}],
                "users": [{"name": "u", "user": {"tokenFile": "token"}}],
            }
        )
    )
    flags = ("--workers-k8s", "app=vllm", "--kubeconfig", str(config))
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        mockers = await enter(together(*(running_mocker("--host", HOST) for _ in range(2))))
        ports = [int(mocker.url.rpartition(":")[2]) for mocker in mockers]
        for number, port in enumerate(ports):
            cluster.pod(NAMESPACE, f"vllm-{number}", HOST, VLLM, http=port)
        if one_process:
            indexer = scheduler = gateway = await enter(running("kvscout_serve.main", *flags))
        else:
            indexer, scheduler = await enter(
                together(running("kvscout_indexer.main", *flags), running("kvscout_scheduler.main", *flags))
            )
            helpers = ("--indexer", indexer.address, "--scheduler", scheduler.address, "--indexer-timeout-ms", "2000")
            gateway = await enter(running("kvscout_gateway.main", *helpers, *flags))
        client = GatewayClient(gateway.address, scheduler.address, indexer.address)
        stack.push_async_callback(client.close)
        names = [f"{NAMESPACE}/vllm-{number}:{port}" for number, port in enumerate(ports)]

        async def found() -> bool:
            sources = {name: entry.source for name, entry in (await client.known()).items()}
            # Its indexer may have told it first.
            return sources == dict.fromkeys(names, workers_pb2.REGISTRATION_SOURCE_KUBERNETES)

        await eventually(found)
        model = (await client.known())[names[0]].worker.model

        async def received() -> bool:
            sources = await client.sources()
            return sources.keys() == set(names)

        await eventually(received, what="the indexer reads the events of both")
        answer = await client.generate(PROMPT, model=model)
        assert len(answer.token_ids) == 4
        await client.until_indexed(PROMPT, 4, model=model)
        [first] = [name for name, blocks in (await client.overlap(PROMPT, model=model)).items() if blocks]
        name = first.partition("/")[2].partition(":")[0]
        # Its cache is the better one, and it is not ready any more: the other one serves.
        cluster.set_ready(NAMESPACE, name, False, HOST)

        async def drains() -> bool:
            return (await client.known())[first].worker.draining

        await eventually(drains)
        again = await client.generate([*PROMPT, 1], model=model)
        assert again.route.worker.worker_id in set(names) - {first}
        cluster.set_ready(NAMESPACE, name, True, HOST)

        async def serves() -> bool:
            return not (await client.known())[first].worker.draining

        await eventually(serves)
        assert (await client.overlap(PROMPT, model=model))[first] >= 4, "its index was kept"
        for number in range(2):
            cluster.delete_pod(NAMESPACE, f"vllm-{number}", at_once=True)

        async def nobody() -> bool:
            return not await client.known()

        await eventually(nobody)


async def test_a_pod_that_is_deleted_drains_until_it_is_gone_and_the_next_of_its_name_is_another(
    cluster: Cluster, account: Path
) -> None:
    async with following(cluster, account, "app=vllm?model=m&block_size=16") as followed:
        cluster.pod(NAMESPACE, "a", HOST, VLLM, http=8000)
        cluster.pod(NAMESPACE, "other", HOST, {"app": "other"}, http=8000)
        await followed.until("a:8000")
        cluster.delete_pod(NAMESPACE, "a")
        await followed.until("(a:8000)")
        cluster.delete_pod(NAMESPACE, "a", at_once=True)
        await followed.until()
        cluster.pod(NAMESPACE, "a", "127.0.1.9", VLLM, http=8000)
        await followed.until("a:8000")
        assert followed.registry.get("default", f"{NAMESPACE}/a:8000").spec.http_endpoint == "http://127.0.1.9:8000"


async def test_each_port_of_the_charts_pool_is_a_rank(cluster: Cluster, account: Path) -> None:
    async with following(cluster, account, "pool/kvscout?event_port=5557&model=m&block_size=16") as followed:
        cluster.pod(NAMESPACE, "ranks", HOST, RANKS)
        await followed.until("ranks:8000", "ranks:8001")
        second = followed.registry.get("default", f"{NAMESPACE}/ranks:8001").spec
        assert (second.dp_start_rank, second.event_endpoints[0].endpoint) == (1, f"tcp://{HOST}:5558")
        path = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools/kvscout"
        one_port = {"spec": {"targetPorts": [{"number": 8000}]}}
        cluster.call("PATCH", path, one_port, kind="application/merge-patch+json")
        await followed.until("ranks:8000")


async def test_a_killed_api_server_takes_no_worker_with_it(cluster: Cluster, account: Path) -> None:
    async with following(cluster, account, "app=vllm?model=m&block_size=16") as followed:
        cluster.pod(NAMESPACE, "a", HOST, VLLM, http=8000)
        await followed.until("a:8000")
        cluster.kill()
        await followed.warned("what is known stays (1): ")
        await followed.until("a:8000")
        cluster.start()
        cluster.pod(NAMESPACE, "b", HOST, VLLM, http=8001)
        cluster.delete_pod(NAMESPACE, "a", at_once=True)
        await followed.until("b:8001")
        await eventually(lambda: not followed.workers.warnings())


async def test_the_charts_rights_are_to_read_pods_pools_and_objectives_of_its_namespace_and_nothing_else(
    cluster: Cluster, account: Path
) -> None:
    token = (account / "token").read_text()
    mine = f"/api/v1/namespaces/{NAMESPACE}"
    assert cluster.call("GET", f"{mine}/pods", token=token)["kind"] == "PodList"
    refused = (
        ("GET", f"{mine}/secrets"),
        ("GET", f"{mine}/services"),
        ("DELETE", f"{mine}/pods/a"),
        ("GET", f"{mine}/pods/a/log"),
        ("GET", "/api/v1/namespaces/default/pods"),
        ("GET", "/api/v1/pods"),
        ("GET", "/api/v1/nodes"),
        ("DELETE", f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools/kvscout"),
    )
    for method, path in refused:
        with pytest.raises(Refused) as error:
            cluster.call(method, path, token=token)
        assert error.value.status == 403, (method, path)
    for group in ("llm-d.ai", "inference.networking.x-k8s.io"):
        with pytest.raises(Refused) as error:
            cluster.call("GET", f"/apis/{group}/v1alpha2/namespaces/{NAMESPACE}/inferenceobjectives", token=token)
        assert error.value.status == 404, "allowed, but this cluster has no such kind"
    async with following(cluster, account, "app=vllm?namespace=default") as followed:
        await followed.warned('403, pods is forbidden: User "system:serviceaccount:llm:kvscout"')
