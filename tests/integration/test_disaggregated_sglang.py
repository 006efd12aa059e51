"""SGLang's prefill and decode engines, both at once: Generate over the real stack."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio
from support.gateway_stack import Stack, fresh_prompt, mocker_worker, running_stack
from support.mocker_process import MockerProcess, running_mocker
from support.process_metrics import scrape
from support.processes import eventually

from kvscout.v1 import types_pb2, workers_pb2
from kvscout_common.rpc.channel import call

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL, DECODE, AGGREGATED = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE, types_pb2.ROLE_AGGREGATED
SGLANG = ("--api", "sglang", "--dp-size", "2")
TIMEOUTS = ("--bootstrap-timeout-seconds", "1.5", "--waiting-timeout-seconds", "1.5")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(each_mode: None) -> AsyncIterator[Stack]:
    flags = ("--engine-first-output-seconds", "3", "--engine-connect-seconds", "1")
    mockers = ((*SGLANG, *TIMEOUTS, "--role", "prefill"), (*SGLANG, *TIMEOUTS, "--role", "decode"))
    async with running_stack(*flags, "--http-port", "0", mockers=mockers) as started:
        prefill, decode = started.mockers
        await register(started, "w0", prefill, PREFILL)
        await register(started, "w1", decode, DECODE)
        yield started


async def register(stack: Stack, worker_id: str, mocker: MockerProcess, role: types_pb2.Role.ValueType) -> None:
    engine = workers_pb2.ENGINE_KIND_SGLANG
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": mocker.bootstrap_port} if role == PREFILL else {}
    fields: dict[str, Any] = {"role": role, "engine": engine, **where}
    await stack.client.register(mocker_worker(worker_id, mocker, **fields))


async def remove(stack: Stack, worker_id: str) -> None:
    await call(stack.client.stub.RemoveWorker, workers_pb2.RemoveWorkerRequest(worker_id=worker_id), timeout=10)


async def path(stack: Stack, name: str) -> float:
    return (await scrape(stack.gateway)).get(f'kvscout_disaggregated_requests_total{{path="{name}"}}', 0)


async def until_path(stack: Stack, name: str, count: float) -> None:
    """Wait until so many requests were counted: their clients may know that they are over before."""

    async def counted() -> bool:
        return await path(stack, name) == count

    await eventually(counted, what=f"{count} requests counted as {name}")


async def test_both_engines_get_the_request_and_decode_answers(stack: Stack) -> None:
    prompt = fresh_prompt(100)
    before = await path(stack, "remote")
    got = await stack.client.generate(prompt, max_tokens=5)
    assert (got.route.worker.worker_id, len(got.token_ids)) == ("w1", 5)
    await until_path(stack, "remote", before + 1)
    await stack.client.until_indexed(prompt, 6, at="w0")
    again = await stack.client.generate(prompt, max_tokens=5)
    assert again.token_ids == got.token_ids
    assert again.usage is not None
    assert again.usage.cached_tokens == 96  # of the prefill engine: the rank that has them was chosen, and met
    seen = [row for row in (await stack.client.status()).workers if row.worker.worker_id == "w0"]
    assert (sum(row.requests for row in seen), sum(row.mispredicted for row in seen)) == (2, 0)
    await stack.client.until_idle()


@pytest.mark.parametrize("streamed", [True, False])
async def test_openai_requests_meet_in_rooms_too(stack: Stack, streamed: bool) -> None:
    async def prefills() -> int:
        return sum(row.requests for row in (await stack.client.status()).workers if row.worker.worker_id == "w0")

    before = await prefills()
    body = {"model": "mock", "prompt": list(range(900, 1000)), "max_tokens": 4, "stream": streamed}
    url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}/v1/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        answered = await response.text()
    assert response.status == 200, answered
    assert '"finish_reason":"length"' in answered.replace(" ", "")

    async def one_more() -> bool:
        return await prefills() == before + 1

    await eventually(one_more, what="a prompt at the prefill worker")
    await stack.client.until_idle()


async def test_many_at_once_all_meet_in_their_own_room(stack: Stack) -> None:
    answers = await asyncio.gather(*(stack.client.generate(fresh_prompt(50), max_tokens=3) for _ in range(24)))
    assert all(len(answer.token_ids) == 3 for answer in answers)
    await stack.client.until_idle()


async def test_a_dead_prefill_worker_costs_one_more_try_and_the_decode_leg_comes_along(stack: Stack) -> None:
    async with running_mocker(*SGLANG, *TIMEOUTS, "--role", "prefill") as dying:
        await register(stack, "dead", dying, PREFILL)
        dying.process.kill()
        await dying.process.wait()
        try:
            for _ in range(4):  # either may be asked first
                got = await stack.client.generate(fresh_prompt(50), max_tokens=3)
                assert (len(got.route.worker.worker_id), len(got.token_ids)) == (2, 3)
        finally:
            await remove(stack, "dead")
    await stack.client.until_idle()


async def test_a_dead_decode_worker_is_not_blamed_on_prefill(stack: Stack) -> None:
    async with running_mocker(*SGLANG, *TIMEOUTS, "--role", "decode") as dying:
        await register(stack, "dead", dying, DECODE)
        dying.process.kill()
        await dying.process.wait()
        try:
            before = {row.worker.worker_id: row.failures for row in (await stack.client.status()).workers}
            for _ in range(4):
                assert len((await stack.client.generate(fresh_prompt(50), max_tokens=3)).token_ids) == 3
            after = {row.worker.worker_id: row.failures for row in (await stack.client.status()).workers}
            assert after["w0"] == before.get("w0", 0)
        finally:
            await remove(stack, "dead")
    await stack.client.until_idle()


async def test_a_hanging_prefill_worker_leaves_a_decode_engine_that_is_told_so(stack: Stack) -> None:
    """No other prefill worker, and decode engines of this kind compute no prompts: an aggregated one does it."""
    prefill = stack.mockers[0]
    async with running_mocker("--api", "sglang") as alone:
        await register(stack, "alone", alone, AGGREGATED)
        prefill.process.send_signal(signal.SIGSTOP)
        try:
            got = await stack.client.generate(fresh_prompt(50), max_tokens=3)
        finally:
            prefill.process.send_signal(signal.SIGCONT)
            await remove(stack, "alone")
        assert (got.route.worker.worker_id, len(got.token_ids)) == ("alone", 3)
        await until_path(stack, "fallback_aggregated", 1)
    await stack.client.until_idle()


async def test_a_client_that_goes_away_ends_both_legs(stack: Stack) -> None:
    decode = stack.mockers[1]
    running = stack.client.start(fresh_prompt(30), max_tokens=20_000)
    await anext(aiter(running))
    running.cancel()
    await stack.client.until_idle()

    async def unused() -> bool:
        samples = await decode.metrics()
        return not any(value for name, value in samples.items() if name.startswith("sglang:token_usage"))

    await eventually(unused)


async def test_without_prefill_and_aggregated_workers_it_is_unavailable(stack: Stack) -> None:
    await remove(stack, "w0")
    try:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stack.client.generate(fresh_prompt(50))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await register(stack, "w0", stack.mockers[0], PREFILL)
    assert len((await stack.client.generate(fresh_prompt(50), max_tokens=3)).token_ids) == 3
