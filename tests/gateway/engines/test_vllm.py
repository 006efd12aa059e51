"""Requests at engines that speak as vLLM does: connections, limits and errors of HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import resource
from array import array
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from support.processes import eventually
from support.scripted_engine import Script, ScriptedEngine, answer, begin, hang, refuse, scripted_engine, send_tokens
from support.tcp_server import tcp_server

from kvscout.v1 import gateway_pb2
from kvscout_common.http.factory import connect
from kvscout_common.http.http import HttpRequest
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_gateway.engines.engine_call import Engines
from kvscout_gateway.engines.faults import EngineFailed, Fault
from kvscout_gateway.engines.timeouts import EngineTimeouts, Liveness
from kvscout_gateway.engines.vllm import TOKENS_A_TURN, VllmAdapter
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.prompt import Geometry, Prompt
from kvscout_gateway.values.request import NO_FIELDS, Request, TokenBody


class Output:
    """A client that keeps what it is sent."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finish = ""
        self.came = asyncio.Event()

    async def write(self, data: bytes) -> None:
        message = gateway_pb2.GenerateResponse.FromString(data)
        self.token_ids += message.token_ids
        self.finish = message.engine_finish_reason or self.finish
        self.came.set()


@asynccontextmanager
async def engines(timeouts: EngineTimeouts | None = None) -> AsyncIterator[Engines]:
    """Calls engines."""
    calling = Engines(connect(), timeouts or EngineTimeouts(), client_write_seconds=5.0)
    try:
        yield calling
    finally:
        await calling.close()


def placed(endpoint: str, dp_rank: int | None = None) -> Decision:
    spec = WorkerSpec(worker_id="w", model="m", block_size=16, dp_size=1 if dp_rank is None else 8)
    pool = Geometry(16, eagle=False)
    return Decision("default", "m", WorkerRank("w", dp_rank or 0), pool, b"", endpoint=endpoint, spec=spec)


def asked(token_ids: Iterable[int], parameters: dict[str, Any]) -> Request:
    prompt = Prompt(isl_tokens=1, token_ids=array("I", token_ids).tobytes())
    return Request("m", "default", prompt, TokenBody(parameters), request_id="r")


async def run(
    calling: Engines,
    engine: ScriptedEngine | str,
    *,
    token_ids: tuple[int, ...] = (1,),
    dp_rank: int | None = None,
    parameters: dict[str, Any] | None = None,
    uncached_tokens: int = 0,
    liveness: Liveness | None = None,
    output: Output | None = None,
) -> list[int]:
    """One request; the tokens that came."""
    adapter, output = VllmAdapter(), output or Output()
    to = placed(engine if isinstance(engine, str) else engine.url, dp_rank)
    request = asked(token_ids, {"max_tokens": 3} if parameters is None else parameters)
    body = request.body
    call = calling.call(to.endpoint, uncached_tokens=uncached_tokens, liveness=liveness or Liveness())
    try:
        answered = await call.send(await body.write(adapter, to, request, NO_FIELDS))
        await call.relay(
            answered,
            output,
            body.form,
            adapter.dialect,
            max_tokens=body.max_tokens,
            on_first_output=lambda: None,
        )
    finally:
        call.end()
    return output.token_ids


async def test_a_connection_is_used_again() -> None:
    peers = set()

    async def note(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        peers.add(request.transport.get_extra_info("peername") if request.transport else None)
        return await answer(request, body)

    async with scripted_engine(note) as engine, engines() as calling:
        for _ in range(5):
            assert await run(calling, engine) == [1, 2, 3]
    assert len(peers) == 1


async def test_ranks_are_named_in_a_header() -> None:
    async with scripted_engine(answer) as engine, engines() as calling:
        await run(calling, engine, dp_rank=3)
        assert engine.headers[0]["X-data-parallel-rank"] == "3"


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (400, Fault.REQUEST),
        (413, Fault.REQUEST),
        (422, Fault.REQUEST),
        (401, Fault.REFUSED),
        (404, Fault.REFUSED),
        (302, Fault.REFUSED),
        (429, Fault.OVERLOAD),
        (503, Fault.OVERLOAD),
        (500, Fault.REFUSED),
    ],
)
async def test_a_refusal_tells_whose_fault_it_is(status: int, fault: Fault) -> None:
    async with (
        scripted_engine(refuse(status, "because", **{"Retry-After": "7", "Location": "/elsewhere"})) as engine,
        engines() as calling,
    ):
        with pytest.raises(EngineFailed, match=f"{status}$") as failed:
            await run(calling, engine)
        assert failed.value.message == f"engine answered {status}: because"
        assert failed.value.fault is fault
        assert failed.value.retry_after_seconds == 7
        assert len(engine.requests) == 1


async def test_without_descriptors_the_engine_is_not_to_blame() -> None:
    async with scripted_engine(answer) as engine, engines() as calling:
        assert await run(calling, engine) == [1, 2, 3]  # everything is loaded
    async with scripted_engine(answer) as engine, engines() as calling:
        _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with pytest.raises(EngineFailed, match="Too many open files") as failed:
                await run(calling, engine)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert failed.value.fault is Fault.GATEWAY
        assert await run(calling, engine) == [1, 2, 3]


async def test_a_refusal_that_is_no_json_is_told_as_it_is() -> None:
    async def gateway_error(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=502, text="<html>bad gateway</html>", headers={"Retry-After": "soon"})

    async with scripted_engine(gateway_error) as engine, engines() as calling:
        with pytest.raises(EngineFailed) as failed:
            await run(calling, engine)
        assert failed.value.message == "engine answered 502: <html>bad gateway</html>"
        assert failed.value.retry_after_seconds is None


async def test_who_stops_waiting_aborts_the_engines_request() -> None:
    async def one_then_hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await send_tokens(response, 1)
        return await hang(request, body)

    async with scripted_engine(one_then_hang) as engine, engines() as calling:
        output = Output()
        running = asyncio.create_task(run(calling, engine, output=output))
        await output.came.wait()
        running.cancel()
        await eventually(lambda: engine.aborted == 1)


SHORT = EngineTimeouts(first_output_seconds=0.2, idle_seconds=0.2, prefill_tokens_per_second=1e9)


def chatter(*line: bytes, first: int = 0) -> Script:
    """Some tokens, then a line again and again, without end."""

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        if first:
            await send_tokens(response, *range(1, first + 1))
        while True:
            await response.write(b"".join(line))
            await asyncio.sleep(0.02)

    return script


EMPTY = b'data: {"choices": [{"token_ids": [], "text": "", "finish_reason": null}]}\n\n'


@pytest.mark.parametrize("first", [0, 2], ids=["before a token", "after tokens"])
@pytest.mark.parametrize("line", [b"", b": ping\n\n", b"\n\n", b"event: ping\ndata: \n\n", EMPTY])
async def test_an_engine_that_puts_out_nothing_hangs_whatever_it_sends(line: bytes, first: int) -> None:
    async with scripted_engine(chatter(line, first=first)) as engine, engines(SHORT) as calling:
        with pytest.raises(EngineFailed, match="hangs: no output for") as failed:
            await run(calling, engine)
        assert failed.value.fault is Fault.WORKER
        await eventually(lambda: _aborted(engine))


async def _aborted(engine: ScriptedEngine) -> bool:
    return engine.aborted == 1


async def test_an_engine_that_does_not_even_send_a_head_hangs() -> None:
    async with scripted_engine(hang) as engine, engines(SHORT) as calling:
        with pytest.raises(EngineFailed, match="hangs"):
            await run(calling, engine)


async def test_a_long_prompt_explains_a_long_silence() -> None:
    async def after_a_while(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return await answer(request, body)

    async with (
        scripted_engine(after_a_while) as engine,
        engines(EngineTimeouts(first_output_seconds=0.2, prefill_tokens_per_second=1000)) as calling,
    ):
        assert await run(calling, engine, uncached_tokens=20_000) == [1, 2, 3]
        with pytest.raises(EngineFailed, match="hangs"):
            await run(calling, engine, uncached_tokens=20)


async def test_who_stands_in_line_is_not_silent_while_others_are_served() -> None:
    async def slowly(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        for token in range(10):
            await send_tokens(response, token)
            await asyncio.sleep(0.2)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def in_line(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (slowly(request, body) if body["prompt"] == [1] else hang(request, body))

    liveness = Liveness()
    timeouts = EngineTimeouts(first_output_seconds=1.5, idle_seconds=1.5, prefill_tokens_per_second=1e9)
    async with scripted_engine(in_line) as engine, engines(timeouts) as calling:
        served = asyncio.create_task(run(calling, engine, liveness=liveness, parameters={}))
        waits = asyncio.create_task(run(calling, engine, liveness=liveness, token_ids=(2,)))
        assert len(await served) == 10
        assert not waits.done()
        with pytest.raises(EngineFailed, match="hangs"):
            await waits


@pytest.mark.parametrize("whole_answer", [1, 2, 7])
async def test_tokens_past_max_tokens_end_the_stream(whole_answer: int) -> None:
    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await send_tokens(response, *[7] * whole_answer)
            await asyncio.sleep(0)

    async with scripted_engine(endless) as engine, engines() as calling:
        output = Output()
        await run(calling, engine, output=output)
        assert (output.token_ids, output.finish) == ([7, 7, 7], "length")
        await eventually(lambda: _aborted(engine))


async def test_an_engine_that_never_ends_its_body_has_answered_all_the_same() -> None:
    async def lingering(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await send_tokens(response, 1)
        await response.write(b"data: [DONE]\n\n")
        return await hang(request, body)

    async with scripted_engine(lingering) as engine, engines() as calling:
        assert await run(calling, engine) == [1]


async def test_a_body_of_another_protocol_is_a_failure() -> None:
    async def speak_otherwise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")

    async with tcp_server(speak_otherwise) as port, engines() as calling:
        with pytest.raises(EngineFailed):
            await run(calling, f"http://127.0.0.1:{port}")


async def test_a_packed_answer_is_not_unpacked() -> None:
    unpacked = 64 * 1024 * 1024

    async def packed(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=gzip.compress(bytes(unpacked)), headers={"Content-Encoding": "gzip"})

    async with scripted_engine(packed) as engine, engines() as calling:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(EngineFailed):
            await run(calling, engine)
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < unpacked


async def test_others_have_their_turn_while_a_long_prompt_is_written() -> None:
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    slices = 8
    prompt = array("I", range(slices * TOKENS_A_TURN + 1))
    others = asyncio.create_task(take_turns())
    request = asked(prompt, {"max_tokens": 3})
    written: HttpRequest = await request.body.write(VllmAdapter(), placed("http://engine"), request, NO_FIELDS)
    others.cancel()
    assert turns >= slices
    document = json.loads(written.body)
    assert (document["prompt"], document["max_tokens"]) == (prompt.tolist(), 3)
