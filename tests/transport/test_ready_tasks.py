"""Tasks that stand ready are tasks as any other, but for when they begin."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from kvscout_common.transport.ready_tasks import READY, ReadyTasks


@asynccontextmanager
async def ready_tasks() -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]]:
    """Runs work from a callback of the loop, as a server does; returns its task."""
    loop = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    tasks = ReadyTasks(loop)
    await asyncio.sleep(0)  # they stand ready

    def run(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        started: list[asyncio.Task[None]] = []
        current = asyncio.current_task()
        assert current is not None
        asyncio.tasks._leave_task(loop, current)
        try:
            started.append(tasks.run(work))
        finally:
            asyncio.tasks._enter_task(loop, current)
        return started[0]

    try:
        yield run
    finally:
        tasks.close()
        left = asyncio.all_tasks() - before
        if left:
            await asyncio.wait(left)
        assert asyncio.all_tasks() == before


async def test_work_that_waits_for_nothing_is_done_when_run_returns() -> None:
    async with ready_tasks() as run:
        done: list[int] = []

        async def work(number: int) -> None:
            done.append(number)

        for number in range(10):
            task = run(work(number))
            assert done[-1] == number
            assert not task.done()
        assert done == list(range(10))


async def test_work_that_waits_goes_on_and_ends_as_the_task_that_was_returned() -> None:
    async with ready_tasks() as run:
        gate = asyncio.Event()
        ran: list[asyncio.Task[Any] | None] = []

        async def work() -> None:
            ran.append(asyncio.current_task())
            await gate.wait()
            ran.append(asyncio.current_task())

        tasks = [run(work()) for _ in range(3 * READY)]
        gate.set()
        await asyncio.wait(tasks)
        assert set(ran) == set(tasks)
        assert len(ran) == 2 * len(tasks)
        assert all(task.exception() is None for task in tasks)


async def test_deadlines_and_cancellation_work_from_the_first_step_on() -> None:
    async with ready_tasks() as run:
        seen: list[str] = []

        async def expires() -> None:
            try:
                async with asyncio.timeout(0.01):
                    await asyncio.Event().wait()
            except TimeoutError:
                seen.append("expired")

        async def hangs() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("cancelled")

        await run(expires())
        task = run(hangs())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["expired", "cancelled"]


async def test_what_one_work_cancels_or_raises_is_no_others() -> None:
    async with ready_tasks() as run:
        done: list[str] = []

        async def cancels_itself() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

        async def works() -> None:
            await asyncio.sleep(0)
            done.append("worked")

        cancelled = [run(cancels_itself()) for _ in range(READY)]
        await run(works())
        await asyncio.wait(cancelled)
        await run(works())
        assert done == ["worked", "worked"]


async def test_a_cancelled_spare_is_replaced() -> None:
    async with ready_tasks() as run:
        for task in asyncio.all_tasks():
            if task.get_name() == "ready":
                task.cancel()
        await asyncio.sleep(0)
        done: list[bool] = []

        async def work() -> None:
            done.append(True)

        run(work())
        await asyncio.sleep(0)
        assert done


def test_it_is_the_same_on_the_loop_that_services_use() -> None:
    uvloop.run(test_work_that_waits_goes_on_and_ends_as_the_task_that_was_returned())
    uvloop.run(test_deadlines_and_cancellation_work_from_the_first_step_on())
