"""How tasks and processes end."""

from __future__ import annotations

import asyncio

import pytest

from kvscout_common.process.endings import Closing, FirstDefect


async def test_what_was_told_to_end_is_waited_for_however_it_ends() -> None:
    ended: list[str] = []

    async def slow(name: str, error: Exception | None = None) -> None:
        await asyncio.sleep(0)
        ended.append(name)
        if error is not None:
            raise error

    closing = Closing()
    closing.add(None)
    closing.add(asyncio.create_task(slow("well")))
    closing.add(asyncio.create_task(slow("badly", RuntimeError("a defect"))))
    await closing.wait()
    assert sorted(ended) == ["badly", "well"]
    await closing.wait()


async def test_the_first_defect_ends_the_watch_and_later_ones_change_nothing() -> None:
    defect = FirstDefect()
    watch = asyncio.create_task(defect.watch())
    await asyncio.sleep(0)
    assert not watch.done()
    defect.report(ValueError("first"))
    defect.report(KeyError("second"))
    with pytest.raises(ValueError, match="first"):
        await watch


async def test_a_watch_that_is_cancelled_leaves_the_defect_to_the_next() -> None:
    defect = FirstDefect()
    watch = asyncio.create_task(defect.watch())
    await asyncio.sleep(0)
    watch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watch
    defect.report(ValueError("later"))
    with pytest.raises(ValueError, match="later"):
        await defect.watch()
