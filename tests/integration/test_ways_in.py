"""A tenant's clients over TLS, and workers that a cluster names: the same in each mode."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest
import trustme
import yaml
from support.gateway_stack import MODEL, connected, fresh_prompt, running_services
from support.kubernetes_api import PODS, fake_api, pod
from support.mocker_process import running_mocker
from support.processes import eventually

from kvscout_client import BlockingRouter, Router, StopConditions, WorkerSpec
from kvscout_common.errors import NotFound, PermissionDenied, Unauthenticated
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.worker import EventEndpoint

pytestmark = pytest.mark.usefixtures("each_mode")

TOKENS = {
    "boss": {"role": "admin", "tenant": "*"},
    "team": {"role": "client", "tenant": "team"},
    "rival": {"role": "client", "tenant": "rival"},
}


async def test_a_tenant_is_served_by_its_own_workers_over_grpc_and_http_with_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "own.pem"))
    tokens = tmp_path / "tokens.yaml"
    tokens.touch(mode=0o600)
    tokens.write_text(yaml.safe_dump({"tokens": [{"token": name, **rights} for name, rights in TOKENS.items()]}))
    own = str(tmp_path / "own.pem")
    flags = ("--auth-tokens", str(tokens), "--tls-cert", own, "--tls-key", own)

    def security(token: str) -> ClientSecurity:
        (tmp_path / token).write_text(token)
        return ClientSecurity(ca=tmp_path / "ca.pem", token_file=tmp_path / token)

    async with running_services(*flags) as services, running_mocker() as mocker:
        address = services.gateway.address
        events = tuple(EventEndpoint(rank["dp_rank"], rank["events"], rank["replay"]) for rank in mocker.ranks)
        worker = WorkerSpec("w0", MODEL, 16, "team", http_endpoint=mocker.url, event_endpoints=events)
        async with (
            Router(address, tenant="team", security=security("boss")) as boss,
            Router(address, model=MODEL, tenant="team", security=security("team")) as team,
            Router(address, model=MODEL, tenant="rival", security=security("rival")) as rival,
            Router(address, model=MODEL, tenant="team", security=security("wrong")) as wrong,
        ):
            with pytest.raises(PermissionDenied):
                await team.register_worker(worker)
            await boss.register_worker(worker)
            prompt = fresh_prompt(64).tolist()
            chunks = [chunk async for chunk in team.generate(prompt, stop=StopConditions(max_tokens=4))]
            assert sum(len(chunk.token_ids) for chunk in chunks) == 4

            async def indexed() -> bool:
                return (await team.route(prompt)).overlap_blocks == 4

            await eventually(indexed, what="the prompt's blocks in the index")
            async with await team.route(prompt, request_id="mine"):
                assert [active.request_id for active in await team.active_requests()] == ["mine"]
            assert await team.active_requests() == []
            with pytest.raises(NotFound):
                await rival.route(prompt)
            with pytest.raises(Unauthenticated):
                await wrong.route(prompt)

            def blocking() -> int:
                with BlockingRouter(address, model=MODEL, tenant="team", security=security("team")) as router:
                    return router.route(prompt).overlap_blocks

            assert await asyncio.to_thread(blocking) == 4
        trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        url = f"https://127.0.0.1:{services.gateway.ready['http_port']}/v1"
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as http:
            for key, status in (("team", 200), ("rival", 404), ("wrong", 401)):
                headers = {"Authorization": f"Bearer {key}"}
                async with http.post(f"{url}/completions", json=body, headers=headers) as response:
                    assert response.status == status, await response.text()


async def test_pods_of_a_cluster_are_workers_until_they_are_deleted(tmp_path: Path) -> None:
    async with fake_api() as api, running_mocker() as mocker:
        host, port = mocker.url.removeprefix("http://").split(":")
        config = tmp_path / "kubeconfig"
        cluster = {"name": "c", "cluster": {"server": api.url}}
        context = {"name": "c", "context": {"cluster": "c"}}
        config.write_text(yaml.safe_dump({"current-context": "c", "contexts": [context], "clusters": [cluster]}))
        await api.put(PODS, pod("vllm-0", host, ports={"http": int(port)}))
        flags = ("--workers-k8s", "app=vllm", "--kubeconfig", str(config))
        async with (
            running_services(*flags) as services,
            connected(services.gateway, services.scheduler, services.indexer) as client,
        ):
            worker_id = f"default/vllm-0:{port}"
            await client.until_known(worker_id)
            prompt = fresh_prompt(64)
            assert (await client.generate(prompt)).route.worker.worker_id == worker_id
            await client.until_indexed(prompt, 4)
            assert (await client.route(prompt)).overlap_blocks == 4
            await client.until_idle()
            await api.delete(PODS, "vllm-0")

            async def gone() -> bool:
                return not await client.known() and not await client.sources()

            await eventually(gone, what="no worker")
