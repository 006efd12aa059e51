"""A gateway of many ranks is told of those alone that differ from the others, and decides as if it had a row for each;
over real services, and the sockets of 256 ranks."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
import pytest_asyncio
from support.gateway_stack import CALL_SECONDS, GatewayClient, connected, running_services
from support.processes import eventually

from kvscout.v1 import indexer_pb2, types_pb2, workers_pb2
from kvscout_bench.fleet_process import PROMPT_BLOCKS, SYSTEM_BLOCKS, Engines, Fleet, prompt_tokens
from kvscout_bench.service_process import MODEL
from kvscout_common.rpc.channel import call
from kvscout_gateway.values.overlaps import FEW_ROWS_FROM

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not there: it compiles the engines"),
]
FLEET = Fleet(FEW_ROWS_FROM, batches=17, capacity=PROMPT_BLOCKS, dp_size=8)
PROMPT = prompt_tokens(77, 0)
"""What all ranks have, and what rank 77 has behind it."""


class World(NamedTuple):
    client: GatewayClient
    engines: Engines


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(each_mode: None) -> AsyncIterator[World]:
    async with running_services() as services:
        with Engines(FLEET) as engines:
            async with connected(services.gateway, services.scheduler, services.indexer) as client:
                for worker in engines.workers():
                    worker.http_endpoint = "http://127.0.0.1:9"
                    await client.register(worker)

                async def indexed() -> bool:
                    found = await rows(client)
                    return len(found.worker_ids) == FLEET.ranks and max(found.device_blocks) > SYSTEM_BLOCKS

                await eventually(indexed, what="what all ranks hold")
                yield World(client, engines)


async def rows(client: GatewayClient, *, top_k: int = 0) -> types_pb2.Overlaps:
    request = indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=PROMPT, top_k=top_k)
    return (await call(client.indexer.FindMatches, request, timeout=CALL_SECONDS)).overlaps


async def test_the_worker_that_has_most_is_chosen_and_the_others_have_what_all_have(world: World) -> None:
    few = await rows(world.client, top_k=4)
    assert (len(few.worker_ids), few.others.ranks, few.others.device_blocks) == (1, FLEET.ranks - 1, SYSTEM_BLOCKS)
    answer = await world.client.route(PROMPT, model=MODEL, explain=True)
    assert (answer.worker.worker_id, answer.worker.dp_rank) == ("worker-00009", 5)
    assert answer.overlap_blocks == answer.confirmed_overlap_blocks == SYSTEM_BLOCKS + PROMPT_BLOCKS
    shown = {(one.worker.worker_id, one.worker.dp_rank): one.device_blocks for one in answer.explanation.candidates}
    every = await rows(world.client)
    assert shown == dict(zip(zip(every.worker_ids, every.dp_ranks, strict=True), every.device_blocks, strict=True))
    assert len(shown) == FLEET.ranks


async def test_one_of_the_others_has_what_they_have(world: World) -> None:
    answer = await world.client.route(PROMPT, model=MODEL, pinned_worker_id="worker-00020", pinned_dp_rank=3)
    assert answer.overlap_blocks == answer.confirmed_overlap_blocks == SYSTEM_BLOCKS
    assert not answer.degraded


async def test_a_worker_that_has_nothing_yet_is_not_taken_for_one_of_the_others(world: World) -> None:
    new = workers_pb2.Worker(worker_id="new", model=MODEL, block_size=16, http_endpoint="http://127.0.0.1:9")
    await world.client.register(new)
    answer = await world.client.route(PROMPT, model=MODEL, pinned_worker_id="new")
    assert (answer.overlap_blocks, answer.worker.worker_id) == (0, "new")
    answer = await world.client.route(PROMPT, model=MODEL)
    assert answer.overlap_blocks == SYSTEM_BLOCKS + PROMPT_BLOCKS
