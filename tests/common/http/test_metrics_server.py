"""/metrics: read on the loop, closed to connections that dawdle, to too many of them, and to who has no token."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from support.processes import running

from kvscout_common.hashing import native_available
from kvscout_common.http import metrics_server
from kvscout_common.http.metrics_server import MetricsPage, registry_of, serve_metrics
from kvscout_common.observability.rank_series import RankSeries


class Readers(Collector):
    """Remembers which thread read it."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def collect(self) -> Iterator[Metric]:
        self.threads.add(threading.get_ident())
        yield GaugeMetricFamily("answer", "What it is", value=42)


@asynccontextmanager
async def served(collector: Collector) -> AsyncIterator[int]:
    server, port = await serve_metrics(MetricsPage(registry_of(collector), 64), "127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.stop(0)


async def get(port: int, path: str = "/metrics", **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)

    def read() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    return await asyncio.to_thread(read)


async def test_collectors_are_read_on_the_loop_that_owns_what_they_read() -> None:
    collector = Readers()
    async with served(collector) as port:
        status, body = await get(port)
        packed = await get(port, "/metrics?name[]=answer", **{"Accept-Encoding": "gzip"})
        assert (await get(port, "/other"))[0] == 404
    assert (status, b"answer 42.0\n" in body) == (200, True)
    assert gzip.decompress(packed[1]) == body
    assert collector.threads == {threading.get_ident()}


async def test_others_go_on_between_the_families_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0
    read_at: list[int] = []

    class Noted(RankSeries):
        def bounded(self, families: Iterable[Metric]) -> Iterator[Metric]:
            for family in super().bounded(families):
                read_at.append(turns)
                yield family

    class Families(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from (GaugeMetricFamily(f"family_{number}", "One of many", value=1) for number in range(20))

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(metrics_server, "RankSeries", Noted)
    async with served(Families()) as port:
        going_on = asyncio.create_task(others())
        pages = await asyncio.gather(get(port), get(port))
        going_on.cancel()
    assert [status for status, _ in pages] == [200, 200]
    assert all(page.count(b"\nfamily_") == 20 for _, page in pages)
    assert len(read_at) in (21, 2 * 21), "one page for both, or one after the other"
    assert len(set(read_at)) == len(read_at), "a family a turn"


async def test_no_page_of_the_web_reads_what_this_machine_alone_may() -> None:
    async with served(Readers()) as port:
        assert (await get(port, Host="evil.example"))[0] == 403
        assert (await get(port, Origin="https://evil.example"))[0] == 403
        assert (await get(port, Host="localhost"))[0] == 200


async def test_a_collector_that_raises_is_an_answer_and_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Collector):
        def collect(self) -> Iterator[Metric]:
            raise ZeroDivisionError("a defect")

    async with served(Broken()) as port:
        assert (await get(port))[0] == 500
    assert "ZeroDivisionError: a defect" in caplog.text


def closed_by_the_server(connection: socket.socket, drip: bytes = b"") -> bool:
    """Sends a byte whenever nothing comes; True once the server has closed."""
    connection.settimeout(0.02)
    for _ in range(500):
        try:
            if drip:
                connection.sendall(drip)
            if connection.recv(1000) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.parametrize("drip", [b"", b"x"], ids=["silent", "dripping"])
async def test_a_connection_that_never_asks_is_closed(monkeypatch: pytest.MonkeyPatch, drip: bytes) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTION_SECONDS", 0.2)
    async with served(Readers()) as port:
        with closing(socket.create_connection(("127.0.0.1", port))) as connection:
            assert await asyncio.to_thread(closed_by_the_server, connection, drip)


async def test_a_scrape_is_answered_when_as_many_idle_connections_are_open_as_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_server, "MAX_CONNECTIONS", 3)
    async with served(Readers()) as port:
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        if not native_available():  # new ones are closed instead
            for connection in waiting:
                connection.close()
        async with asyncio.timeout(20):
            while True:
                try:
                    assert (await get(port))[0] == 200
                    break
                except (urllib.error.URLError, ConnectionError):
                    await asyncio.sleep(0.01)  # the server has not seen them go
        for connection in waiting:
            connection.close()


async def test_a_page_is_made_for_all_that_wait_for_it_and_then_not_for_three_times_as_long() -> None:
    class Slow(Readers):
        pages = 0

        def collect(self) -> Iterator[Metric]:
            self.pages += 1
            time.sleep(0.1)
            yield from super().collect()

    collector = Slow()
    async with served(collector) as port:
        collector.pages = 0
        began = time.monotonic()
        assert {status for status, _ in await asyncio.gather(*(get(port) for _ in range(4)))} == {200}
        took = time.monotonic() - began
    assert 1 <= collector.pages <= 1 + took / 0.4


async def test_with_metrics_auth_a_token_of_all_tenants_is_needed(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("tokens: [{token: all, role: viewer, tenant: '*'}, {token: one, role: admin, tenant: a}]")
    async with running("kvscout_indexer.main", "--auth-tokens", str(tokens), "--metrics-auth") as indexer:
        port = indexer.ready["metrics_port"]
        for header, expected in [({}, 401), ({"Authorization": "Bearer wrong"}, 401)]:
            assert (await get(port, **header))[0] == expected
        assert (await get(port, Authorization="Bearer one"))[0] == 403
        assert (await get(port, Authorization="Bearer all"))[0] == 200
