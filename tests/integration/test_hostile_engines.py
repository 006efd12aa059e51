"""Engines that answer with whatever hurts, to real processes: an answer costs its engine, and nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from support.indexer_client import MODEL, indexer_process
from support.processes import eventually
from support.web_servers import web_server

from kvscout.v1 import types_pb2, workers_pb2

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
