"""Canary weights over real indexer, scheduler, gateway and mockers: in separate processes and in one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.gateway_stack import CALL_SECONDS, Stack, fresh_prompt, mocker_worker, running_stack
from support.process_metrics import scrape
from support.processes import eventually

from kvscout.v1 import workers_pb2
from kvscout_common.rpc.channel import call

pytestmark = pytest.mark.asyncio(loop_scope="module")

SESSIONS = 24
WEIGHTS = ("--revision-weight", "v1=1", "--revision-weight", "v2=1")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(each_mode: None) -> AsyncIterator[Stack]:
    async with running_stack(mockers=((), (), ()), scheduler_flags=WEIGHTS) as started:
        for index, mocker in enumerate(started.mockers):
            worker = mocker_worker(f"w{index}", mocker, labels={"revision": "v1" if index < 2 else "v2"})
            await started.client.register(worker)
        yield started


async def test_a_session_keeps_its_revision_until_that_cannot_take_it(stack: Stack) -> None:
    client = stack.client

    async def worker_of(session: str) -> str:
        answer = await client.generate(fresh_prompt(40), session=session)
        return str(answer.route.worker.worker_id)

    first = {f"s{number}": await worker_of(f"s{number}") for number in range(SESSIONS)}
    canary = {session for session, worker_id in first.items() if worker_id == "w2"}
    # Of 24 fair draws by a fixed hash.
    assert 0 < len(canary) < SESSIONS
    for session in first:
        assert (await worker_of(session) == "w2") == (session in canary)
    taken = await scrape(stack.scheduler)
    assert taken['kvscout_revision_bookings_total{revision="v2",taken_by="v2"}'] == 2 * len(canary)
    assert 'kvscout_revision_bookings_total{revision="v2",taken_by="v1"}' not in taken

    drain = workers_pb2.DrainWorkerRequest(worker_id="w2")
    await call(client.stub.DrainWorker, drain, timeout=CALL_SECONDS)

    async def drains() -> bool:
        answer = await client.route(fresh_prompt(40), session=min(canary), explain=True)
        return answer.worker.worker_id != "w2" and "no worker of revision v2 can take it" in answer.explanation.summary

    await eventually(drains, what="the canary drains, and an explanation says who takes its sessions")
    assert {await worker_of(session) for session in canary} <= {"w0", "w1"}
    taken = await scrape(stack.scheduler)
    assert taken['kvscout_revision_bookings_total{revision="v2",taken_by="v1"}'] == len(canary)
