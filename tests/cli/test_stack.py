"""Supervision of real processes: whatever happens, the caller learns of it and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.processes import DEADLINE_SECONDS, eventually

from kvscout_cli.process import MAX_LINE_CHARACTERS, ProcessFailed, Program
from kvscout_cli.stack import Stack


@pytest.fixture(autouse=True)
def children_find_the_fake_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def fake(name: str, mode: str = "serve") -> Program:
    return Program(name, "support.fake_service", (mode,))


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def gone(*pids: int) -> None:
    await eventually(lambda: not any(alive(pid) for pid in pids), what=f"end of {pids}")


class Log:
    """What the processes of a stack wrote."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    async def has(self, matches: Callable[[str, str], bool]) -> tuple[str, str]:
        async def found() -> tuple[str, str] | None:
            return next((entry for entry in self.lines if matches(*entry)), None)

        entry: tuple[str, str] = await eventually(found, what="log line")
        return entry


async def test_stages_stop_in_reverse_order_and_leave_nothing() -> None:
    log = Log()
    async with Stack(on_line=log) as stack:
        first = await stack.start(fake("a"), fake("b"))
        (last,) = await stack.start(fake("c"))
        assert [process.ready_line["port"] for process in first] == [1, 1]
        pids = [process.pid for process in stack.processes]
        assert last.ready_line["pid"] == last.pid
        assert all(os.getsid(pid) == os.getpgid(pid) == pid for pid in pids)
    assert not any(alive(pid) for pid in pids)
    assert log.lines[0] == ("c", "stopping")
    assert sorted(log.lines[1:]) == [("a", "stopping"), ("b", "stopping")]


async def test_what_may_be_started_again_is_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscout_cli.stack.FIRST_PAUSE_SECONDS", 0.01)
    said: list[str] = []
    async with Stack() as stack:
        await stack.start(fake("a"), fake("b"))
        kept = asyncio.create_task(
            stack.keep(lambda process: process.program if process.program.name == "b" else None, said.append)
        )
        for ends in (1, 2, 3):
            pid = stack.processes[1].pid
            os.kill(pid, signal.SIGKILL)

            async def runs_again(times: int = ends) -> bool:
                return sum("runs again" in one for one in said) == times

            await eventually(runs_again, what="process that runs again")
            assert stack.processes[1].pid != pid
        pauses = [one.rpartition(" in ")[2] for one in said if "started again" in one]
        assert pauses == ["0.01 s", "0.02 s", "0.04 s"]
        os.kill(stack.processes[0].pid, signal.SIGKILL)
        with pytest.raises(ProcessFailed, match="a was killed by SIGKILL unasked"):
            await kept
        pids = [process.pid for process in stack.processes]
    await gone(*pids)


async def test_one_that_cannot_start_any_more_is_tried_again_and_takes_nothing_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvscout_cli.stack.FIRST_PAUSE_SECONDS", 0.01)
    said: list[str] = []
    async with Stack() as stack:
        await stack.start(fake("a"))
        kept = asyncio.create_task(stack.keep(lambda process: fake("a", "broken"), said.append))
        os.kill(stack.processes[0].pid, signal.SIGKILL)

        async def tried() -> bool:
            return sum("ended with code 1 before it was ready" in one for one in said) >= 2

        await eventually(tried, what="further tries")
        assert not kept.done()
        kept.cancel()
        # Or the event loop would end amidst the end of a process that it was just starting.
        await asyncio.wait([kept])


async def test_processes_have_the_environment_they_are_given() -> None:
    async with Stack(environment={**os.environ, "MARK": "x"}) as stack:
        (process,) = await stack.start(fake("a"))
        assert process.ready_line["mark"] == "x"


async def test_work_returns_its_result_and_its_own_errors() -> None:
    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise ZeroDivisionError

    async with Stack() as stack:
        await stack.start(fake("a"))
        assert await stack.run(answer()) == 42
        with pytest.raises(ZeroDivisionError):
            await stack.run(fail())


async def test_a_process_that_dies_takes_the_work_with_it_and_shows_its_last_lines() -> None:
    cancelled = asyncio.Event()
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with Stack() as stack:
        healthy, dying = await stack.start(fake("healthy"), fake("dying"))
        task = asyncio.create_task(stack.run(work()))
        await started.wait()
        os.kill(dying.pid, signal.SIGUSR1)
        with pytest.raises(ProcessFailed, match="dying ended with code 1 unasked") as caught:
            async with asyncio.timeout(DEADLINE_SECONDS):
                await task
        assert caught.value.tail == ("it crashed on purpose",)
        assert cancelled.is_set()
        assert alive(healthy.pid)
    assert not alive(healthy.pid)


async def test_a_process_that_is_killed_is_named_with_the_signal() -> None:
    async with Stack() as stack:
        (process,) = await stack.start(fake("a"))
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ProcessFailed, match="a was killed by SIGKILL"):
            await stack.run(asyncio.sleep(DEADLINE_SECONDS))


async def test_a_process_that_cannot_start_fails_the_stage_and_the_others_are_stopped() -> None:
    async with Stack() as stack:
        with pytest.raises(ProcessFailed, match="broken ended with code 1 before it was ready") as caught:
            await stack.start(fake("fine"), fake("broken", "broken"))
        assert caught.value.tail == ("it cannot start",)
        pids = [process.pid for process in stack.processes]
    assert not any(alive(pid) for pid in pids)


async def test_a_process_that_is_never_ready_is_given_up() -> None:
    async with Stack(ready_seconds=0.3) as stack:
        with pytest.raises(ProcessFailed, match="silent was not ready in time"):
            await stack.start(fake("silent", "silent"))
        (process,) = stack.processes
    assert not alive(process.pid)


async def test_what_ignores_sigterm_is_killed_with_all_its_group_when_the_grace_is_over() -> None:
    log = Log()
    async with Stack(on_line=log, grace_seconds=0.2) as stack:
        (process,) = await stack.start(fake("stubborn", "stubborn"))
        _, grandchild = await log.has(lambda _, line: line.isdigit())
    assert not alive(process.pid)
    await gone(int(grandchild))


async def test_cancelling_a_stop_ends_the_grace() -> None:
    stack = Stack(grace_seconds=3600)
    (process,) = await stack.start(fake("stubborn", "stubborn"))
    stopping = asyncio.create_task(stack.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    async with asyncio.timeout(DEADLINE_SECONDS):
        with pytest.raises(asyncio.CancelledError):
            await stopping
    assert not alive(process.pid)


async def test_endless_lines_and_lookalikes_of_the_ready_line_are_kept_short_and_apart() -> None:
    log = Log()
    async with Stack(on_line=log) as stack:
        (process,) = await stack.start(fake("chatty", "chatty"))
        assert process.ready_line["port"] == 1
    assert {line for _, line in log.lines} >= {'{"ready": "not yet"}', "{broken"}
    assert max(len(line) for _, line in log.lines) == MAX_LINE_CHARACTERS


async def test_killing_the_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    script = tmp_path / "supervisor.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio
            from kvscout_cli.process import Program
            from kvscout_cli.stack import Stack

            async def main():
                async with Stack() as stack:
                    await stack.start(Program("a", "support.fake_service", ("serve",)))
                    await stack.start(Program("b", "support.fake_service", ("stubborn",)))
                    print(*(process.pid for process in stack.processes), flush=True)
                    await asyncio.Event().wait()

            asyncio.run(main())
            """
        )
    )
    supervisor = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    async with asyncio.timeout(DEADLINE_SECONDS):
        pids = [int(pid) for pid in (await supervisor.stdout.readline()).split()]
        grandchildren = [child.pid for pid in pids for child in psutil.Process(pid).children()]
        supervisor.kill()
        await supervisor.wait()
    assert len(pids) == 2
    await gone(*pids)
    for pid in grandchildren:  # of the test's own making: services start no processes
        os.kill(pid, signal.SIGKILL)
