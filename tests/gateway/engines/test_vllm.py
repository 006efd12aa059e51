"""The engine adapter: connections, limits and errors of HTTP."""

import asyncio
import gzip
import json
import os
import resource
from array import array
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web
from processes import eventually
from scripted_engine import Script, ScriptedEngine, answer, begin, hang, refuse, scripted_engine, send_tokens

from kvscout_gateway.engines.failure import EngineFailed, Fault
from kvscout_gateway.engines.patience import Patience, Pulse
from kvscout_gateway.engines.vllm import TOKENS_A_TURN, Dispatch, VllmEngine, _body


def dispatch(engine: ScriptedEngine, **fields: Any) -> Dispatch:
    defaults = {"endpoint": engine.url, "model": "m", "token_ids": array("I", [1]), "request_id": "r", "dp_rank": None}
    return Dispatch(**{**defaults, "parameters": {"max_tokens": 3}, **fields})


async def run(adapter: VllmEngine, asked: Dispatch) -> list[int]:
    got: list[int] = []
    async with aclosing(adapter.generate(asked)) as chunks:
        async for chunk in chunks:
            got += chunk.token_ids or ()
    return got


async def test_a_connection_is_used_again() -> None:
    peers = set()

    async def note(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        peers.add(request.transport.get_extra_info("peername") if request.transport else None)
        return await answer(request, body)

    adapter = VllmEngine(Patience())
    async with scripted_engine(note) as engine:
        for _ in range(5):
            assert await run(adapter, dispatch(engine)) == [1, 2, 3]
        await adapter.close()
    assert len(peers) == 1


async def test_ranks_are_named_in_a_header() -> None:
    adapter = VllmEngine(Patience())
    async with scripted_engine(answer) as engine:
        await run(adapter, dispatch(engine, dp_rank=3))
        assert engine.headers[0]["X-data-parallel-rank"] == "3"
        await adapter.close()


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
    adapter = VllmEngine(Patience())
    async with scripted_engine(refuse(status, "because", **{"Retry-After": "7", "Location": "/elsewhere"})) as engine:
        with pytest.raises(EngineFailed, match=f"{status}: because") as failed:
            await run(adapter, dispatch(engine))
        assert failed.value.fault is fault
        assert failed.value.retry_after_seconds == 7
        assert len(engine.requests) == 1
        await adapter.close()


async def test_without_descriptors_the_engine_is_not_to_blame() -> None:
    adapter = VllmEngine(Patience())
    async with scripted_engine(answer) as engine:
        assert await run(adapter, dispatch(engine)) == [1, 2, 3]  # everything is loaded
        await adapter.close()
        adapter = VllmEngine(Patience())
        _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with pytest.raises(EngineFailed, match="Too many open files") as failed:
                await run(adapter, dispatch(engine))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert failed.value.fault is Fault.GATEWAY
        assert await run(adapter, dispatch(engine)) == [1, 2, 3]
        await adapter.close()


async def test_a_refusal_that_is_no_json_is_told_as_it_is() -> None:
    async def gateway_error(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=502, text="<html>bad gateway</html>", headers={"Retry-After": "soon"})

    adapter = VllmEngine(Patience())
    async with scripted_engine(gateway_error) as engine:
        with pytest.raises(EngineFailed, match="<html>bad gateway") as failed:
            await run(adapter, dispatch(engine))
        assert failed.value.retry_after_seconds is None
        await adapter.close()


async def test_closing_the_iterator_aborts_the_engines_request() -> None:
    async def one_then_hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await send_tokens(response, 1)
        return await hang(request, body)

    adapter = VllmEngine(Patience())
    async with scripted_engine(one_then_hang) as engine:
        async with aclosing(adapter.generate(dispatch(engine))) as chunks:
            await anext(chunks)

        async def aborted() -> bool:
            return engine.aborted == 1

        await eventually(aborted)
        await adapter.close()


SHORT = Patience(first_output_seconds=0.2, idle_seconds=0.2, prefill_tokens_per_second=1e9)


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
    adapter = VllmEngine(SHORT)
    async with scripted_engine(chatter(line, first=first)) as engine:
        with pytest.raises(EngineFailed, match="hangs: no output for") as failed:
            await run(adapter, dispatch(engine))
        assert failed.value.fault is Fault.WORKER
        await eventually(lambda: _aborted(engine))
        await adapter.close()


async def _aborted(engine: ScriptedEngine) -> bool:
    return engine.aborted == 1


async def test_an_engine_that_does_not_even_send_a_head_hangs() -> None:
    adapter = VllmEngine(SHORT)
    async with scripted_engine(hang) as engine:
        with pytest.raises(EngineFailed, match="hangs"):
            await run(adapter, dispatch(engine))
        await adapter.close()


async def test_a_long_prompt_explains_a_long_silence() -> None:
    async def after_a_while(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return await answer(request, body)

    adapter = VllmEngine(Patience(first_output_seconds=0.2, prefill_tokens_per_second=1000))
    async with scripted_engine(after_a_while) as engine:
        assert await run(adapter, dispatch(engine, uncached_tokens=20_000)) == [1, 2, 3]
        with pytest.raises(EngineFailed, match="hangs"):
            await run(adapter, dispatch(engine, uncached_tokens=20))
        await adapter.close()


async def test_who_stands_in_line_is_not_silent_while_others_are_served() -> None:
    async def slowly(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        for token in range(10):
            await send_tokens(response, token)
            await asyncio.sleep(0.1)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def in_line(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (slowly(request, body) if body["prompt"] == [1] else hang(request, body))

    adapter, pulse = VllmEngine(SHORT), Pulse()
    async with scripted_engine(in_line) as engine:
        served = asyncio.create_task(run(adapter, dispatch(engine, pulse=pulse, parameters={})))
        waits = asyncio.create_task(run(adapter, dispatch(engine, pulse=pulse, token_ids=array("I", [2]))))
        assert len(await served) == 10
        assert not waits.done()
        with pytest.raises(EngineFailed, match="hangs"):
            await waits
        await adapter.close()


@pytest.mark.parametrize("at_once", [1, 2, 7])
async def test_tokens_past_max_tokens_end_the_stream(at_once: int) -> None:
    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await send_tokens(response, *[7] * at_once)
            await asyncio.sleep(0)

    adapter = VllmEngine(Patience())
    async with scripted_engine(endless) as engine:
        got: list[int] = []
        finish = ""
        async with aclosing(adapter.generate(dispatch(engine, parameters={"max_tokens": 3}))) as chunks:
            async for chunk in chunks:
                got += chunk.token_ids or ()
                finish = chunk.finish_reason or finish
        assert (got, finish) == ([7, 7, 7], "length")
        await eventually(lambda: _aborted(engine))
        await adapter.close()


async def test_an_engine_that_never_ends_its_body_has_answered_all_the_same() -> None:
    async def lingering(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await send_tokens(response, 1)
        await response.write(b"data: [DONE]\n\n")
        return await hang(request, body)

    adapter = VllmEngine(SHORT)
    async with scripted_engine(lingering) as engine:
        assert await run(adapter, dispatch(engine)) == [1]
        await adapter.close()


async def test_a_body_of_another_protocol_is_a_failure() -> None:
    async def speak_otherwise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(speak_otherwise, "127.0.0.1", 0)
    adapter = VllmEngine(Patience())
    async with server:
        port = server.sockets[0].getsockname()[1]
        asked = Dispatch(f"http://127.0.0.1:{port}", "m", array("I", [1]), "r", None, {})
        with pytest.raises(EngineFailed):
            await run(adapter, asked)
    await adapter.close()


async def test_a_packed_answer_is_not_unpacked() -> None:
    unpacked = 64 * 1024 * 1024

    async def packed(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=gzip.compress(bytes(unpacked)), headers={"Content-Encoding": "gzip"})

    adapter = VllmEngine(Patience())
    async with scripted_engine(packed) as engine:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(EngineFailed):
            await run(adapter, dispatch(engine))
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < unpacked
        await adapter.close()


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
    body = await _body(Dispatch("http://engine", "m", prompt, "r", None, {"max_tokens": 3}))
    others.cancel()
    assert turns >= slices
    document = json.loads(body)
    assert (document["prompt"], document["max_tokens"]) == (prompt.tolist(), 3)
