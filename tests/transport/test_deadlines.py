"""Many deadlines behind one timer: each comes in time, and those that are taken back leave nothing."""

import asyncio
import random

import uvloop
from support.processes import eventually

from kvscout_common.transport.deadlines import SPARE, Deadlines


async def test_deadlines_come_in_order_whenever_they_were_set() -> None:
    loop = asyncio.get_running_loop()
    deadlines, came = Deadlines(loop), []
    now = loop.time()
    for after in (0.03, 0.01, 0.02):
        deadlines.add(now + after, lambda after=after: came.append((after, loop.time() - now)))  # type: ignore[misc]
    await eventually(lambda: len(came) == 3)
    assert [after for after, _ in came] == [0.01, 0.02, 0.03]
    assert all(waited >= after - 0.002 for after, waited in came)


async def test_a_deadline_that_is_taken_back_does_not_come_and_those_behind_it_do() -> None:
    loop = asyncio.get_running_loop()
    deadlines, came = Deadlines(loop), []
    first = deadlines.add(loop.time() + 0.01, lambda: came.append("first"))
    deadlines.add(loop.time() + 0.02, lambda: came.append("second"))
    deadlines.drop(first)
    deadlines.drop(first)
    await eventually(lambda: bool(came))
    assert came == ["second"]


async def test_calls_that_end_long_before_their_deadline_leave_no_more_than_a_bounded_rest() -> None:
    loop = asyncio.get_running_loop()
    deadlines, open_ones = Deadlines(loop), list[int]()
    for number in range(20_000):
        open_ones.append(deadlines.add(loop.time() + 3600 + random.random(), lambda: None))
        if len(open_ones) > 10:
            deadlines.drop(open_ones.pop(random.randrange(10)))
        assert len(deadlines._heap) <= 2 * (len(open_ones) + 1) + SPARE + 1, number
    deadlines.close()


def test_a_deadline_that_is_over_when_it_is_set_comes_too_and_those_after_it_are_taken() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        deadlines, came = Deadlines(loop), list[float]()
        deadlines.add(loop.time() + 3600, lambda: came.append(3600.0))
        for late in (1.0, 0.0, 2.0):
            deadlines.add(loop.time() - late, lambda late=late: came.append(late))  # type: ignore[misc]
        await eventually(lambda: len(came) == 3)
        assert sorted(came) == [0.0, 1.0, 2.0]
        deadlines.close()

    asyncio.run(run())
    uvloop.run(run())
