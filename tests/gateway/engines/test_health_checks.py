"""Engines are asked whether they are well, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from support.processes import eventually
from support.web_servers import web_server

from kvscout_common.http.factory import connect
from kvscout_common.worker import EngineKind, WorkerRank, WorkerSpec
from kvscout_gateway.engines import health_checks
from kvscout_gateway.engines.health import MISSED_CHECKS, WorkerHealth
from kvscout_gateway.engines.health_checks import CONCURRENT_CHECKS, HealthChecks
from kvscout_gateway.engines.worker_state import WELL, WorkerState


class Outputs:
    """What a gateway knows of the outputs of its workers, and whom it is told to be lost."""

    def __init__(self, *, output: bool = False) -> None:
        self.output = output
        self.waiting: list[str] = []
        """Workers for which requests wait in vain."""
        self.lost: list[str] = []

    def has_output_within(self, spec: WorkerSpec, seconds: float) -> bool:
        """As all of them."""
        return self.output

    def silent(self, seconds: float) -> list[tuple[str, str]]:
        """Those for which requests wait."""
        return [("default", name) for name in self.waiting]

    def lose(self, spec: WorkerSpec, problem: str, asked_at: float, silent_seconds: float) -> None:
        """Keep it."""
        self.lost.append(f"{spec.worker_id} {problem}")


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
    *workers: WorkerSpec, outputs: Outputs | None = None, period_seconds: float = 0.02
) -> AsyncIterator[WorkerHealth]:
    """Checks these workers."""
    health, client = WorkerHealth(), connect()
    checks = HealthChecks(client, health, lambda: workers, outputs or Outputs(), period_seconds=period_seconds)
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
    outputs = Outputs()
    lost = outputs.lost
    async with serving() as ill, serving() as well:
        workers = [ill.worker("ill"), well.worker("well")]
        ill.status = 503
        async with checking(*workers, outputs=outputs) as health:
            await eventually(lambda: len(lost) >= 3)
            assert ill.asked >= MISSED_CHECKS + 2
            assert set(lost) == {f"ill does not answer its health checks: {ill.url}/health answers 503"}
            ill.status = 200
            await until_ejected(health, workers)
            before = len(lost)
            asked = ill.asked
            await eventually(lambda: ill.asked > asked + 2)
            assert len(lost) == before


async def test_whoever_is_in_doubt_is_checked_at_once_and_again_until_it_is_left_out_or_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health_checks, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(health_checks, "DOUBT_SECONDS", 0.02)
    async with serving() as ill, serving() as well:
        outputs, workers = Outputs(), [ill.worker("ill"), well.worker("well")]
        outputs.waiting = ["ill", "gone"]
        async with checking(*workers, outputs=outputs, period_seconds=3600) as health:
            ill.status = 503
            await until_ejected(health, workers, "ill")
            assert health.judge(("default", WorkerRank("ill", 0))).state is WorkerState.LEFT_OUT
            await eventually(lambda: len(outputs.lost) >= 2, what="each failed check told")
            ill.status = 200
            await until_ejected(health, workers)
            assert health.judge(("default", WorkerRank("ill", 0))) == WELL
        assert not well.asked


async def test_a_failed_request_has_its_worker_checked_and_one_missed_check_makes_it_suspected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health_checks, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(health_checks, "DOUBT_SECONDS", 3600.0)
    async with serving() as ill:
        health, client = WorkerHealth(), connect()
        checks = HealthChecks(client, health, lambda: [ill.worker("ill")], Outputs(), period_seconds=3600)
        running = asyncio.create_task(checks.run())
        try:
            ill.status = 500
            await eventually(lambda: checks._group is not None)
            checks.failed("default", "ill")
            await eventually(lambda: ill.asked == 1)
            key = ("default", WorkerRank("ill", 0))
            await eventually(lambda: health.judge(key).state is WorkerState.SUSPECTED)
            assert health.judge(key).cause == f"missed its last health check: {ill.url}/health answers 500"
            assert not health.ejected("default", lambda: [ill.worker("ill"), ill.worker("other")])
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await client.close()


async def test_all_are_checked_when_somebody_asks_and_one_that_hangs_is_waited_for_in_bounded_time() -> None:
    async with serving() as hung, serving() as well:
        hung.hangs = True
        health, client = WorkerHealth(), connect()
        workers = [hung.worker("hung"), well.worker("well")]
        checks = HealthChecks(client, health, lambda: workers, Outputs(), period_seconds=3600)
        await checks.check_all("*")
        assert not (hung.asked or well.asked), "no checks are made"
        running = asyncio.create_task(checks.run())
        try:
            await eventually(lambda: checks._group is not None)
            await asyncio.gather(*(checks.check_all("*") for _ in range(3)))
            assert (hung.asked, well.asked) == (1, 1), "three who ask share one check"
            states = [health.judge(("default", WorkerRank(name, 0))).state for name in ("hung", "well")]
            assert states == [WorkerState.SUSPECTED, WorkerState.OK]
            await checks.check_all("another tenant")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await client.close()


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
        async with checking(busy.worker("busy"), outputs=Outputs(output=True)), checking(idle.worker("idle")):
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
