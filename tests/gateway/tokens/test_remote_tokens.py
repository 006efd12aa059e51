"""Servers are asked for tokens in time, once, and not where it does not work."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvscout_common.errors import InvalidArgument, Unavailable
from kvscout_common.http.factory import connect, serve_http
from kvscout_common.http.http import HttpCall
from kvscout_gateway.tokens import remote_tokens
from kvscout_gateway.tokens.remote_tokens import Call, RemoteTokens, Server
from kvscout_gateway.tokens.rendered import Rendered, read_tokenized

CALL = Call.of("/tokenize", b'{"prompt": "x"}', read_tokenized)


class Engine:
    """Answers /tokenize as it is told, and counts."""

    def __init__(self) -> None:
        self.status, self.page, self.asked = 200, b'{"tokens": [5, 6]}', 0
        self.hangs: asyncio.Event | None = None

    async def handle(self, call: HttpCall) -> None:
        self.asked += 1
        assert call.path == "/tokenize"
        assert ("X-Key", "k") in call.headers
        assert json.loads(await call.body())["prompt"]
        if self.hangs is not None:
            await call.start(200, ())
            await call.write(b"{")
            await self.hangs.wait()
            return
        await call.respond(self.status, (), self.page)


class Asking:
    """Asks one engine."""

    def __init__(self, remote: RemoteTokens, server: Server) -> None:
        self.remote, self.server = remote, server
        self.servers = [server]

    async def __call__(
        self, call: Call = CALL, *, tenant: str = "a", model: str = "m", seconds: float = 5.0
    ) -> list[int]:
        rendered = await self.remote.ask(self.servers, call, model=model, tenant=tenant, seconds=seconds)
        return array("I", rendered.token_ids).tolist()


@asynccontextmanager
async def asking(engine: Engine, **options: Any) -> AsyncIterator[Asking]:
    server, http = serve_http(engine.handle), connect()
    url = f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    remote = RemoteTokens(http, connect_seconds=5.0, cache_bytes=1 << 16, **options)
    try:
        yield Asking(remote, Server(url, (("X-Key", "k"),)))
    finally:
        if engine.hangs is not None:
            engine.hangs.set()
        await http.close()
        await server.stop(0)


async def test_a_server_tells_tokens_and_is_asked_once_for_one_prompt_of_a_tenant() -> None:
    engine = Engine()
    async with asking(engine) as ask:
        for _ in range(3):
            assert await ask() == [5, 6]
        assert engine.asked == 1
        assert await ask(tenant="b") == [5, 6]
        assert engine.asked == 2


@pytest.mark.parametrize("page", [b"", b"[]", b"{}", b'{"tokens": 5}', b'{"tokens": ["a"]}', b"[" * 9999])
async def test_a_server_that_answers_nonsense_is_left_alone_for_a_while(page: bytes) -> None:
    engine, now = Engine(), [0.0]
    engine.page = page
    async with asking(engine, clock=lambda: now[0]) as ask:
        for _ in range(3):
            with pytest.raises(Unavailable):
                await ask()
        assert engine.asked == 1
        assert len(ask.remote.troubles(ask.server.endpoint)) == 1
        now[0] += remote_tokens.REST_SECONDS + 1
        assert not ask.remote.troubles(ask.server.endpoint)
        engine.page = b'{"tokens": [7]}'
        assert await ask() == [7]


@pytest.mark.parametrize("status", [403, 404, 501])
async def test_a_server_without_such_a_path_is_left_alone_for_longer_but_not_for_other_models(status: int) -> None:
    engine, now = Engine(), [0.0]
    engine.status = status
    async with asking(engine, clock=lambda: now[0]) as ask:
        for _ in range(2):
            with pytest.raises(Unavailable):
                await ask()
        now[0] += remote_tokens.REST_SECONDS + 1
        with pytest.raises(Unavailable):
            await ask()
        assert engine.asked == 1
        engine.status = 200
        assert await ask(model="n") == [5, 6]
        now[0] += remote_tokens.LACKING_REST_SECONDS
        assert await ask() == [5, 6]


async def test_a_prompt_that_a_server_refuses_costs_no_other_prompt_its_tokens() -> None:
    engine = Engine()
    engine.status = 400
    async with asking(engine) as ask:
        with pytest.raises(InvalidArgument):
            await ask()
        engine.status = 200
        assert await ask() == [5, 6]


async def test_a_server_that_is_slow_or_gone_is_not_waited_for() -> None:
    engine, now = Engine(), [0.0]
    engine.hangs = asyncio.Event()
    async with asking(engine, clock=lambda: now[0]) as ask:
        with pytest.raises(Unavailable, match="within 20 ms"):
            await ask(seconds=0.02)
        with pytest.raises(Unavailable, match="not asked"):
            await ask()
        engine.hangs.set()
        engine.hangs = None
        now[0] += remote_tokens.LATE_REST_SECONDS + 1
        assert await ask() == [5, 6]
        gone = ask.server._replace(endpoint="http://127.0.0.1:9")
        with pytest.raises(Unavailable, match="does not tokenize"):
            await ask.remote.ask([gone], CALL, model="m", tenant="b", seconds=5.0)


async def test_a_server_that_is_gone_costs_no_prompt_its_tokens_where_another_has_them() -> None:
    engine, now = Engine(), [0.0]
    async with asking(engine, clock=lambda: now[0]) as ask:
        gone = ask.server._replace(endpoint="http://127.0.0.1:9")
        ask.servers = [gone, ask.server]
        for number in range(1, 4):
            assert await ask(Call.of("/tokenize", b'{"prompt": %d}' % number, read_tokenized)) == [5, 6]
        assert engine.asked == 3
        [why] = ask.remote.troubles(gone.endpoint)
        assert "does not tokenize" in why
        now[0] += remote_tokens.GONE_REST_SECONDS
        assert not ask.remote.troubles(gone.endpoint), "it may be back at any time"


async def test_no_more_than_a_few_servers_are_asked_and_none_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, now = list[str](), [0.0]

    async def fetch(self: RemoteTokens, server: Server, call: Call) -> Rendered:
        asked.append(server.endpoint)
        now[0] += 1.0
        raise Unavailable(f"{server.endpoint} fails")

    monkeypatch.setattr(RemoteTokens, "fetch", fetch)
    async with asking(Engine(), clock=lambda: now[0]) as ask:
        ask.servers = [Server(f"http://{number}") for number in range(9)]
        with pytest.raises(Unavailable, match="http://2 fails"):
            await ask(seconds=60.0)
        assert asked == ["http://0", "http://1", "http://2"]
        with pytest.raises(Unavailable, match="http://4 fails"):
            await ask(seconds=1.5)
        assert asked[3:] == ["http://3", "http://4"], "those before them rest"
        monkeypatch.setattr(remote_tokens, "MAX_CANDIDATES", 5)
        with pytest.raises(Unavailable, match="not asked to tokenize"):
            await ask(seconds=60.0)
        assert len(asked) == 5


async def test_only_so_many_prompts_are_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tokens, "MAX_ASKING", 1)
    engine = Engine()
    engine.hangs = asyncio.Event()
    async with asking(engine) as ask:
        first = asyncio.create_task(ask(seconds=30.0))
        while not engine.asked:
            await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="limit"):
            await ask(Call.of("/tokenize", b'{"prompt": "y"}', read_tokenized))
        first.cancel()
        await asyncio.wait([first])
