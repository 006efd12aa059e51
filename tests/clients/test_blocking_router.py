"""The blocking counterpart: the same methods, for any number of threads and none of them with an event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.fake_gateway import FakeGateway, fake_gateway

from kvscout.v1 import gateway_pb2
from kvscout_client import BlockingBooking, BlockingRouter, Booking, FreeOutcome, RouteDecision, Router
from kvscout_common.errors import InvalidArgument, NotFound, Unavailable


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """A fake gateway on a loop of its own, in a thread."""
    began, ends = threading.Event(), asyncio.Event()
    found: list[FakeGateway] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with fake_gateway() as made:
            found.append(made)
            began.set()
            await ends.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert began.wait(20)
    yield found[0]
    loop.call_soon_threadsafe(ends.set)
    thread.join(20)
    loop.close()


@pytest.fixture
def router(gateway: FakeGateway) -> Iterator[BlockingRouter]:
    with BlockingRouter(gateway.address, model="m", timeout_seconds=10) as router:
        yield router


@pytest.mark.parametrize(("original", "blocking"), [(Router, BlockingRouter), (Booking, BlockingBooking)])
def test_every_method_is_there_with_its_parameters(original: type, blocking: type) -> None:
    for name, method in inspect.getmembers(original, inspect.isfunction):
        if not name.startswith("_"):
            theirs, ours = (
                list(inspect.signature(one).parameters.values()) for one in (method, getattr(blocking, name))
            )
            assert [(p.name, p.kind, p.default) for p in theirs] == [(p.name, p.kind, p.default) for p in ours], name


def test_calls_answer_and_raise(router: BlockingRouter, gateway: FakeGateway) -> None:
    decision = router.route([1, 2])
    assert isinstance(decision, RouteDecision)
    assert decision.worker.worker_id == "w0"
    assert [record.spec.worker_id for record in router.list_workers()] == ["w0", "w1"]
    gateway.errors["Route"] = NotFound("no such model")
    with pytest.raises(NotFound):
        router.route([1])
    with pytest.raises(InvalidArgument):
        router.route([1], request_id="")


def test_a_booking_is_freed_when_its_block_ends(router: BlockingRouter, gateway: FakeGateway) -> None:
    with router.route([1], request_id="r") as booking:
        assert booking.decision.worker.worker_id == "w0"
        assert booking.prefill_complete() is True
        booking.free(output_tokens=5)
    assert gateway.last.output_tokens == 5
    assert type(gateway.last).__name__ == "FreeRequest"
    assert booking.free() is FreeOutcome.ALREADY_FREED


def test_output_is_iterated_and_an_iterator_that_is_dropped_cancels(
    router: BlockingRouter, gateway: FakeGateway
) -> None:
    gateway.chunks = [gateway_pb2.GenerateResponse(token_ids=[number]) for number in range(3)]
    assert [token for chunk in router.generate([1]) for token in chunk.token_ids] == [0, 1, 2]
    gateway.hang_after_chunks = True
    chunks = router.generate([1])
    assert [next(chunks).token_ids for _ in range(3)] == [(0,), (1,), (2,)]
    chunks.close()  # type: ignore[attr-defined]  # of every generator
    for _ in range(1_000):
        if gateway.cancelled.is_set():
            break
        threading.Event().wait(0.01)
    assert gateway.cancelled.is_set()


def test_many_threads_call_at_once(router: BlockingRouter) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: router.route([number]).worker.worker_id, range(64)))
    assert answers == ["w0"] * 64


def test_after_its_end_it_says_so(gateway: FakeGateway) -> None:
    router = BlockingRouter(gateway.address, model="m")
    chunks = router.generate([1])
    router.close()
    router.close()
    with pytest.raises(ValueError, match="ended"):
        router.status()
    with pytest.raises(ValueError, match="ended"):
        next(chunks)
    with BlockingRouter("127.0.0.1:1", retries=0, timeout_seconds=5) as nobody, pytest.raises(Unavailable):
        nobody.status()
