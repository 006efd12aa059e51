"""One Lifecycle stream: coalesced, answered by id, and what waits in line is not what hangs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.processes import eventually
from support.scheduler_builders import ManualClock
from support.scripted_scheduler import FULL, ScriptedScheduler, scripted_scheduler

from kvscout.v1 import scheduler_pb2
from kvscout_common import errors
from kvscout_gateway.upstreams import coalesced_stream
from kvscout_gateway.upstreams.scheduler import lifecycle
from kvscout_gateway.upstreams.scheduler.lifecycle import LifecycleStream, Operation, name_of
from kvscout_gateway.upstreams.scheduler.link import SchedulerLink


@asynccontextmanager
async def streaming(
    *in_flight: str, stuck_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic, queues: bool = False
) -> AsyncIterator[tuple[LifecycleStream, ScriptedScheduler]]:
    async with scripted_scheduler() as (scheduler, channel):
        scheduler.booked["known"], scheduler.queues_requests = "w", queues
        opening = SchedulerLink(channel).open_lifecycle
        stream = LifecycleStream(opening, "me", map(ref, in_flight), stuck_seconds=stuck_seconds, clock=clock)
        try:
            yield stream, scheduler
        finally:
            scheduler.goes_on.set()
            await stream.close(lifecycle.CLOSE_SECONDS)


def ref(request_id: str, model: str = "m") -> scheduler_pb2.RequestRef:
    return scheduler_pb2.RequestRef(model=model, request_id=request_id)


def book(stream: LifecycleStream, request_id: str, model: str = "m", blocks: int = 0) -> Operation:
    request = scheduler_pb2.SelectRequest(model=model, request_id=request_id, block_hashes=range(blocks))
    return stream.send("select_and_reserve", request)


async def worker_of(operation: Operation) -> str:
    result = await operation.answer
    assert result is not None
    assert not result.code
    return result.select.worker.worker_id


async def until(condition: Callable[[], object]) -> None:
    await eventually(condition)


async def test_the_hello_lists_what_is_in_flight_and_learns_what_is_not_known() -> None:
    async with streaming("known", "lost") as (stream, scheduler):
        assert await stream.hello == frozenset({name_of(ref("lost"))})
        assert scheduler.hellos == [["known", "lost"]]


async def test_operations_of_one_turn_go_together_and_find_their_own_answers() -> None:
    async with streaming() as (stream, scheduler):
        operations = [book(stream, f"r{number}", "nobody" if number % 2 else "m") for number in range(20)]
        results = [await operation.answer for operation in operations]
        assert [result.code if result else None for result in results] == [0, 5] * 10
        assert scheduler.messages == [20]
        assert (stream.operations, stream.messages) == (20, 1)


async def test_what_nobody_waits_for_goes_with_the_next_operation_which_acknowledges_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coalesced_stream, "LINGER_SECONDS", 100.0)
    async with streaming() as (stream, scheduler):
        await worker_of(book(stream, "a"))
        stream.prefill_complete(ref("a"))
        await asyncio.sleep(0.01)
        stream.free(ref("a"))
        assert (scheduler.messages, stream.unacknowledged_frees) == ([1], 1)
        await worker_of(book(stream, "b"))
        assert scheduler.messages == [1, 3]
        assert scheduler.received[1:] == ["prefill_complete a", "free a", "select_and_reserve b"]
        assert stream.unacknowledged_frees == 0
        assert scheduler.ages_us[0] >= 10_000


async def test_what_nobody_waits_for_goes_alone_after_a_while_and_a_heartbeat_acknowledges_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "HEARTBEAT_SECONDS", 1.5)
    async with streaming() as (stream, scheduler):
        await worker_of(book(stream, "a"))
        stream.prefill_complete(ref("a"))
        stream.free(ref("a"))
        await until(lambda: len(scheduler.messages) == 2)
        assert scheduler.messages == [1, 2]
        await until(lambda: not stream.unacknowledged_frees)
        assert scheduler.messages == [1, 2, 1]


async def test_reports_do_not_linger_where_requests_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesced_stream, "LINGER_SECONDS", 100.0)
    async with streaming(queues=True) as (stream, scheduler):
        await stream.hello
        stream.free(ref("a"))
        await until(lambda: scheduler.received == ["free a"])


async def test_a_scheduler_that_answers_every_operation_is_understood() -> None:
    async with streaming() as (stream, scheduler):
        scheduler.answers_all = True
        await worker_of(book(stream, "a"))
        stream.prefill_complete(ref("a"))
        stream.free(ref("a"))
        stream.free(ref("b", model="nobody"))
        await until(lambda: stream.unacknowledged_frees == 1)
        assert await worker_of(book(stream, "c")) == "w"
        assert stream.unacknowledged_frees == 1, "one was refused"


async def test_what_comes_while_a_message_is_under_way_goes_in_the_next_one_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coalesced_stream, "PACE_SECONDS", 100.0)
    async with streaming() as (stream, scheduler):
        await stream.hello
        scheduler.goes_on.clear()
        first = book(stream, "a")
        await until(lambda: stream.messages == 1)
        later = [book(stream, "b"), book(stream, "c"), book(stream, "d")]
        await asyncio.sleep(0)
        assert stream.messages == 1
        scheduler.goes_on.set()
        await asyncio.gather(*(operation.answer for operation in (first, *later)))
        assert scheduler.messages == [1, 3]


async def test_a_long_message_is_split_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesced_stream, "MESSAGE_BYTES", 110)
    monkeypatch.setattr(coalesced_stream, "MESSAGE_OPERATIONS", 3)
    async with streaming() as (stream, scheduler):
        sizes = (4, 4, 4, 30, 0, 0, 0, 0)
        await asyncio.gather(*(book(stream, f"{n}", blocks=size).answer for n, size in enumerate(sizes)))
        assert scheduler.messages == [2, 1, 1, 3, 1]


async def test_who_waits_in_line_holds_up_nobody_and_is_not_taken_for_stuck() -> None:
    async with streaming(stuck_seconds=0.05) as (stream, scheduler):
        waiting = book(stream, "patient", FULL)
        assert await worker_of(book(stream, "quick")) == "w"
        assert stream.carried_out(waiting)
        assert (waiting.answer.done(), stream.waiting) == (False, 1)
        for _ in range(20):
            stream.check()  # probes keep it alive
            await asyncio.sleep(0.01)
        assert not stream.ended
        await scheduler.make_room()
        assert await worker_of(waiting) == "late"
        assert stream.waiting == 0


async def test_a_probe_tells_that_the_only_one_asked_for_waits_in_line() -> None:
    async with streaming() as (stream, _):
        waiting = book(stream, "patient", FULL)
        stream.probe()
        await until(lambda: stream.carried_out(waiting))
        assert not waiting.answer.done()


async def test_a_scheduler_that_hangs_is_broken_off_and_whoever_waits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "PROBE_SECONDS", 0.01)
    async with streaming(stuck_seconds=0.05) as (stream, scheduler):
        await stream.hello
        scheduler.goes_on.clear()
        operation = book(stream, "r")

        async def given_up() -> bool:
            stream.check()
            return stream.ended

        await eventually(given_up)
        assert await operation.answer is None
        assert isinstance(stream.error, errors.DeadlineExceeded)
        assert await book(stream, "too late").answer is None


async def test_an_idle_stream_is_heard_now_and_then_and_one_that_hears_nothing_is_broken_off() -> None:
    clock = ManualClock()
    async with streaming(stuck_seconds=1.0, clock=clock) as (stream, scheduler):
        await stream.hello
        assert scheduler.heartbeats_ms == [3000]
        for beats in range(3):
            stream.check()
            await asyncio.sleep(0)
            await until(lambda: not stream._unsent and not stream._sent)
            assert stream.messages == beats, "not more often than it must"
            clock.advance(lifecycle.HEARTBEAT_SECONDS)
        scheduler.goes_on.clear()
        stream.check()
        await until(lambda: stream.messages == 3)
        # Nobody waits: it may take its time, but not for ever.
        for _ in range(2):
            clock.advance(lifecycle.SILENT_SECONDS / 2)
            stream.check()
        assert not stream.ended
        for _ in range(2):
            clock.advance(lifecycle.PROBE_SECONDS)
            stream.check()
        await until(lambda: stream.ended)
        assert isinstance(stream.error, errors.DeadlineExceeded)


async def test_a_stream_that_breaks_says_why() -> None:
    async with streaming() as (stream, scheduler):
        await stream.hello
        waiting = book(stream, "r", FULL)
        await until(lambda: scheduler.received)
        scheduler.cut()
        assert await waiting.answer is None
        assert stream.changed.is_set()
        assert not stream.draining
    async with scripted_scheduler() as (scheduler, channel):
        scheduler.refuses = errors.PermissionDenied("no")
        stream = LifecycleStream(SchedulerLink(channel).open_lifecycle, "me", ())
        assert await stream.hello is None
        assert isinstance(stream.error, errors.PermissionDenied)


async def test_why_a_stream_ended_is_known_though_a_write_failed_because_of_it() -> None:
    ports: list[int] = []
    async with (
        scripted_scheduler(ports.append) as (scheduler, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{ports[0]}") as channel,
    ):
        scheduler.refuses = errors.Unimplemented("no Lifecycle")
        rpc: Any = SchedulerLink(channel).open_lifecycle

        def opening() -> Any:
            call = rpc()

            async def write(message: object) -> None:
                """As grpc.aio does, where the event loop sees to the failed write after the status."""
                await call.code()
                call._cython_call.set_internal_error("a write that failed")
                await call._raise_for_status()

            call.write = write
            return call

        stream = LifecycleStream(opening, "me", ())
        assert await stream.hello is None
        assert isinstance(stream.error, errors.Unimplemented)


async def test_a_scheduler_that_drains_says_so_and_is_served_to_the_end() -> None:
    async with streaming() as (stream, scheduler):
        await stream.hello
        await scheduler.drain()
        await stream.changed.wait()
        assert (stream.draining, stream.ended) == (True, False)
        stream.free(ref("r"))
        await stream.close(lifecycle.CLOSE_SECONDS)
        assert scheduler.received == ["free r"]
        assert stream.ended


async def test_what_nobody_waits_for_any_more_is_not_sent() -> None:
    async with streaming() as (stream, scheduler):
        stream.drop(book(stream, "dropped"))
        await worker_of(book(stream, "kept"))
        assert scheduler.received == ["select_and_reserve kept"]
