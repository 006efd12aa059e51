"""The engine adapter: connections, limits and errors of HTTP."""

import asyncio
from array import array
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web
from processes import eventually
from scripted_engine import ScriptedEngine, answer, begin, hang, refuse, scripted_engine, send_tokens

from kvscout_gateway.completion_stream import EngineFailed
from kvscout_gateway.engine import Dispatch, VllmEngine


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

    adapter = VllmEngine(connect_seconds=2, idle_seconds=5)
    async with scripted_engine(note) as engine:
        for _ in range(5):
            assert await run(adapter, dispatch(engine)) == [1, 2, 3]
        await adapter.close()
    assert len(peers) == 1


async def test_ranks_are_named_in_a_header() -> None:
    adapter = VllmEngine(connect_seconds=2, idle_seconds=5)
    async with scripted_engine(answer) as engine:
        await run(adapter, dispatch(engine, dp_rank=3))
        assert engine.headers[0]["X-data-parallel-rank"] == "3"
        await adapter.close()


@pytest.mark.parametrize(
    ("status", "client_fault"),
    [(400, True), (413, True), (422, True), (401, False), (404, False), (429, False), (500, False), (302, False)],
)
async def test_only_what_every_engine_would_refuse_is_the_clients_fault(status: int, client_fault: bool) -> None:
    adapter = VllmEngine(connect_seconds=2, idle_seconds=5)
    async with scripted_engine(refuse(status, "because", **{"Retry-After": "7", "Location": "/elsewhere"})) as engine:
        with pytest.raises(EngineFailed, match=f"{status}: because") as failed:
            await run(adapter, dispatch(engine))
        assert failed.value.client_fault is client_fault
        assert failed.value.retry_after_seconds == 7
        assert len(engine.requests) == 1
        await adapter.close()


async def test_a_refusal_that_is_no_json_is_told_as_it_is() -> None:
    async def gateway_error(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=502, text="<html>bad gateway</html>", headers={"Retry-After": "soon"})

    adapter = VllmEngine(connect_seconds=2, idle_seconds=5)
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

    adapter = VllmEngine(connect_seconds=2, idle_seconds=5)
    async with scripted_engine(one_then_hang) as engine:
        async with aclosing(adapter.generate(dispatch(engine))) as chunks:
            await anext(chunks)

        async def aborted() -> bool:
            return engine.aborted == 1

        await eventually(aborted)
        await adapter.close()


async def test_silence_is_a_failure_after_a_while() -> None:
    adapter = VllmEngine(connect_seconds=2, idle_seconds=0.1)
    async with scripted_engine(hang) as engine:
        with pytest.raises(EngineFailed):
            await run(adapter, dispatch(engine))
        await adapter.close()


async def test_an_engine_that_never_ends_its_body_has_answered_all_the_same() -> None:
    async def lingering(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await send_tokens(response, 1)
        await response.write(b"data: [DONE]\n\n")
        return await hang(request, body)

    adapter = VllmEngine(connect_seconds=2, idle_seconds=0.2)
    async with scripted_engine(lingering) as engine:
        assert await run(adapter, dispatch(engine)) == [1]
        await adapter.close()


async def test_a_body_of_another_protocol_is_a_failure() -> None:
    async def speak_otherwise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(speak_otherwise, "127.0.0.1", 0)
    adapter = VllmEngine(connect_seconds=2, idle_seconds=2)
    async with server:
        port = server.sockets[0].getsockname()[1]
        asked = Dispatch(f"http://127.0.0.1:{port}", "m", array("I", [1]), "r", None, {})
        with pytest.raises(EngineFailed):
            await run(adapter, asked)
    await adapter.close()
