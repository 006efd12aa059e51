"""Indexers that share the workers among them, behind one gateway; over real processes."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from support.gateway_stack import CALL_SECONDS, MODEL, Stack, connected, fresh_prompt, running_stack
from support.process_metrics import scrape
from support.processes import Running, eventually, running

from kvscout.v1 import gateway_pb2, indexer_pb2, indexer_pb2_grpc, types_pb2, workers_pb2
from kvscout_common.rpc.channel import call, open_channel, stream

# Of two shards, the first has w0, the second w1 and w2.
OWN = ({"w0"}, {"w1", "w2"})


@asynccontextmanager
async def stub_of(indexer: Running) -> AsyncIterator[indexer_pb2_grpc.IndexerAsyncStub]:
    async with open_channel(indexer.address) as channel:
        yield indexer_pb2_grpc.IndexerStub(channel)


async def cached_everywhere(stack: Stack) -> dict[str, array[int]]:
    """A prompt a worker that only it has, and that the gateway finds there."""
    prompts = {worker: fresh_prompt(160) for worker in ("w0", "w1", "w2")}
    for worker, prompt in prompts.items():
        await stack.client.generate(prompt, pinned_worker_id=worker)
    for worker, prompt in prompts.items():
        await eventually(lambda w=worker, p=prompt: finds(stack, p, w))  # type: ignore[misc]
    return prompts


async def finds(stack: Stack, prompt: array[int], worker: str) -> bool:
    answer = await stack.client.route(prompt)
    found = (answer.worker.worker_id, answer.overlap_blocks, answer.confirmed_overlap_blocks)
    return found == (worker, 10, 10) and not answer.degraded


async def test_each_indexer_reads_its_own_workers_and_lists_them_all() -> None:
    async with running_stack(mockers=[()] * 3, shards=2) as stack:
        prompts = await cached_everywhere(stack)
        for position, indexer in enumerate(stack.indexers):
            async with stub_of(indexer) as stub:
                status = await call(stub.GetStatus, types_pb2.GetStatusRequest(), timeout=CALL_SECONDS)
                assert (status.shard_index, status.shard_count) == (position, 2)
                live = {s.worker.worker_id for s in status.sources if s.state == indexer_pb2.SOURCE_STATE_LIVE}
                assert live == OWN[position]
                others = [s for s in status.sources if s.worker.worker_id not in live]
                assert {s.worker.worker_id for s in others} == OWN[1 - position]
                for source in others:
                    assert source.state == indexer_pb2.SOURCE_STATE_NONE
                    assert f"shard {1 - position}/2" in source.reason
                for worker, prompt in prompts.items():
                    request = indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=prompt)
                    rows = (await call(stub.FindMatches, request, timeout=CALL_SECONDS)).overlaps
                    assert list(rows.worker_ids) == ([worker] if worker in live else [])
                listed = await call(stub.ListWorkers, workers_pb2.ListWorkersRequest(), timeout=CALL_SECONDS)
                assert {entry.worker.worker_id for entry in listed.workers} == {"w0", "w1", "w2"}

        dumped = [batch async for batch in stream(stack.client.stub.DumpEvents, gateway_pb2.DumpEventsRequest())]
        assert {batch.worker_id for batch in dumped} == {"w0", "w1", "w2"}

        # A worker that changes or goes is followed by both, whoever reads it.
        await call(stack.client.stub.DrainWorker, workers_pb2.DrainWorkerRequest(worker_id="w2"), timeout=CALL_SECONDS)
        await call(
            stack.client.stub.RemoveWorker, workers_pb2.RemoveWorkerRequest(worker_id="w1"), timeout=CALL_SECONDS
        )
        for indexer in stack.indexers:
            async with stub_of(indexer) as stub:
                status = await call(stub.GetStatus, types_pb2.GetStatusRequest(), timeout=CALL_SECONDS)
                assert {source.worker.worker_id for source in status.sources} == {"w0", "w2"}

        helpers = [
            helper for helper in (await stack.client.status()).helpers if helper.kind == gateway_pb2.HELPER_KIND_INDEXER
        ]
        assert [(helper.shard_index, helper.shard_count) for helper in helpers] == [(0, 2), (1, 2)]
        # These indexers predict nothing: they say so, and are not bothered with decisions.
        assert all("predictions are off" in helper.decisions_problem for helper in helpers)
        assert not any(helper.decisions_delivered + helper.decisions_lost for helper in helpers)


async def warnings_of(stack: Stack, *indexers: str) -> list[str]:
    """What a gateway with these --indexer says once it has asked them all."""
    flags = [part for one in indexers for part in ("--indexer", one)]
    async with (
        running("kvscout_gateway.main", *flags, "--scheduler", stack.scheduler.address) as gateway,
        connected(gateway, stack.scheduler, stack.indexer) as client,
    ):

        async def warned() -> list[str]:
            warnings = (await client.status()).service.warnings
            return sorted(one for one in warnings if "shard" in one) if len(warnings) >= len(indexers) else []

        found: list[str] = await eventually(warned)
        return found


async def test_indexers_that_have_other_workers_than_the_gateway_was_told_are_named() -> None:
    async with running_stack(mockers=[], shards=2) as stack:
        first, second = (indexer.address for indexer in stack.indexers)
        swapped, alone = await asyncio.gather(
            warnings_of(stack, f"1/2={first}", f"0/2={second}"), warnings_of(stack, first)
        )
        assert swapped == [
            f"indexer 0/2 {second} has shard 1/2 of the workers, --indexer expects 0/2 there",
            f"indexer 1/2 {first} has shard 0/2 of the workers, --indexer expects 1/2 there",
        ]
        assert alone == [f"indexer {first} has shard 0/2 of the workers, --indexer expects 0/1 there"]
        assert not (await stack.client.status()).service.warnings


async def test_a_shard_that_dies_under_load_costs_its_own_workers_overlaps_until_it_is_back() -> None:
    async with AsyncExitStack() as processes:
        stack = await processes.enter_async_context(running_stack(mockers=[()] * 3, shards=2))
        client = stack.client
        prompts = await cached_everywhere(stack)
        stop = asyncio.Event()

        async def load() -> int:
            done = 0
            while not stop.is_set():
                assert len((await client.generate(fresh_prompt(64))).token_ids) == 4
                done += 1
            return done

        async with asyncio.TaskGroup() as group:
            loads = [group.create_task(load()) for _ in range(4)]
            try:
                second = stack.indexers[1]
                second.process.kill()
                await second.process.wait()

                async def missed() -> bool:
                    return (await client.route(prompts["w1"])).degraded

                await eventually(missed)
                for worker, overlap in (("w0", 10), ("w1", 0), ("w2", 0)):
                    answer = await client.route(prompts[worker], pinned_worker_id=worker)
                    assert (answer.overlap_blocks, answer.degraded) == (overlap, True)
                    [reason] = answer.degraded_reasons
                    assert reason.startswith(f"indexer 1/2 {second.address}: ")
                flags = ("--shard", "1/2", "--port", str(second.ready["port"]))
                await processes.enter_async_context(running("kvscout_indexer.main", *flags))
                for worker, prompt in prompts.items():
                    await eventually(lambda w=worker, p=prompt: finds(stack, p, w))  # type: ignore[misc]
            finally:
                stop.set()
        assert all(task.result() for task in loads)
        status = await client.status()
        assert status.failures == 0
        assert set(status.degraded) == {"indexer 1/2"}
        samples = await scrape(stack.gateway)
        assert samples['kvscout_degraded_decisions_total{helper="indexer 1/2"}'] == status.degraded["indexer 1/2"]


async def test_decisions_are_told_to_the_shard_that_has_the_worker() -> None:
    async with running_stack(mockers=[()] * 2, shards=2, indexer_flags=("--no-kv-events",)) as stack:
        prompts = {worker: fresh_prompt(160) for worker in ("w0", "w1")}
        for worker, prompt in prompts.items():
            await stack.client.generate(prompt, pinned_worker_id=worker)

        async def told() -> bool:
            helpers = [
                helper
                for helper in (await stack.client.status()).helpers
                if helper.kind == gateway_pb2.HELPER_KIND_INDEXER
            ]
            return [(h.decisions_delivered, h.decisions_lost) for h in helpers] == [(1, 0), (1, 0)]

        await eventually(told)
        await stack.client.until_idle()
        for worker, prompt in prompts.items():
            answer = await stack.client.route(prompt)
            assert (answer.worker.worker_id, answer.overlap_blocks, answer.confirmed_overlap_blocks) == (worker, 10, 0)
