"""How long an engine may be silent."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from kvscout_common.http.http import StreamReport
from kvscout_gateway.engines.timeouts import SUSPICIOUS_SECONDS, Bounded, EngineTimeouts, Liveness, SilenceWatch

TIMEOUTS = EngineTimeouts(
    first_output_seconds=10, prefill_tokens_per_second=100, idle_seconds=20, queue_seconds=200, answer_seconds=60
)


def followed(watch: SilenceWatch) -> StreamReport:
    """What a pump notices of the request's answer."""
    report = StreamReport()
    watch.follow(lambda: report)
    return report


def test_the_own_prompt_explains_silence_before_the_first_token_and_not_after() -> None:
    watch = SilenceWatch(TIMEOUTS, 500, Liveness(), 1000.0)
    assert watch.deadline() == 1015
    watch.output(1014)
    assert watch.deadline() == 1034


def test_who_is_not_listened_to_is_not_silent() -> None:
    watch = SilenceWatch(TIMEOUTS, 500, Liveness(), 1000.0)
    report = followed(watch)
    watch.output(1014)
    report.listening_since = math.inf  # its client is slow
    assert watch.left(5000) == watch.deadline() - 5000 == math.inf
    report.listening_since = 1100
    assert (watch.deadline(), watch.silent_since) == (1120, 1100)


def test_an_answer_that_comes_as_a_whole_has_its_time_and_that_of_its_prompt_and_shows_that_the_rank_works() -> None:
    liveness = Liveness()
    whole, waiting = (
        SilenceWatch(TIMEOUTS, 500, liveness, 1000.0, whole_answer=True),
        SilenceWatch(TIMEOUTS, 0, liveness, 1000.0),
    )
    assert whole.deadline() == 1065
    whole.output(1012)
    whole.end()
    assert not whole.whole_answer
    assert waiting.deadline() == 1022


async def test_what_waits_for_an_engine_that_is_lost_ends_at_once_and_what_was_heard_since_goes_on() -> None:
    loop, liveness = asyncio.get_running_loop(), Liveness()
    ranks = [SilenceWatch(TIMEOUTS, 0, liveness, 100.0), SilenceWatch(TIMEOUTS, 0, liveness, 100.0, whole_answer=True)]
    decoding, slow_client = SilenceWatch(TIMEOUTS, 0, liveness, 100.0), SilenceWatch(TIMEOUTS, 0, liveness, 100.0)
    decoding.output(120.0)
    slow_client.output(100.0)
    followed(slow_client).listening_since = math.inf
    later = SilenceWatch(TIMEOUTS, 0, liveness, 119.0)
    liveness.lose("is gone", 110.0)
    assert [watch.lost for watch in ranks] == ["is gone"] * 2
    assert [watch.lost for watch in (decoding, slow_client, later)] == [""] * 3

    waiting = SilenceWatch(TIMEOUTS, 0, liveness, loop.time())
    loop.call_soon(lambda: liveness.lose("is gone", loop.time()))
    with pytest.raises(TimeoutError):
        with Bounded(waiting):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError):
        with Bounded(waiting):  # nor is it waited for again
            await asyncio.Event().wait()


def test_prompts_that_came_before_explain_silence_and_those_that_came_later_do_not() -> None:
    liveness = Liveness()
    running = SilenceWatch(TIMEOUTS, 500, liveness, 0.0)
    running.output(0.0)
    long, short = SilenceWatch(TIMEOUTS, 3000, liveness, 1.0), SilenceWatch(TIMEOUTS, 100, liveness, 2.0)
    assert long.deadline() == 1 + 10 + 30
    assert short.deadline() == 2 + 10 + 31
    # Both may hold up who decodes beside them.
    assert running.deadline() == 20 + 31
    long.output(30.0)
    assert short.deadline() == 30 + 10 + 1
    long.end()
    short.end()
    assert running.deadline() == 30 + 20
    running.end()
    assert not liveness.prefilling
    assert not liveness.decoding
    assert liveness.beat_at == 30


def test_a_request_that_failed_explains_nothing_any_more() -> None:
    liveness = Liveness()
    second = SilenceWatch(TIMEOUTS, 100, liveness, 0.0)
    first = SilenceWatch(TIMEOUTS, 5000, liveness, 0.0)
    assert first.deadline() == 61
    first.end()
    first.end()
    assert second.deadline() == 11


def test_output_for_others_bears_silence_up_to_a_limit() -> None:
    liveness = Liveness()
    waiting, served = SilenceWatch(TIMEOUTS, 0, liveness, 0.0), SilenceWatch(TIMEOUTS, 0, liveness, 0.0)
    report = followed(served)
    served.output(0.0)
    for now in range(0, 400, 5):
        report.progress_at = now
        assert waiting.left(now + 1) == waiting.deadline() - now - 1 or now < 10
    assert waiting.deadline() == 200
    assert served.deadline() == 395 + 20
    served.end()
    assert liveness.last_beat() == 395
    assert SilenceWatch(TIMEOUTS, 50_000, liveness, 1000.0).deadline() == 1510, (
        "a prompt that takes longer than that has its time"
    )


async def test_a_deadline_may_move_while_something_is_awaited() -> None:
    loop = asyncio.get_running_loop()
    timeouts = EngineTimeouts(first_output_seconds=0.05, idle_seconds=0.05)
    watch = SilenceWatch(timeouts, 0, Liveness(), loop.time())
    began = loop.time()
    loop.call_later(0.03, lambda: watch.output(loop.time()))
    with pytest.raises(TimeoutError):
        with Bounded(watch):
            await asyncio.Event().wait()
    assert loop.time() - began > 0.07
    watch.output(loop.time())
    with Bounded(watch):
        await asyncio.sleep(0)


async def test_who_is_cancelled_while_the_deadline_passes_is_cancelled() -> None:
    loop = asyncio.get_running_loop()
    watch = SilenceWatch(EngineTimeouts(first_output_seconds=0.0), 0, Liveness(), loop.time())

    async def wait() -> None:
        with Bounded(watch):
            time.sleep(0.002)  # noqa: ASYNC251  # both in one turn of the loop
            loop.call_soon(task.cancel)
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.wait([task])
    assert task.cancelled()


def test_a_rank_is_suspicious_when_it_is_silent_for_longer_than_its_prompts_explain() -> None:
    liveness = Liveness()
    assert not liveness.waits
    assert liveness.silent_since(whole_answers=True) == math.inf
    watch, whole = (
        SilenceWatch(TIMEOUTS, 200, liveness, 1000.0),
        SilenceWatch(TIMEOUTS, 0, liveness, 990.0, whole_answer=True),
    )
    assert liveness.silent_since(whole_answers=True) == 990
    assert liveness.silent_since(whole_answers=False) == 1000
    explained = SUSPICIOUS_SECONDS + 2.0
    assert liveness.suspicious_seconds(1000 + explained - 0.1) is None
    assert liveness.suspicious_seconds(1000 + explained) == explained
    other = SilenceWatch(TIMEOUTS, 0, liveness, 1001.0)
    other.output(1004.0)
    assert liveness.suspicious_seconds(1000 + explained) is None, "it works for another one"
    for one in (watch, other, whole):
        one.end()
    assert not liveness.waits


def test_an_engine_that_is_lost_for_a_short_time_may_go_on_with_what_it_began() -> None:
    liveness = Liveness()
    waiting, begun = SilenceWatch(TIMEOUTS, 0, liveness, 100.0), SilenceWatch(TIMEOUTS, 0, liveness, 100.0)
    begun.output(101.0)
    liveness.lose("is gone", 110.0, began=False)
    assert (waiting.lost, begun.lost) == ("is gone", "")
    liveness.lose("is gone", 130.0)
    assert begun.lost == "is gone"


def test_the_pace_of_answers_is_counted_from_their_first_tokens_while_they_run_and_at_their_ends() -> None:
    liveness = Liveness()
    watch = SilenceWatch(TIMEOUTS, 0, liveness, 100.0)
    report = followed(watch)
    assert liveness.count() == (0.0, 0)
    watch.output(101.0)
    report.first_output_at, report.last_output_at, report.tokens = 101.0, 103.0, 5
    assert liveness.count() == (2.0, 4)
    assert liveness.count() == (2.0, 4)
    report.last_output_at, report.tokens = 103.0 + SUSPICIOUS_SECONDS, 6
    assert liveness.count() == (2.0, 4), "it hung"
    report.last_output_at, report.tokens = 104.0 + SUSPICIOUS_SECONDS, 8
    watch.end()
    watch.end()
    assert (liveness.streamed_seconds, liveness.streamed_tokens) == (3.0, 6)
