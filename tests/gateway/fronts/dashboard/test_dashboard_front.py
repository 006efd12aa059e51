"""The dashboard over real sockets and both transports: who may watch, who is let go, who is asked in vain."""

from __future__ import annotations

import asyncio
import hashlib
import re
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from support.http_peers import TRANSPORTS, made_of
from support.openai_stack import NOBODY, TIMEOUTS, front, spec
from support.processes import eventually

from kvscout_common.http.factory import serve_http
from kvscout_common.identity.identity import AccessRole, Identity, TokenTable
from kvscout_common.registry.backends import Backends
from kvscout_common.transport import Transport
from kvscout_gateway.config import GatewayConfig
from kvscout_gateway.fronts.dashboard import viewers as viewers_module
from kvscout_gateway.fronts.dashboard.dashboard import Dashboard
from kvscout_gateway.fronts.dashboard.viewers import MAX_VIEWERS, Viewers
from kvscout_gateway.gateway import Gateway
from kvscout_gateway.http.port import GatewayHttp

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


TOKENS = TokenTable(
    {
        digest("boss"): Identity(AccessRole.ADMIN, "*"),
        digest("wall"): Identity(AccessRole.VIEWER, "*"),
        digest("program"): Identity(AccessRole.CLIENT, "*"),
        digest("engine"): Identity(AccessRole.WORKER, "*"),
        digest("team"): Identity(AccessRole.ADMIN, "team-a"),
    }
)


@dataclass(slots=True)
class Served:
    url: str
    gateway: Gateway
    dashboard: Dashboard
    http: aiohttp.ClientSession

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        async with self.http.get(self.url + path, headers=headers) as response:
            if response.status == 200 and path != "/":
                return 200, response.headers["Content-Type"]
            return response.status, await response.text()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[aiohttp.StreamReader]:
        async with self.http.get(f"{self.url}/dashboard/events") as response:
            assert response.status == 200
            yield response.content


@asynccontextmanager
async def served(transport: Transport, tokens: TokenTable | None = None) -> AsyncIterator[Served]:
    """A gateway without helpers, its dashboard and what runs beside it."""
    with made_of(transport):
        metrics = CollectorRegistry()
        config = GatewayConfig(indexers=(), schedulers=(NOBODY,), http_port=0, timeouts=TIMEOUTS)
        gateway = Gateway(config, metrics, Backends.of_process("kvscout-gateway", config.server, None))
        gateway.registry.register(spec("w0", ""))
        dashboard = Dashboard(gateway, look_seconds=0.05, examine_seconds=0.2, span_seconds=0.05)
        server = serve_http(GatewayHttp(gateway, metrics, dashboard=dashboard).handler(tokens))
        url = f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}"
        tasks = [asyncio.create_task(run()) for run in dashboard.tasks().values()]
        try:
            async with aiohttp.ClientSession() as http:
                yield Served(url, gateway, dashboard, http)
        finally:
            dashboard.viewers.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.stop(0.0)
            await gateway.close()


async def next_event(stream: aiohttp.StreamReader, kind: str) -> str:
    async with asyncio.timeout(30):
        while True:
            text = (await stream.readuntil(b"\n\n")).decode()
            if text.startswith(f"event: {kind}\n"):
                return text


async def test_the_page_is_one_document_and_its_policy_lets_nothing_else_run(transport: Transport) -> None:
    async with served(transport, TOKENS) as one, one.http.get(one.url) as response:
        page, policy = await response.text(), response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        for tag, rule in (("style", "style-src"), ("script", "script-src")):
            (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
            hashed = b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{rule} 'sha256-{hashed}'" in policy
        assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", page)
        assert "innerHTML" not in page
        assert "insertAdjacentHTML" not in page


async def test_what_it_shows_is_for_people_who_may_see_all_tenants(transport: Transport) -> None:
    async with served(transport, TOKENS) as one:
        assert (await one.get("/"))[0] == 200
        path = "/dashboard/events"
        assert (await one.get(path))[0] == 401
        assert (await one.get(path, Authorization="Bearer wrong"))[0] == 401
        assert (await one.get(f"{path}?token=boss"))[0] == 401
        for token in ("program", "engine", "team"):
            assert (await one.get(path, Authorization=f"Bearer {token}"))[0] == 403, token
        for token in ("boss", "wall"):
            assert await one.get(path, Authorization=f"Bearer {token}") == (200, "text/event-stream")


async def test_without_tokens_no_page_of_the_web_can_read_it_by_a_name_of_its_own(transport: Transport) -> None:
    async with served(transport) as one:
        for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "a.localhost"):
            assert (await one.get("/dashboard/events", Host=host))[0] == 200, host
        for host in ("evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io"):
            status, text = await one.get("/dashboard/events", Host=host)
            assert status == 403, host
            assert "--auth-tokens" in text


async def test_only_get_is_for_it(transport: Transport) -> None:
    async with served(transport) as one, one.http.post(f"{one.url}/dashboard/events") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "GET"


async def test_nobody_is_asked_while_nobody_watches_and_all_viewers_share_what_is_seen(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(transport) as one:
        asked = 0
        ask = one.dashboard._gateway_service

        async def counted() -> Any:
            nonlocal asked
            asked += 1
            return await ask()

        monkeypatch.setattr(one.dashboard, "_gateway_service", counted)
        async with one.watching() as first, one.watching() as second:
            assert '[0,"w0",0,' in await next_event(first, "state")
            assert '"findings":[' in await next_event(second, "doctor")
            await next_event(second, "history")
        await eventually(lambda: asyncio.sleep(0, not one.dashboard.viewers.count), what="nobody watches")
        await eventually(lambda: asyncio.sleep(0, not one.dashboard.viewers._events), what="it has stopped")
        before, spans = asked, len(one.dashboard._history.points)
        await eventually(
            lambda: asyncio.sleep(0, len(one.dashboard._history.points) > spans + 5), what="time has passed"
        )
        assert asked == before
        async with one.watching() as again:
            await next_event(again, "state")
        assert asked > before


async def test_viewers_are_bounded(transport: Transport) -> None:
    async with served(transport) as one:
        one.dashboard.viewers.count += MAX_VIEWERS
        status, text = await one.get("/dashboard/events")
        assert (status, "watch already" in text) == (429, True)


async def test_a_viewer_that_reads_nothing_is_let_go_and_the_others_go_on(transport: Transport) -> None:
    async with served(transport) as one:
        one.dashboard.viewers._write_seconds = 0.3
        host, port = one.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        async with one.watching() as other:
            await next_event(other, "state")
            assert one.dashboard.viewers.count == 2
            big = 0

            async def one_is_left() -> bool:
                nonlocal big
                big += 1
                one.dashboard.viewers.publish("big", ["x" * (1 << 20), big])
                await next_event(other, "state")
                return one.dashboard.viewers.count == 1

            # What the kernel takes for the one that sleeps is not ours to bound.
            other._low_water = other._high_water = 1 << 24
            await eventually(one_is_left, what="the viewer that sleeps is let go")
        writer.close()


async def test_a_gateway_that_drains_lets_its_viewers_go(transport: Transport) -> None:
    async with served(transport) as one, one.watching() as stream:
        await next_event(stream, "state")
        await one.gateway.drain()
        async with asyncio.timeout(30):
            await stream.read()
        assert stream.at_eof()


async def test_something_is_said_also_when_there_is_nothing_new(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers_module, "SILENT_SECONDS", 0.05)
    async with served(transport) as one:
        one.dashboard.viewers = Viewers()
        async with one.watching() as stream, asyncio.timeout(30):
            while await stream.readuntil(b"\n\n") != b":\n\n":
                pass


async def test_a_gateway_that_is_to_have_none_has_none(transport: Transport) -> None:
    with made_of(transport):
        async with front(spec("w0", ""), dashboard=False) as one:
            assert (await one.request("GET", "/dashboard/events"))[0] == 404
            assert (await one.request("GET", "/"))[0] == 404
