"""How long an engine may be silent."""

from __future__ import annotations

import asyncio

import pytest

from kvscout_gateway.engines.patience import Patience, Pulse, Watch, until

PATIENCE = Patience(first_output_seconds=10, prefill_tokens_per_second=100, idle_seconds=20, queue_seconds=200)


def test_the_own_prompt_explains_silence_before_the_first_token_and_not_after() -> None:
    with Watch(PATIENCE, 500, Pulse(), 1000.0) as watch:
        assert watch.deadline() == 1015
        watch.output(1014)
        assert watch.deadline() == 1034
        watch.paused(1100)  # its client was slow
        assert (watch.deadline(), watch.silence(1110)) == (1120, 10)


def test_prompts_that_came_before_explain_silence_and_those_that_came_later_do_not() -> None:
    pulse = Pulse()
    with Watch(PATIENCE, 500, pulse, 0.0) as running:
        running.output(0.0)
        with Watch(PATIENCE, 3000, pulse, 1.0) as long, Watch(PATIENCE, 100, pulse, 2.0) as short:
            assert long.deadline() == 1 + 10 + 30
            assert short.deadline() == 2 + 10 + 31
            # Both may hold up who decodes beside them.
            assert running.deadline() == 20 + 31
            long.output(30.0)
            assert short.deadline() == 30 + 10 + 1
        assert running.deadline() == 30 + 20
    assert not pulse.prefilling


def test_a_request_that_failed_explains_nothing_any_more() -> None:
    pulse = Pulse()
    with Watch(PATIENCE, 100, pulse, 0.0) as second:
        first = Watch(PATIENCE, 5000, pulse, 0.0)
        with pytest.raises(TimeoutError), first:
            assert first.deadline() == 61
            raise TimeoutError
        assert second.deadline() == 11


def test_output_for_others_bears_silence_up_to_a_limit() -> None:
    pulse = Pulse()
    with Watch(PATIENCE, 0, pulse, 0.0) as waiting, Watch(PATIENCE, 0, pulse, 0.0) as served:
        for now in range(0, 400, 5):
            served.output(now)
        assert waiting.deadline() == 200
        assert served.deadline() == 395 + 20
    with Watch(PATIENCE, 50_000, pulse, 1000.0) as endless:
        assert endless.deadline() == 1510, "a prompt that takes longer than that has its time"


async def test_a_deadline_may_move_while_something_is_awaited() -> None:
    loop = asyncio.get_running_loop()
    deadlines = iter([loop.time() + 0.02, loop.time() + 0.05])
    with pytest.raises(TimeoutError):
        async with until(lambda: next(deadlines, 0.0)):
            await asyncio.Event().wait()
    assert next(deadlines, None) is None
    async with until(lambda: loop.time() + 1):
        await asyncio.sleep(0)
