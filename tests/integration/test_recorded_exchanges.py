"""Prefill and decode apart, as real engines and SGLang's own router do it: what each leg is asked is as recorded.

The files of tests/data/exchanges hold what a client asked, what each engine was sent and what it answered.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from support.gateway_stack import Answer, Stack, running_stack
from support.openai_stack import Engine, engine
from support.processes import eventually

from kvscout.v1 import gateway_pb2, types_pb2, workers_pb2
from kvscout_common.rpc.channel import call

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOLDER = Path(__file__).parents[1] / "data/exchanges"
ROUTED = sorted(path.stem for path in FOLDER.glob("*.json") if "router" in path.stem)
RECORDED = sorted(path.stem for path in FOLDER.glob("*.json") if "router" not in path.stem)
MODEL = "tiny"
ROLES = {"prefill": types_pb2.ROLE_PREFILL, "decode": types_pb2.ROLE_DECODE}
BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


class Exchange(NamedTuple):
    """A recorded one."""

    client: Mapping[str, Any]
    attempts: Mapping[str, Mapping[str, Any]]
    """Of "prefill" and "decode": path, body, status, type, answer."""


class Client(NamedTuple):
    """What one request came to."""

    told: bytes
    """Over HTTP."""
    answer: Answer | None
    """Over gRPC."""


def exchange_of(name: str) -> Exchange:
    document = json.loads((FOLDER / f"{name}.json").read_text())
    return Exchange(document["client"], {attempt: document[attempt] for attempt in ROLES})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack("--http-port", "0", mockers=()) as started:
        yield started


class Engines:
    """A prefill and a decode engine that answer as recorded."""

    def __init__(self, exchange: Exchange, *, silent: str = "") -> None:
        self._exchange = exchange
        self._silent = silent
        self._computing = asyncio.Event()
        """The prefill engine has been asked: no decode engine has an answer before."""
        self.by_leg: dict[str, Engine] = {}

    @asynccontextmanager
    async def registered(self, stack: Stack) -> AsyncIterator[Engines]:
        """Has both of them, at a gateway."""
        kind = workers_pb2.ENGINE_KIND_SGLANG
        if "bootstrap_host" not in self._exchange.attempts["prefill"]["body"]:
            kind = workers_pb2.ENGINE_KIND_VLLM
        async with AsyncExitStack() as entered:
            for attempt, role in ROLES.items():
                self.by_leg[attempt] = one = await entered.enter_async_context(engine(self._answer(attempt)))
                where = {name: self._exchange.attempts[attempt]["body"].get(name) for name in BOOTSTRAP[:2]}
                await stack.client.register(
                    workers_pb2.Worker(
                        worker_id=attempt,
                        model=MODEL,
                        block_size=16,
                        role=role,
                        engine=kind,
                        http_endpoint=one.url,
                        **(where if attempt == "prefill" and kind == workers_pb2.ENGINE_KIND_SGLANG else {}),
                    )
                )
            try:
                yield self
            finally:
                await stack.client.until_idle(MODEL)
                for attempt in ROLES:
                    remove = workers_pb2.RemoveWorkerRequest(worker_id=attempt)
                    await call(stack.client.stub.RemoveWorker, remove, timeout=10)

    async def asked(self, attempt: str) -> dict[str, Any]:
        """The body that a leg's engine got."""
        path = self._exchange.attempts[attempt]["path"]

        async def came() -> list[bytes]:
            return [one.body for one in self.by_leg[attempt].received if one.target == path]

        [body] = await eventually(came, what=f"a request for {attempt}")
        document: dict[str, Any] = json.loads(body)
        return document

    def _answer(self, attempt: str) -> Any:
        recorded = self._exchange.attempts[attempt]

        async def script(request: web.Request, _: bytes) -> web.StreamResponse:
            if request.path != recorded["path"]:
                return web.Response(status=404)
            if attempt == "prefill":
                self._computing.set()
            await self._computing.wait()
            if attempt == self._silent:
                await asyncio.Event().wait()
            kind = {"Content-Type": recorded["type"]}
            return web.Response(status=recorded["status"], body=recorded["answer"].encode(), headers=kind)

        return script


async def ask(stack: Stack, exchange: Exchange) -> Client:
    """What the client asked, through the front that it asked."""
    body, path = exchange.client["body"], exchange.client["path"]
    if not path:
        sampling = gateway_pb2.SamplingOptions(temperature=body["temperature"])
        answer = await stack.client.generate(
            body["token_ids"], model=MODEL, max_tokens=body["max_tokens"], sampling_options=sampling
        )
        return Client(b"", answer)
    url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}{path}"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        told = await response.read()
        assert response.status == 200, told
        return Client(told, None)


def without(body: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


def events(stream: bytes) -> list[str]:
    """Those of a stream that do not tell the usage, which this client has not asked for."""
    return [one for one in stream.decode().split("\n\n") if '"usage":{' not in one]


@pytest.mark.parametrize("name", RECORDED)
async def test_both_engines_are_asked_as_the_recorded_ones_were(name: str, stack: Stack) -> None:
    exchange = exchange_of(name)
    async with Engines(exchange).registered(stack) as engines:
        client = await ask(stack, exchange)
        sent = {attempt: await engines.asked(attempt) for attempt in ROLES}
    for attempt, body in sent.items():
        # Drawn for each request.
        assert without(body, "rid", "bootstrap_room") == without(
            exchange.attempts[attempt]["body"], "rid", "bootstrap_room"
        )
    for drawn in ("rid", "bootstrap_room"):
        assert sent["prefill"].get(drawn) == sent["decode"].get(drawn)
    answered = exchange.attempts["decode"]["answer"]
    if client.answer is not None:
        assert client.answer.finish_reason == gateway_pb2.FINISH_REASON_LENGTH
        assert client.answer.usage is not None
        assert len(client.answer.token_ids) == client.answer.usage.completion_tokens == 4
    else:
        assert events(client.told) == events(answered.encode())


@pytest.mark.parametrize("name", ROUTED)
async def test_engines_are_told_where_to_meet_as_sglang_s_own_router_tells_them(name: str, stack: Stack) -> None:
    exchange = exchange_of(name)
    theirs = {attempt: exchange.attempts[attempt]["body"] for attempt in ROLES}
    assert theirs["prefill"] == theirs["decode"]
    async with Engines(exchange).registered(stack) as engines:
        await ask(stack, exchange)
        sent = {attempt: await engines.asked(attempt) for attempt in ROLES}
    meeting = {field: sent["prefill"][field] for field in BOOTSTRAP}
    assert meeting == {field: sent["decode"][field] for field in BOOTSTRAP}
    assert without(meeting, "bootstrap_room") == {field: theirs["prefill"][field] for field in BOOTSTRAP[:2]}
    for room in (meeting["bootstrap_room"], theirs["prefill"]["bootstrap_room"]):
        assert isinstance(room, int)
        assert 0 <= room < 1 << 63


async def test_a_prefill_engine_that_answers_last_is_accounted_by_what_decode_says(stack: Stack) -> None:
    async def rows() -> list[gateway_pb2.WorkerObservation]:
        return [row for row in (await stack.client.status()).workers if row.worker.worker_id == "prefill"]

    async with Engines(exchange_of("sglang-0.5.23-generate"), silent="prefill").registered(stack) as engines:
        client = await ask(stack, exchange_of("sglang-0.5.23-generate"))
        await engines.asked("prefill")

        async def accounted() -> bool:
            return [(row.requests, row.failures, row.cached_tokens) for row in await rows()] == [(1, 0, 96)]

        await eventually(accounted, what="the prompt accounted to its worker")
    assert client.answer is not None
    assert client.answer.usage is not None
    assert client.answer.usage.cached_tokens == 96
