"""Engines are asked whether they are well, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from support.processes import eventually
from support.web_servers import web_server

from kvscout_common.http.factory import connect
from kvscout_common.worker import EngineKind, WorkerSpec
from kvscout_gateway.engines.health import MISSED_CHECKS, WorkerHealth
from kvscout_gateway.engines.health_checks import CONCURRENT_CHECKS, HealthChecks


class Engine:
    """Answers its health checks as a test says."""

    def __init__(self) -> None:
        self.status = 200
        self.hangs = False
        self.asked = 0
        self.waiting = 0
        self.url = ""

    async def health(self, request: web.Request) -> web.Response:
        """One check."""
        self.asked += 1
        self.waiting += 1
        try:
            while self.hangs:
                await asyncio.sleep(0.01)
        finally:
            self.waiting -= 1
        return web.Response(status=self.status)

    def worker(self, name: str = "w", kind: EngineKind = EngineKind.VLLM) -> WorkerSpec:
        """A registration of it."""
        return WorkerSpec(worker_id=name, model="m", block_size=16, http_endpoint=self.url, engine=kind)


@asynccontextmanager
async def serving() -> AsyncIterator[Engine]:
    """An engine that listens."""
    engine = Engine()
    app = web.Application()
    app.router.add_get("/health", engine.health)
    async with web_server(app, handler_cancellation=True, shutdown_timeout=0.1) as engine.url:
        try:
            yield engine
        finally:
            engine.hangs = False


@asynccontextmanager
async def checking(
    *workers: WorkerSpec, received: bool = False, lost: list[str] | None = None, period_seconds: float = 0.02
) -> AsyncIterator[WorkerHealth]:
    """Checks these workers; appends to `lost` what it is told."""
    health, client = WorkerHealth(), connect()
    told: list[str] = [] if lost is None else lost
    checks = HealthChecks(
        client,
        health,
        lambda: workers,
        lambda spec, seconds: received,
        lambda spec, problem, asked_at: told.append(f"{spec.worker_id} {problem}"),
        period_seconds=period_seconds,
    )
    running = asyncio.create_task(checks.run())
    try:
        yield health
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


async def until_ejected(health: WorkerHealth, workers: list[WorkerSpec], *names: str) -> None:
    """Waits for it."""
    await eventually(lambda: set(health.ejected("default", lambda: workers)) == set(names), what=f"{names} left out")


async def test_an_engine_that_says_it_is_not_well_gets_nothing_until_it_is() -> None:
    async with serving() as ill, serving() as well:
        workers = [ill.worker("ill"), well.worker("well")]
        async with checking(*workers) as health:
            ill.status = 503
            await until_ejected(health, workers, "ill")
            ill.status = 200
            await until_ejected(health, workers)


async def test_an_engine_that_is_gone_gets_nothing() -> None:
    async with serving() as well:
        gone = WorkerSpec(worker_id="gone", model="m", block_size=16, http_endpoint="http://127.0.0.1:1")
        workers = [gone, well.worker("well")]
        async with checking(*workers) as health:
            await until_ejected(health, workers, "gone")


async def test_each_failed_check_of_an_engine_that_gets_nothing_tells_that_it_is_lost() -> None:
    lost: list[str] = []
    async with serving() as ill, serving() as well:
        workers = [ill.worker("ill"), well.worker("well")]
        ill.status = 503
        async with checking(*workers, lost=lost) as health:
            await eventually(lambda: len(lost) >= 3)
            assert ill.asked >= MISSED_CHECKS + 2
            assert set(lost) == {f"ill does not answer its health checks: {ill.url}/health answers 503"}
            ill.status = 200
            await until_ejected(health, workers)
            before = len(lost)
            asked = ill.asked
            await eventually(lambda: ill.asked > asked + 2)
            assert len(lost) == before


async def test_an_engine_without_that_path_answers_and_one_of_another_kind_is_not_asked() -> None:
    async with serving() as other, serving() as engine:
        engine.status = 404
        workers = [engine.worker("engine"), other.worker("other", EngineKind.CUSTOM)]
        async with checking(*workers) as health:
            await eventually(lambda: engine.asked > 5)
            assert not health.ejected("default", lambda: workers)
        assert not other.asked


async def test_who_puts_out_tokens_is_not_asked() -> None:
    async with serving() as busy, serving() as idle:
        async with checking(busy.worker("busy"), received=True), checking(idle.worker("idle")):
            await eventually(lambda: idle.asked > 5)
        assert not busy.asked


async def test_a_fleet_that_hangs_costs_so_many_connections_and_no_more() -> None:
    async with serving() as engine:
        engine.hangs = True
        workers = [engine.worker(f"w{index}") for index in range(2 * CONCURRENT_CHECKS)]
        async with checking(*workers):
            await eventually(lambda: engine.waiting == CONCURRENT_CHECKS)
            await asyncio.sleep(0.05)
            assert engine.asked == CONCURRENT_CHECKS
