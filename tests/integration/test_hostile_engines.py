"""Engines that answer with whatever hurts, to real processes: an answer costs its engine, and nobody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support import gateway_stack
from support.indexer_client import MODEL, indexer_process
from support.processes import eventually
from support.web_servers import web_server

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_client import Router

MODELS = {"data": [{"id": MODEL}]}
SOURCE = {"publisher": "zmq", "endpoint": "tcp://*:5557"}
HOSTILE: dict[str, dict[str, Any]] = {
    "long-rank": {"/kv_event_sources": {"9" * 5000: SOURCE}},
    "large-rank": {"/kv_event_sources": [{"data_parallel_rank": 2**32, **SOURCE}]},
    "surrogate-topic": {"/kv_event_sources": {"0": {**SOURCE, "topic": "\ud800"}}},
    "surrogate-address": {"/kv_event_sources": {"0": {**SOURCE, "endpoint": "tcp://\ud800:5557"}}},
    "surrogate-model": {"/v1/models": {"data": [{"id": "\ud800"}]}},
    "no-list": {"/v1/models": {"data": 7}},
    "open-labels": {"/metrics": "vllm:cache_config_info{" + "a" * 60_000},
    "many-blocks": {"/metrics": 'vllm:cache_config_info{num_gpu_blocks="' + "9" * 5000 + '"} 1\n'},
}


@asynccontextmanager
async def hostile_engines() -> AsyncIterator[str]:
    """One under each path."""

    async def answer(request: web.Request) -> web.Response:
        _, kind, path = request.path.split("/", 2)
        pages = {"/v1/models": MODELS, "/kv_event_sources": {"0": SOURCE}, **HOSTILE[kind]}
        page = pages.get(f"/{path}", "")
        return web.Response(text=page) if isinstance(page, str) else web.json_response(page)

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", answer)])
    async with web_server(app) as url:
        yield url


async def test_no_answer_of_an_engine_ends_an_indexer_or_hides_its_status() -> None:
    async with hostile_engines() as url, indexer_process() as (client, running):
        for kind in HOSTILE:
            worker = workers_pb2.Worker(worker_id=kind, model=MODEL, block_size=4, http_endpoint=f"{url}/{kind}")
            await client.rpc("RegisterWorker", workers_pb2.RegisterWorkerRequest(worker=worker))

        async def unheard() -> set[str]:
            """Whose answer was neither taken nor told of."""
            status = await client.rpc("GetStatus", types_pb2.GetStatusRequest())
            listed = await client.rpc("ListWorkers", workers_pb2.ListWorkersRequest())
            taken = {entry.worker.worker_id for entry in listed.workers if entry.worker.event_endpoints}
            told = " ".join(status.service.warnings)
            return {kind for kind in HOSTILE if kind not in taken and f"worker {kind}:" not in told}

        async def all_heard() -> bool:
            return not await unheard()

        await eventually(all_heard)
        assert running.process.returncode is None


CLAIMS = (2**31, 2**32, 2**40, 2**64, 10**400, -1, 1.5, "9", None, True, [1])
"""What an engine says of a count of tokens, and a client of its limit."""


@asynccontextmanager
async def boasting_engine() -> AsyncIterator[str]:
    """Its usage is what `user` of the request says."""

    async def answer(request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        claim = json.loads(asked["user"])
        usage = {"prompt_tokens": claim, "completion_tokens": claim, "prompt_tokens_details": {"cached_tokens": claim}}
        choice = {"index": 0, "text": "hi", "finish_reason": "stop"}
        document = json.dumps({"object": "text_completion", "choices": [choice], "usage": usage})
        if not asked.get("stream"):
            return web.Response(text=document, content_type="application/json")
        return web.Response(text=f"data: {document}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    app = web.Application()
    app.add_routes([web.post("/v1/completions", answer)])
    async with web_server(app) as url:
        yield url


@pytest.mark.usefixtures("each_mode")
async def test_counts_that_engines_and_clients_claim_cost_no_request_and_leave_no_booking() -> None:
    """Recorded meanwhile: what is made of a request that is over must not fail for them either."""
    async with (
        boasting_engine() as engine,
        gateway_stack.running_stack("--http-port", "0", mockers=()) as stack,
        Router(stack.gateway.address) as router,
        aiohttp.ClientSession(f"http://127.0.0.1:{stack.gateway.ready['http_port']}") as http,
    ):
        worker = workers_pb2.Worker(
            worker_id="w", model=MODEL, block_size=4, http_endpoint=engine, engine=workers_pb2.ENGINE_KIND_OPENAI,
            transport=workers_pb2.EVENT_TRANSPORT_NONE,
        )  # fmt: skip
        await stack.client.stub.RegisterWorker(workers_pb2.RegisterWorkerRequest(worker=worker))
        seen: list[gateway_pb2.RecordedRequest] = []
        stream = router.record(bytes(16))

        async def read() -> None:
            async for message in stream:
                seen.extend(message.requests)

        async def post(claim: Any, limit: Any, *, streamed: bool) -> int:
            user = json.dumps(claim)
            body = {"model": MODEL, "prompt": [1] * 9, "user": user, "max_tokens": limit, "stream": streamed}
            async with http.post("/v1/completions", json=body) as answer:
                assert b"hi" in await answer.read() or answer.status == 400
                return answer.status

        async def recorded() -> bool:
            return await post(7, 7, streamed=False) == 200 and bool(seen)

        recording = asyncio.create_task(read())
        await eventually(recorded, what="a recorded request")
        for claim in CLAIMS:
            for streamed in (False, True):
                assert await post(claim, 7, streamed=streamed) == 200, claim
                assert await post(7, claim, streamed=streamed) in (200, 400), claim

        async def at_rest() -> bool:
            loads = await stack.client.scheduler.GetPotentialLoads(
                scheduler_pb2.SchedulerGetPotentialLoadsRequest(model=MODEL)
            )
            return not any(load.active_requests or load.active_prefill_tokens for load in loads.loads)

        await eventually(at_rest, what="nothing to be booked")
        status = await stack.client.stub.GetStatus(types_pb2.GetStatusRequest())
        assert not status.service.warnings

        async def all_recorded() -> bool:
            return {one.max_tokens for one in seen} == {0, 7, 2**31}

        await eventually(all_recorded, what="limits of 32 bits, and none above")
        recording.cancel()
        await asyncio.gather(recording, return_exceptions=True)
        await stream.aclose()
