"""Prefill on one worker, decode on another: mockers, and engines that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio
from aiohttp import web
from support.gateway_stack import Answer, GatewayClient, Stack, fresh_prompt, mocker_worker, running_stack
from support.mocker_process import MockerProcess
from support.process_metrics import scrape
from support.processes import eventually
from support.scripted_engine import (
    Script,
    ScriptedEngine,
    answer,
    begin,
    drop,
    hang,
    refuse,
    scripted_engine,
    send_tokens,
)

from kvscout.v1 import scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.errors import ResourceExhausted, Unavailable
from kvscout_common.rpc.channel import call, to_error

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL, DECODE, AGGREGATED = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE, types_pb2.ROLE_AGGREGATED
OBJECT = {"do_remote_prefill": True, "opaque": {"deep": [1, None, "x"]}, "remote_block_ids": [[1, 2]]}
"""What a prefill engine answers with; nobody but the engines knows what it means."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(each_mode: None) -> AsyncIterator[Stack]:
    # w0: prefill, w1: decode, both of model "mock"
    timeouts = ("--engine-idle-seconds", "2", "--engine-first-output-seconds", "2")
    mockers = (("--role", "prefill"), ("--role", "decode"))
    async with running_stack(*timeouts, "--http-port", "0", mockers=mockers) as started:
        for worker_id, mocker, role in (("w0", started.mockers[0], PREFILL), ("w1", started.mockers[1], DECODE)):
            await started.client.register(mocker_worker(worker_id, mocker, role=role))
        yield started


@pytest.fixture
def client(stack: Stack) -> GatewayClient:
    return stack.client


async def paths(stack: Stack) -> dict[str, float]:
    """Requests by the path they took."""
    samples = await scrape(stack.gateway)
    prefix = 'kvscout_disaggregated_requests_total{path="'
    return {name.removeprefix(prefix)[:-2]: value for name, value in samples.items() if name.startswith(prefix)}


async def took(stack: Stack, path: str, before: dict[str, float]) -> bool:
    """Whether one request took that path, and none another, when it is over: its client may know that earlier."""

    async def counted() -> dict[str, float]:
        after = await paths(stack)
        return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}

    return bool(await eventually(counted) == {path: 1})


async def mocker_total(mocker: MockerProcess, name: str) -> float:
    return (await mocker.metrics())[f'vllm:{name}_total{{engine="0",model_name="mock"}}']


class Pools:
    """Scripted engines of a model of their own, by worker id."""

    def __init__(self, client: GatewayClient, model: str) -> None:
        self._client = client
        self.model = model
        self._stack = AsyncExitStack()

    async def add(
        self, worker_id: str, script: Script, role: types_pb2.Role.ValueType, **fields: Any
    ) -> ScriptedEngine:
        """One more worker; of the same id: another engine for it."""
        engine = await self._stack.enter_async_context(scripted_engine(script))
        await self._client.register(
            workers_pb2.Worker(
                worker_id=f"{self.model}-{worker_id}",
                model=self.model,
                role=role,
                engine=workers_pb2.ENGINE_KIND_VLLM,
                block_size=16,
                http_endpoint=engine.url,
                transport=workers_pb2.EVENT_TRANSPORT_NONE,
                **fields,
            )
        )
        return engine

    async def remove(self, worker_id: str) -> None:
        """The worker is gone."""
        request = workers_pb2.RemoveWorkerRequest(worker_id=f"{self.model}-{worker_id}")
        await call(self._client.stub.RemoveWorker, request, timeout=10)

    async def close(self, worker_ids: list[str]) -> None:
        for worker_id in worker_ids:
            await self.remove(worker_id.removeprefix(f"{self.model}-"))
        await self._stack.aclose()


@asynccontextmanager
async def pools(client: GatewayClient, model: str) -> AsyncIterator[Pools]:
    made = Pools(client, model)
    try:
        yield made
        await client.until_idle(model)
    finally:
        listed = await client.known()
        await made.close([worker_id for worker_id, entry in listed.items() if entry.worker.model == model])


async def computed(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """What a healthy prefill engine answers."""
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1, "total_tokens": len(body["prompt"]) + 1}
    choice = {"index": 0, "text": "x", "token_ids": [1], "finish_reason": "length"}
    return web.json_response({"choices": [choice], "usage": usage, "kv_transfer_params": OBJECT})


async def ever_more(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Does not stop by itself."""
    response = await begin(request)
    while True:
        await send_tokens(response, 1)
        await asyncio.sleep(0.1)


async def test_the_prompt_is_computed_on_one_worker_and_continued_on_another(stack: Stack) -> None:
    before = await paths(stack)
    prompt = fresh_prompt(100)
    got = await stack.client.generate(prompt, max_tokens=6)
    assert (got.route.worker.worker_id, len(got.token_ids)) == ("w1", 6)
    assert await took(stack, "remote", before)
    prefill, decode = stack.mockers
    assert await mocker_total(decode, "external_prefix_cache_hits") >= 100
    assert await mocker_total(decode, "nixl_num_failed_transfers") == 0
    await stack.client.until_idle()
    # The same prompt again: prefill has it cached, which is what is checked, and decode needs its last block only.
    await stack.client.until_indexed(prompt, 6, at="w0")
    again = await stack.client.generate(prompt, max_tokens=6)
    assert again.token_ids == got.token_ids
    assert again.usage is not None
    assert again.usage.cached_tokens == 96
    seen = {row.worker.worker_id: row for row in (await stack.client.status()).workers}
    assert (seen["w0"].checked > 0, seen["w0"].mispredicted, seen["w1"].checked) == (True, 0, 0)
    assert seen["w0"].cached_tokens < seen["w0"].reported_prompt_tokens <= seen["w0"].prompt_tokens
    assert await mocker_total(prefill, "nixl_num_kv_expired_reqs") == 0
    await stack.client.until_idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_openai_requests_take_the_same_path(stack: Stack, path: str, streamed: bool) -> None:
    before, text = await paths(stack), f"{path} {streamed} " + "tell me more " * 30
    asked = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    limit = {"max_tokens": 5} if path == "/v1/completions" else {"max_completion_tokens": 5, "n": 1}
    body = {"model": "mock", "stream": streamed, **asked, **limit}
    hits = await mocker_total(stack.mockers[1], "external_prefix_cache_hits")
    url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}{path}"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        answered = await response.text()
    assert response.status == 200, answered
    assert answered.count('"index"') >= (2 if streamed else 1)
    assert "kv_transfer_params" not in answered
    assert await took(stack, "remote", before)
    assert await mocker_total(stack.mockers[1], "external_prefix_cache_hits") > hits
    await stack.client.until_idle()


async def test_decode_is_charged_no_prefill_and_prefill_no_blocks(client: GatewayClient) -> None:
    """While prefill runs both are booked; while decode runs prefill is free."""
    computing, decoding = asyncio.Event(), asyncio.Event()

    async def slow_prefill(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await computing.wait()
        return await computed(request, body)

    async def slow_decode(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await decoding.wait()
        return await answer(request, body)

    async with pools(client, "charges") as workers:
        await workers.add("p", slow_prefill, PREFILL)
        await workers.add("d", slow_decode, DECODE)
        running = asyncio.create_task(client.generate(fresh_prompt(100), model="charges"))

        async def load(role: types_pb2.Role.ValueType) -> list[tuple[int, int, int]]:
            """Active requests, prefill tokens and decode blocks of the workers of a role."""
            request = scheduler_pb2.SchedulerGetPotentialLoadsRequest(model="charges", role=role)
            loads = (await call(client.scheduler.GetPotentialLoads, request, timeout=10)).loads
            return [(w.active_requests, w.active_prefill_tokens, w.active_decode_blocks) for w in loads]

        async def loaded(prefill: tuple[int, int, int], decode: tuple[int, int, int]) -> bool:
            return (await load(PREFILL), await load(DECODE)) == ([prefill], [decode])

        await eventually(lambda: loaded((1, 100, 0), (1, 0, 7)))
        computing.set()
        await eventually(lambda: loaded((0, 0, 0), (1, 0, 7)))
        decoding.set()
        await running
        await eventually(lambda: loaded((0, 0, 0), (0, 0, 0)))


async def test_the_legs_carry_what_the_engines_need_and_nothing_else_changes(client: GatewayClient) -> None:
    async with pools(client, "bodies") as workers:
        prefill = await workers.add("p", computed, PREFILL)
        decode = await workers.add("d", answer, DECODE)
        plain = await workers.add("a", answer, AGGREGATED)
        await client.generate(
            fresh_prompt(40), model="bodies", max_tokens=5, request_id="same", pinned_worker_id="bodies-a"
        )
        await client.generate(fresh_prompt(40), model="bodies", max_tokens=5, request_id="same-2")
        [first], [second], [alone] = prefill.requests, decode.requests, plain.requests
        assert first["kv_transfer_params"]["do_remote_decode"] is True
        assert (first["max_tokens"], first["stream"]) == (1, False)
        assert "stream_options" not in first
        assert "min_tokens" not in first
        assert second.pop("kv_transfer_params") == OBJECT
        assert second["prompt"] == first["prompt"]
        assert second | {"prompt": alone["prompt"]} == alone
        assert prefill.headers[0]["X-Request-Id"] == decode.headers[0]["X-Request-Id"] == "same-2"


async def test_a_prefill_engine_that_hands_nothing_over_costs_a_second_prefill(stack: Stack) -> None:
    client = stack.client

    async def empty(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        document = json.loads((await computed(request, body)).body)  # type: ignore[attr-defined]
        return web.json_response(document | {"kv_transfer_params": None})

    async with pools(client, "empty") as workers:
        await workers.add("p", empty, PREFILL)
        decode = await workers.add("d", answer, DECODE)
        await client.generate(fresh_prompt(40), model="empty")
        assert "kv_transfer_params" not in decode.requests[0]


@pytest.mark.parametrize("script", [drop, hang, refuse(500, "broken"), refuse(503, "full", **{"Retry-After": "1"})])
async def test_a_prefill_worker_that_fails_is_replaced_by_another(stack: Stack, script: Script) -> None:
    client = stack.client
    before = await paths(stack)
    async with pools(client, "retry") as workers:
        bad = await workers.add("bad", script, PREFILL)
        decode = await workers.add("d", answer, DECODE)
        good = await workers.add("good", computed, PREFILL)
        while not bad.requests:  # either may be asked first
            await client.generate(fresh_prompt(40), model="retry")
        assert len(good.requests) == len(decode.requests)
        assert decode.requests[-1]["kv_transfer_params"] == OBJECT
    assert set(await paths(stack)) - set(before) <= {"remote"}


@pytest.mark.parametrize("how", ["nobody", "refuses", "vanished"])
async def test_without_prefill_a_decode_worker_that_can_computes_the_prompt(stack: Stack, how: str) -> None:
    client = stack.client
    async with pools(client, f"fallback-{how}") as workers:
        if how != "nobody":
            await workers.add("p", refuse(500, "broken"), PREFILL)
        await workers.add("cannot", answer, DECODE)
        able = await workers.add("can", answer, DECODE, can_fallback=True)
        aggregated = await workers.add("a", answer, AGGREGATED)
        if how == "vanished":
            await workers.remove("p")
        before = await paths(stack)
        got = await client.generate(fresh_prompt(40), model=workers.model)
        assert got.route.worker.worker_id.endswith("-can")
        assert await took(stack, "fallback_decode", before)
        assert (len(able.requests), aggregated.requests) == (1, [])
        assert "kv_transfer_params" not in able.requests[0]


async def test_prefill_is_charged_to_the_worker_that_falls_back(client: GatewayClient) -> None:
    async with pools(client, "charged") as workers:
        await workers.add("p", refuse(500, "broken"), PREFILL)
        await workers.add("d", hang, DECODE, can_fallback=True)
        running = client.start(fresh_prompt(100), model="charged")

        async def charged() -> bool:
            active = [a for a in await client.active() if a.request.model == "charged"]
            return [(a.worker.worker_id, a.uncached_tokens) for a in active] == [("charged-d", 100)]

        await eventually(charged)
        running.cancel()


async def test_else_an_aggregated_worker_does_it_all_else_nobody(stack: Stack) -> None:
    client = stack.client
    async with pools(client, "last") as workers:
        await workers.add("p", refuse(500, "broken"), PREFILL)
        decode = await workers.add("d", answer, DECODE)
        before = await paths(stack)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.generate(fresh_prompt(40), model="last")
        assert isinstance(to_error(error.value), Unavailable)
        assert await took(stack, "refused", before)
        await workers.add("a", answer, AGGREGATED)
        before = await paths(stack)
        got = await client.generate(fresh_prompt(40), model="last")
        assert got.route.worker.worker_id == "last-a"
        assert await took(stack, "fallback_aggregated", before)
        assert decode.requests == []


async def test_busy_decode_workers_refuse_before_any_prefill_runs(client: GatewayClient) -> None:
    async with pools(client, "busy") as workers:
        prefill = await workers.add("p", computed, PREFILL)
        decode = await workers.add("d", ever_more, DECODE, total_kv_blocks=10)
        request = types_pb2.SetBusyThresholdsRequest(model="busy", active_decode_blocks_threshold=0.5)
        await call(client.stub.SetBusyThresholds, request, timeout=10)
        holding = client.start(fresh_prompt(100), model="busy", max_tokens=10_000)

        async def decodes() -> bool:
            # It is booked there before its prefill runs, too.
            booked = [a.worker.worker_id for a in await client.active() if a.request.model == "busy"]
            return bool(decode.requests) and booked == ["busy-d"]

        await eventually(decodes)
        ran = len(prefill.requests)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.generate(fresh_prompt(100), model="busy")
        assert isinstance(to_error(error.value), ResourceExhausted)
        assert len(prefill.requests) == ran
        holding.cancel()


async def test_a_decode_worker_that_dies_before_its_first_token_costs_one_more_try(client: GatewayClient) -> None:
    async with pools(client, "dies") as workers:
        await workers.add("p", computed, PREFILL)
        bad = await workers.add("bad", drop, DECODE)
        good = await workers.add("good", answer, DECODE)
        while not bad.requests:
            await client.generate(fresh_prompt(40), model="dies")
        assert good.requests[-1]["kv_transfer_params"] == OBJECT


async def test_a_decode_worker_that_dies_later_ends_the_request(client: GatewayClient) -> None:
    async def one_token(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await send_tokens(response, 1)
        return await drop(request, body)

    async with pools(client, "later") as workers:
        await workers.add("p", computed, PREFILL)
        await workers.add("d", one_token, DECODE)
        await workers.add("a", answer, AGGREGATED)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.generate(fresh_prompt(40), model="later")
        assert error.value.code() is grpc.StatusCode.INTERNAL


async def test_without_decode_workers_an_aggregated_one_serves(client: GatewayClient) -> None:
    async with pools(client, "pools") as workers:
        prefill = await workers.add("p", computed, PREFILL)
        await workers.add("a", answer, AGGREGATED)
        assert (await client.generate(fresh_prompt(40), model="pools")).route.worker.worker_id == "pools-a"
        await workers.add("d", answer, DECODE)
        assert (await client.generate(fresh_prompt(40), model="pools")).route.worker.worker_id == "pools-d"
        await workers.add("d", drop, DECODE)
        assert (await client.generate(fresh_prompt(40), model="pools")).route.worker.worker_id == "pools-a"
        await workers.remove("d")
        assert (await client.generate(fresh_prompt(40), model="pools")).route.worker.worker_id == "pools-a"
        assert len(prefill.requests) == 2


async def test_prefill_is_preferred_in_the_domain_of_the_decode_worker(client: GatewayClient) -> None:
    async with pools(client, "domains") as workers:
        near = await workers.add("near", computed, PREFILL, labels={"kv_transfer_domain": "rack-1"})
        far = await workers.add("far", computed, PREFILL, labels={"kv_transfer_domain": "rack-2"})
        await workers.add("d", answer, DECODE, labels={"kv_transfer_domain": "rack-1"})
        for _ in range(4):
            await client.generate(fresh_prompt(40), model="domains")
        assert (len(near.requests), len(far.requests)) == (4, 0)
        await workers.remove("near")
        await client.generate(fresh_prompt(40), model="domains")
        assert len(far.requests) == 1


async def test_prefill_and_decode_are_of_one_revision(client: GatewayClient) -> None:
    """Also while a rollout has decode workers of a revision before its prefill workers, and the other way around."""
    old, new = {"revision": "1"}, {"revision": "2"}
    async with pools(client, "rollout") as workers:
        prefills = {"1": await workers.add("p1", computed, PREFILL, labels=old)}
        decodes = {"1": await workers.add("d1", answer, DECODE, labels=old)}
        decodes["2"] = await workers.add("d2", answer, DECODE, labels=new)

        async def run(count: int) -> dict[str, tuple[int, int]]:
            """Requests that each revision's prefill and decode workers were sent."""
            for _ in range(count):
                await client.generate(fresh_prompt(40), model="rollout")
            names = sorted(prefills)
            return {name: (len(prefills[name].requests), len(decodes[name].requests)) for name in names}

        assert await run(4) == {"1": (4, 4)}, "nobody computes prompts for revision 2"
        prefills["2"] = await workers.add("p2", computed, PREFILL, labels=new)
        runs, found = 4 + 6, await run(6)
        while not decodes["2"].requests:  # either may be chosen
            runs, found = runs + 1, await run(1)
        assert all(prompts == answers > 0 for prompts, answers in found.values())
        assert sum(prompts for prompts, _ in found.values()) == runs
        await workers.add("p0", computed, PREFILL)
        assert all(prompts == answers for prompts, answers in (await run(4)).values()), "p0 has no revision"
        await workers.remove("p1")
        before = len(decodes["2"].requests)
        assert (await run(3))["2"][1] == before + 3


async def test_revisions_without_a_pair_are_served_as_without_prefill_workers(client: GatewayClient) -> None:
    async with pools(client, "apart") as workers:
        prefill = await workers.add("p", computed, PREFILL, labels={"revision": "1"})
        decode = await workers.add("d", answer, DECODE, labels={"revision": "2"}, can_fallback=True)
        assert (await client.generate(fresh_prompt(40), model="apart")).route.worker.worker_id == "apart-d"
        assert (len(prefill.requests), len(decode.requests)) == (0, 1)
        assert "kv_transfer_params" not in decode.requests[-1]


async def test_a_pin_means_the_worker_that_answers(client: GatewayClient) -> None:
    async with pools(client, "pins") as workers:
        prefill = await workers.add("p", computed, PREFILL)
        await workers.add("d1", answer, DECODE)
        await workers.add("d2", answer, DECODE)
        for worker_id in ("pins-d1", "pins-d2"):
            got = await client.generate(fresh_prompt(40), model="pins", pinned_worker_id=worker_id)
            assert got.route.worker.worker_id == worker_id
        assert len(prefill.requests) == 2
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.generate(fresh_prompt(40), model="pins", pinned_worker_id="pins-p")
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_goes_away_frees_both_legs_wherever_the_request_is(client: GatewayClient) -> None:
    async with pools(client, "gone") as workers:
        prefill = await workers.add("p", hang, PREFILL)
        decode = await workers.add("d", hang, DECODE)
        for engine, script in ((prefill, hang), (decode, computed)):
            prefill.script = script
            running = client.start(fresh_prompt(40), model="gone")

            async def asked(engine: ScriptedEngine = engine) -> bool:
                return len(engine.requests) == 1

            await eventually(asked)
            running.cancel()

            async def aborted(engine: ScriptedEngine = engine) -> bool:
                return engine.aborted == 1

            await eventually(aborted)
            await client.until_idle("gone")


async def test_a_request_that_the_prefill_engine_calls_wrong_is_wrong(client: GatewayClient) -> None:
    async with pools(client, "wrong") as workers:
        prefill = await workers.add("p", refuse(400, "no such thing"), PREFILL)
        decode = await workers.add("d", answer, DECODE, can_fallback=True)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.generate(fresh_prompt(40), model="wrong")
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (len(prefill.requests), decode.requests) == (1, [])


async def test_conditional_a_cached_prompt_stays_on_the_decode_worker() -> None:
    mockers = (("--role", "prefill"), ("--role", "decode"))
    async with running_stack("--conditional-disagg", mockers=mockers) as stack:
        client = stack.client
        await client.register(mocker_worker("w0", stack.mockers[0], role=PREFILL))
        await client.register(mocker_worker("w1", stack.mockers[1], role=DECODE, can_fallback=True))
        prompt = fresh_prompt(1_000)
        before = await paths(stack)
        await client.generate(prompt, max_tokens=2)
        assert await took(stack, "remote", before)

        async def decode_has_it() -> bool:
            return (await client.overlap(prompt)).get("w1", 0) >= 62

        await eventually(decode_has_it)
        before = await paths(stack)
        got: Answer = await client.generate(prompt, max_tokens=2)
        assert await took(stack, "local", before)
        assert got.usage is not None
        assert got.usage.cached_tokens == 992
        await client.until_idle()
