"""Every dialect, over the OpenAI front and a real Envoy, whole and as a stream, on one worker and on two.

The engines are mockers: their prompts, usage and errors are those that vLLM would have for the same bodies.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.dialect_answers import BY_NAME, SAMPLES, Sample, error_of, last_error
from support.envoy_process import running_envoy
from support.gateway_stack import MODEL, Stack, mocker_worker, running_stack
from support.mocker_process import MockerProcess, running_mocker
from support.process_metrics import scrape
from support.processes import eventually

from kvscout.v1 import types_pb2, workers_pb2
from kvscout_common.rpc.channel import call

pytestmark = pytest.mark.asyncio(loop_scope="module")

APART, SLOW = "apart", "slow"
"""Models: of a prefill and a decode worker; of one worker that takes its time."""
CACHED = ("--store-responses", "--prompt-tokens-details", "always")
MOCKERS = (
    (*CACHED,), (*CACHED,),
    (*CACHED, "--model", APART, "--role", "prefill"), (*CACHED, "--model", APART, "--role", "decode"),
    ("--model", SLOW, "--speedup", "1", "--step-base-ms", "100"),
)  # fmt: skip
FRONTS = ("openai", "envoy")
_numbers = itertools.count(random.randrange(1 << 30))


def text(words: int = 96) -> str:
    """Return a text that no other request has."""
    number = next(_numbers)
    return " ".join(f"w{number}x{index}" for index in range(words))


def body_of(sample: Sample, model: str = MODEL, prompt: str = "", **fields: Any) -> dict[str, Any]:
    """Return a request of a dialect."""
    prompt = prompt or text()
    own: Any = [{"role": "user", "content": prompt}] if sample.api.prompt == "messages" else prompt
    return {"model": model, sample.api.prompt: own, sample.api.limits[-1]: 4, **fields}


def usage_in(sample: Sample, answer: bytes) -> tuple[int, int | None]:
    """Return the prompt's tokens, and those that were cached, in an answer; None = the engine does not say."""
    documents = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")] or [answer]
    found = None
    for document in map(json.loads, documents):
        reported = document if "usage" in document else document.get("response") or {}
        found = sample.api.answer.usage(reported) or found
    assert found is not None, answer
    return found.prompt_tokens, found.cached_tokens


class World:
    """A stack and an Envoy whose picker it is."""

    def __init__(self, stack: Stack, http: aiohttp.ClientSession, envoy_url: str) -> None:
        self.stack = stack
        self.client = stack.client
        self.http = http
        self.urls = {"openai": f"http://127.0.0.1:{stack.gateway.ready['http_port']}", "envoy": envoy_url}

    async def ask(self, front: str, path: str, body: dict[str, Any] | bytes) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with self.http.post(self.urls[front] + path, data=data, headers=headers) as response:
            return response.status, await response.read()

    async def get(self, front: str, path: str) -> tuple[int, bytes]:
        """Return the status and the body of an answer to a GET."""
        async with self.http.get(self.urls[front] + path) as response:
            return response.status, await response.read()

    async def until_idle(self) -> None:
        """Wait until nothing is booked on any worker."""
        for model in (MODEL, APART, SLOW):
            await self.client.until_idle(model)

    async def sampled(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        return sum(value for key, value in (await scrape(self.stack.gateway)).items() if key.startswith(name))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(each_mode: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    flags = ("--endpoint-picker-port", "0", "--endpoint-picker-sample-every", "1", "--shutdown-delay-seconds", "0")
    # A machine that is busy with other tests must not look like a tokenizer that is slow.
    patience = ("--http-port", "0", "--tokenize-timeout-ms", "5000", "--endpoint-picker-timeout-ms", "3500")
    async with AsyncExitStack() as entered:
        enter = entered.enter_async_context
        stack = await enter(running_stack(*flags, *patience, mockers=MOCKERS))
        roles = {2: types_pb2.ROLE_PREFILL, 3: types_pb2.ROLE_DECODE}
        for number, model in ((2, APART), (3, APART), (4, SLOW)):
            role = roles.get(number, types_pb2.ROLE_AGGREGATED)
            worker = mocker_worker(f"w{number}", stack.mockers[number], model=model, role=role)
            await stack.client.register(worker)
        picker = f"127.0.0.1:{stack.gateway.ready['endpoint_picker_port']}"
        hosts = [mocker.url.removeprefix("http://") for mocker in stack.mockers]
        envoy = await enter(running_envoy(tmp_path_factory.mktemp("envoy"), picker, hosts))
        yield World(stack, await enter(aiohttp.ClientSession()), envoy.url)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_stays_booked(world: World) -> AsyncIterator[None]:
    yield
    await world.until_idle()


EVERY = pytest.mark.parametrize("sample", SAMPLES, ids=str)
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
BOTH_FRONTS = pytest.mark.parametrize("front", FRONTS)


@EVERY
@BOTH_FRONTS
@STREAMS
@pytest.mark.parametrize("model", [MODEL, APART])
async def test_a_prompt_goes_where_it_is_cached_as_its_dialect_says(
    world: World, sample: Sample, front: str, stream: bool, model: str
) -> None:
    body = body_of(sample, model, stream=stream)
    if stream and sample.api.asks_for_usage:
        body["stream_options"] = {"include_usage": True}
    status, answer = await world.ask(front, sample.api.path, body)
    assert status == 200, answer
    prompt_tokens, cached = usage_in(sample, answer)
    assert prompt_tokens >= 96
    if model == APART:
        return
    assert cached == 0
    expected = (prompt_tokens - 1) // 16 * 16

    async def comes_back() -> bool:
        """Tell whether three requests in a row found the prompt: its events have come."""
        answers = [await world.ask(front, sample.api.path, body) for _ in range(3)]
        return all(usage_in(sample, answer)[1] == expected for _, answer in answers)

    await eventually(comes_back, what="three answers from the worker that has it cached")


@pytest.mark.parametrize("name", ["messages", "responses"])
@STREAMS
async def test_predictions_of_agents_requests_come_true(world: World, name: str, stream: bool) -> None:
    sample = BY_NAME[name]
    checked, wrong = "kvscout_predictions_checked_total", "kvscout_mispredictions_total"
    before = await world.sampled(checked), await world.sampled(wrong)

    async def blocks() -> int:
        return sum(source.blocks for source in (await world.client.sources()).values())

    async def at_least(number: int) -> bool:
        return await blocks() >= number

    conversation, turns, held = text(), 6, await blocks()
    for _ in range(turns):
        body = body_of(sample, MODEL, conversation, stream=stream)
        prompt_tokens, _ = usage_in(sample, (await world.ask("openai", sample.api.path, body))[1])
        conversation += f" {text(40)}"
        await eventually(partial(at_least, held + prompt_tokens // 16), what="the blocks of a turn")

    async def all_checked() -> bool:
        return await world.sampled(checked) - before[0] == turns

    await eventually(all_checked, what="each prediction checked")
    assert await world.sampled(wrong) == before[1]


@EVERY
@STREAMS
async def test_prefill_and_decode_are_apart_in_every_dialect(world: World, sample: Sample, stream: bool) -> None:
    prefill, decode = world.stack.mockers[2:4]

    async def total(mocker: MockerProcess, name: str) -> float:
        return (await mocker.metrics())[f'vllm:{name}_total{{engine="0",model_name="{APART}"}}']

    async def figures() -> tuple[float, float]:
        """Return outputs of the prefill worker, and prompt tokens that the decode worker was handed."""
        return await total(prefill, "generation_tokens"), await total(decode, "external_prefix_cache_hits")

    before = await figures()
    remote = await world.sampled('kvscout_disaggregated_requests_total{path="remote"')
    status, answer = await world.ask("openai", sample.api.path, body_of(sample, APART, stream=stream))
    assert status == 200, answer
    after = await figures()
    assert after[0] - before[0] == 1
    assert after[1] - before[1] >= 96

    async def counted() -> bool:
        return await world.sampled('kvscout_disaggregated_requests_total{path="remote"') == remote + 1

    await eventually(counted, what="the path of the request")


@EVERY
@BOTH_FRONTS
async def test_a_client_that_goes_leaves_no_booking(world: World, sample: Sample, front: str) -> None:
    body = body_of(sample, SLOW, stream=True) | {sample.api.limits[-1]: 500}
    async with world.http.post(world.urls[front] + sample.api.path, json=body) as response:
        assert response.status == 200
        await response.content.readline()
        await world.client.until_active()
    await world.client.until_idle(SLOW)


@asynccontextmanager
async def short_lived(world: World, model: str) -> AsyncIterator[MockerProcess]:
    """An engine that a test may kill, as the only worker of its model."""
    async with running_mocker("--model", model, "--speedup", "1", "--step-base-ms", "100") as mocker:
        await world.client.register(mocker_worker(model, mocker, model=model))
        try:
            yield mocker
        finally:
            await call(world.client.stub.RemoveWorker, workers_pb2.RemoveWorkerRequest(worker_id=model))


@EVERY
async def test_an_engine_that_dies_leaves_an_error_of_the_dialect_and_no_booking(world: World, sample: Sample) -> None:
    model = f"dies-{next(_numbers)}"
    async with short_lived(world, model) as mocker:
        body = body_of(sample, model, stream=True) | {sample.api.limits[-1]: 500}
        async with world.http.post(world.urls["openai"] + sample.api.path, json=body) as response:
            assert response.status == 200
            begun = await response.content.readline()
            mocker.process.kill()
            answer = begun + await response.read()
        assert "failed after its first token" in last_error(sample, answer)["error"]["message"]
        await mocker.process.wait()
        await world.client.until_idle(model)
        status, answer = await world.ask("openai", sample.api.path, body_of(sample, model))
        error_of(sample, json.loads(answer))
        assert status == 503
        await world.client.until_idle(model)


@EVERY
@BOTH_FRONTS
@pytest.mark.parametrize(
    ("changes", "status", "anthropic"),
    [
        ({"model": "nobody's"}, 404, "not_found_error"),
        ({"model": 7}, 400, "invalid_request_error"),
        (b"{", 400, "invalid_request_error"),
        (b"[]", 400, "invalid_request_error"),
    ],
)
async def test_refusals_have_the_dialects_shape_on_every_front(
    world: World, sample: Sample, front: str, changes: Any, status: int, anthropic: str
) -> None:
    body = changes if isinstance(changes, bytes) else body_of(sample) | changes
    got, answer = await world.ask(front, sample.api.path, body)
    kind, message = error_of(sample, json.loads(answer))
    assert (got, bool(message)) == (status, True)
    assert kind == (anthropic if sample.api.name == "messages" else "invalid_request_error")


WRONG: tuple[Any, ...] = (7, [7], {}, [{"role": 7, "content": "x"}])


@BOTH_FRONTS
@pytest.mark.parametrize("name", ["messages", "responses"])
async def test_what_is_wrong_in_a_prompt_the_engine_says(world: World, front: str, name: str) -> None:
    sample = BY_NAME[name]
    for wrong in WRONG:
        status, answer = await world.ask(front, sample.api.path, body_of(sample) | {sample.api.prompt: wrong})
        assert (status, "error" in json.loads(answer)) == (400, True), answer


@BOTH_FRONTS
@pytest.mark.parametrize("model", [MODEL, APART])
async def test_tokens_are_counted_as_the_prompt_has_them_and_nothing_is_booked(
    world: World, front: str, model: str
) -> None:
    sample = BY_NAME["messages"]
    body = body_of(sample, model)
    status, counted = await world.ask(front, sample.api.count_path, body)
    assert status == 200, counted
    assert await world.client.active() == []
    _, answer = await world.ask(front, sample.api.path, body)
    assert json.loads(counted)["input_tokens"] == usage_in(sample, answer)[0]


@BOTH_FRONTS
@STREAMS
async def test_a_stored_response_is_continued_and_read_where_it_is(world: World, front: str, stream: bool) -> None:
    sample = BY_NAME["responses"]

    async def respond(**fields: Any) -> str:
        status, answer = await world.ask(front, sample.api.path, body_of(sample, stream=stream, **fields))
        assert status == 200, answer
        document = json.loads(answer.split(b"data: ")[1].split(b"\n")[0]) if stream else json.loads(answer)
        return str((document["response"] if stream else document)["id"])

    for _ in range(3):
        previous = await respond()
        for _ in range(3):
            previous = await respond(previous_response_id=previous)
        status, answer = await world.get(front, f"{sample.api.path}/{previous}")
        assert (status, json.loads(answer)["id"]) == (200, previous)
    status, answer = await world.ask(front, sample.api.path, body_of(sample, previous_response_id="resp_nowhere"))
    assert (status, json.loads(answer)["error"]["code"]) == (404, "previous_response_not_found")


async def test_many_requests_of_all_dialects_at_once_leave_nothing_booked(world: World) -> None:
    async def one(sample: Sample, front: str, model: str, stream: bool) -> int:
        return (await world.ask(front, sample.api.path, body_of(sample, model, stream=stream)))[0]

    every = itertools.product(SAMPLES, FRONTS, (MODEL, APART), (False, True))
    assert set(await asyncio.gather(*(one(*each) for each in every))) == {200}
    await world.until_idle()
