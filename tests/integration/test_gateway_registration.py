"""Workers that come and go at a gateway in front of a real indexer and a real scheduler."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from aiohttp import web
from support.gateway_stack import CALL_SECONDS, Stack, connected, fresh_prompt, mocker_worker, running_stack
from support.processes import eventually, running
from support.scripted_engine import answer, hang, scripted_engine

from kvscout.v1 import gateway_pb2, workers_pb2
from kvscout_client import KvEventPublisher
from kvscout_common import errors
from kvscout_common.rpc.channel import call

pytestmark = pytest.mark.asyncio(loop_scope="module")

PEER = workers_pb2.REGISTRATION_SOURCE_PEER


@pytest.fixture(scope="module")
def workers_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gateway") / "workers.yaml"
    path.write_text(json.dumps({"workers": []}))
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(workers_file: Path) -> AsyncIterator[Stack]:
    async with running_stack("--workers-file", str(workers_file)) as started:
        yield started


def write(path: Path, content: str) -> None:
    path.write_text(content)


async def everywhere(stack: Stack) -> list[set[str]]:
    """Who is registered at the gateway, the indexer and the scheduler."""
    request = workers_pb2.ListWorkersRequest()
    stubs = (stack.client.stub, stack.client.indexer, stack.client.scheduler)
    answers = [await call(stub.ListWorkers, request, timeout=CALL_SECONDS) for stub in stubs]
    return [{entry.worker.worker_id for entry in answer.workers} for answer in answers]


async def until_everywhere(stack: Stack, *worker_ids: str) -> None:
    async def so() -> bool:
        return await everywhere(stack) == [set(worker_ids)] * 3

    await eventually(so, what=f"{worker_ids} everywhere")


async def test_registering_updating_draining_and_removing_take_effect_everywhere(stack: Stack) -> None:
    client = stack.client
    extra = mocker_worker("extra", stack.mockers[0])
    await client.register(extra)
    assert await everywhere(stack) == [{"w0", "w1", "extra"}] * 3

    extra.total_kv_blocks = 7
    await call(client.stub.UpdateWorker, workers_pb2.UpdateWorkerRequest(worker=extra), timeout=CALL_SECONDS)
    for stub in (client.indexer, client.scheduler):
        listed = await call(stub.ListWorkers, workers_pb2.ListWorkersRequest(), timeout=CALL_SECONDS)
        assert {e.worker.worker_id: e.worker.total_kv_blocks for e in listed.workers}["extra"] == 7

    await client.route([1], pinned_worker_id="extra", request_id="on extra")
    drain = workers_pb2.DrainWorkerRequest(worker_id="extra")
    assert (await call(client.stub.DrainWorker, drain, timeout=CALL_SECONDS)).active_requests == 1
    with pytest.raises(errors.Unavailable, match="draining"):
        await client.route([1], pinned_worker_id="extra")
    drain.undo = True
    await call(client.stub.DrainWorker, drain, timeout=CALL_SECONDS)
    await client.route([1], pinned_worker_id="extra")

    remove = workers_pb2.RemoveWorkerRequest(worker_id="extra")
    await call(client.stub.RemoveWorker, remove, timeout=CALL_SECONDS)
    assert await everywhere(stack) == [{"w0", "w1"}] * 3
    await client.until_idle()
    for rpc, request in (
        (client.stub.RemoveWorker, remove),
        (client.stub.DrainWorker, drain),
        (client.stub.UpdateWorker, workers_pb2.UpdateWorkerRequest(worker=extra)),
    ):
        with pytest.raises(errors.NotFound):
            await call(rpc, request, timeout=CALL_SECONDS)
    with pytest.raises(errors.InvalidArgument) as refused:
        await client.register(workers_pb2.Worker(worker_id="bad", model="m"))
    assert refused.value.field == "block_size"


async def test_leases_end_everywhere_without_keep_alive(stack: Stack) -> None:
    client = stack.client
    await client.register(mocker_worker("leased", stack.mockers[0]), lease_seconds=5)
    for _ in range(14):
        keep = workers_pb2.KeepAliveRequest(worker_ids=["leased", "stranger"])
        kept = await call(client.stub.KeepAlive, keep, timeout=CALL_SECONDS)
        assert list(kept.unknown_worker_ids) == ["stranger"]
        await asyncio.sleep(0.4)
    assert await everywhere(stack) == [{"w0", "w1", "leased"}] * 3
    await until_everywhere(stack, "w0", "w1")


async def test_changes_of_the_workers_file_are_passed_on(stack: Stack, workers_file: Path) -> None:
    entry = {"worker_id": "filed", "model": "filed", "block_size": 16}
    write(workers_file, json.dumps({"workers": [entry]}))
    await until_everywhere(stack, "w0", "w1", "filed")
    with pytest.raises(errors.FailedPrecondition, match="file"):
        remove = workers_pb2.RemoveWorkerRequest(worker_id="filed")
        await call(stack.client.stub.RemoveWorker, remove, timeout=CALL_SECONDS)
    write(workers_file, "workers: [{")

    async def warned() -> bool:
        return any("workers file not in effect" in w for w in (await stack.client.status()).service.warnings)

    await eventually(warned)
    assert "filed" in (await everywhere(stack))[1]
    write(workers_file, json.dumps({"workers": []}))
    await until_everywhere(stack, "w0", "w1")


async def test_a_worker_that_a_publisher_registers_at_an_indexer_can_be_routed_to(stack: Stack) -> None:
    block = [7] * 16
    async with KvEventPublisher(
        worker_id="custom",
        model="custom",
        block_size=16,
        transport="grpc",
        indexers=[stack.indexer.address],
        lease_seconds=2,
    ) as events:
        events.publish_stored(block, [16], [1])
        assert await events.flush(CALL_SECONDS)

        async def routed() -> bool:
            try:
                return (await stack.client.route([*block, 1], model="custom")).overlap_blocks == 1
            except (errors.NotFound, errors.Unavailable):
                return False  # the scheduler does not know it yet

        await eventually(routed)
        scheduler = (
            await call(stack.client.scheduler.ListWorkers, workers_pb2.ListWorkersRequest(), timeout=5)
        ).workers
        assert {e.worker.worker_id: e.source for e in scheduler}["custom"] == PEER
    # Its lease would end by itself; others of this module count who is there.
    gone = workers_pb2.RemoveWorkerRequest(worker_id="custom")
    await call(stack.client.scheduler.RemoveWorker, gone, timeout=CALL_SECONDS)


async def test_a_worker_that_is_removed_while_it_runs_a_request_lets_it_finish(stack: Stack) -> None:
    client = stack.client
    async with scripted_engine(hang) as engine:
        worker = workers_pb2.Worker(worker_id="going", model="going", block_size=16, http_endpoint=engine.url)
        await client.register(worker)
        go_on = asyncio.Event()

        async def wait_then_answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await go_on.wait()
            return await answer(request, body)

        engine.script = wait_then_answer
        generating = asyncio.ensure_future(client.generate([1], model="going"))
        await eventually(lambda: bool(engine.requests))
        await call(client.stub.RemoveWorker, workers_pb2.RemoveWorkerRequest(worker_id="going"), timeout=CALL_SECONDS)
        assert not await client.active()
        go_on.set()
        assert (await generating).token_ids == [1, 2, 3, 4]
    assert "going" not in {w.worker.worker_id for w in (await client.status()).workers}
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await client.generate([1], model="going")
    assert gone.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_second_gateway_routes_to_the_workers_of_the_first_and_can_take_them_over(stack: Stack) -> None:
    helpers = ("--indexer", stack.indexer.address, "--scheduler", stack.scheduler.address)
    async with running("kvscout_gateway.main", *helpers) as second:
        async with connected(second, stack.scheduler, stack.indexer) as client:
            await client.until_known("w0", "w1")
            assert {entry.source for entry in (await client.known()).values()} == {PEER}
            prompt = fresh_prompt(64)
            got = await client.generate(prompt, pinned_worker_id="w1")
            await client.until_indexed(prompt, 4)
            await client.until_idle()
            assert (await stack.client.route(prompt)).worker.worker_id == got.route.worker.worker_id == "w1"

            drain = workers_pb2.DrainWorkerRequest(worker_id="w1")
            await call(client.stub.DrainWorker, drain, timeout=CALL_SECONDS)
            assert (await client.known())["w1"].source == workers_pb2.REGISTRATION_SOURCE_RPC
            assert {(await stack.client.route(prompt)).worker.worker_id for _ in range(3)} == {"w0"}

            async def handed_over() -> bool:
                entry = (await stack.client.known())["w1"]
                return (entry.source, entry.worker.draining) == (PEER, True)

            await eventually(handed_over)
            await call(client.stub.RemoveWorker, workers_pb2.RemoveWorkerRequest(worker_id="w1"), timeout=CALL_SECONDS)
            await until_everywhere(stack, "w0")


async def test_a_helper_that_is_away_is_told_when_it_is_back(stack: Stack) -> None:
    client = stack.client
    known, *_ = await everywhere(stack)
    assert await stack.indexer.stop() == 0
    late = workers_pb2.Worker(worker_id="late", model="late", block_size=16)
    with pytest.raises(errors.Unavailable, match="not everywhere yet; retrying: indexer"):
        request = workers_pb2.RegisterWorkerRequest(worker=late)
        await call(client.stub.RegisterWorker, request, timeout=CALL_SECONDS)
    assert (await client.route([1], model="late")).worker.worker_id == "late"
    indexer = next(
        helper for helper in (await client.status()).helpers if helper.kind == gateway_pb2.HELPER_KIND_INDEXER
    )
    assert not indexer.healthy
    assert indexer.pending_registrations >= 1
    async with running("kvscout_indexer.main", "--port", str(stack.indexer.ready["port"])):
        await until_everywhere(stack, *known, "late")
