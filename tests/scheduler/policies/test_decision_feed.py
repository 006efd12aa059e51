"""Who watches: loads when they change, decisions as they are made, and slow readers."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
import pytest
from support.grpc_server import serving
from support.scheduler_builders import MODEL, ManualClock, key, overlaps, request, reserve, scheduler, worker

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc
from kvscout_common.errors import InvalidArgument, NotFound, ResourceExhausted
from kvscout_common.registry.backends import Backends
from kvscout_common.registry.registry import Registry
from kvscout_common.settings.config import ServerConfig
from kvscout_scheduler.policies.decision_feed import KEPT, KEPT_BYTES, MAX_WATCHERS, DecisionWatcher
from kvscout_scheduler.rpc.servicer import SchedulerServicer
from kvscout_scheduler.scheduler import Scheduler

DEADLINE_SECONDS = 30.0


@asynccontextmanager
async def service(*worker_ids: str) -> AsyncIterator[tuple[Scheduler, Any]]:
    clock = ManualClock()
    core = Scheduler(clock=clock, rng=Random(7), wall_clock=lambda: 1234.5)
    for worker_id in worker_ids:
        core.workers.worker_added(worker(worker_id))
    registry = Registry(clock)
    servicer = SchedulerServicer(core, registry, Backends(registry, ServerConfig()))
    async with serving(lambda s: scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, s)) as channel:
        yield core, scheduler_pb2_grpc.SchedulerStub(channel)


async def read(stream: Any) -> Any:
    async with asyncio.timeout(DEADLINE_SECONDS):
        return await stream.read()


async def test_loads_come_at_once_and_then_only_when_they_change() -> None:
    async with service("a", "b") as (core, stub):
        stream = stub.WatchLoads(scheduler_pb2.WatchLoadsRequest(model=MODEL, min_interval_ms=10))
        assert [load.active_requests for load in (await read(stream)).loads] == [0, 0]
        reserve(core, "r", "b", isl=100)
        changed = (await read(stream)).loads
        assert [(load.worker.worker_id, load.active_prefill_tokens) for load in changed] == [("a", 0), ("b", 100)]
        waiting = asyncio.ensure_future(stream.read())
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        assert not done, "nothing changed"
        core.mark_prefill_complete(key("r"))
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert (await waiting).loads[1].active_prefill_tokens == 0
        stream.cancel()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": MODEL, "min_interval_ms": 9}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": MODEL, "min_interval_ms": 60_001}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": "never seen"}, grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_what_cannot_be_watched_is_refused(fields: dict[str, Any], code: grpc.StatusCode) -> None:
    async with service("a") as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read(stub.WatchLoads(scheduler_pb2.WatchLoadsRequest(**fields)))
        assert refused.value.code() is code


async def test_decisions_come_as_they_are_made_with_what_went_wrong() -> None:
    async with service("a", "b") as (core, stub):
        stream = stub.WatchDecisions(scheduler_pb2.WatchDecisionsRequest(model=MODEL))
        await stream.initial_metadata()
        core.select(request([1, 2], on=overlaps(b=2)))
        core.select_and_reserve(request([1, 2], on=overlaps(a=1), request_id="r", attempt_id=3))
        with pytest.raises(NotFound):
            core.select(request([1], pinned_worker_id="nobody"))
        query, booked, failed = [await read(stream) for _ in range(3)]
        assert (query.decision.worker.worker_id, query.request.request_id, query.decided_unix_seconds) == (
            "b",
            "",
            1234.5,
        )
        assert (booked.decision.worker.worker_id, booked.request.request_id, booked.request.attempt_id) == ("a", "r", 3)
        assert not booked.decision.HasField("explanation")
        assert (failed.code, failed.HasField("decision")) == (grpc.StatusCode.NOT_FOUND.value[0], False)
        assert "nobody" in failed.message
        stream.cancel()


async def test_a_watcher_may_want_explanations_that_the_caller_did_not_ask_for() -> None:
    async with service("a", "b") as (core, stub):
        stream = stub.WatchDecisions(scheduler_pb2.WatchDecisionsRequest(explain=True))
        await stream.initial_metadata()
        decision = core.select_and_reserve(request([1], request_id="r"))
        assert decision.explanation is None
        seen = (await read(stream)).decision.explanation
        assert [row.worker.worker_id for row in seen.candidates] == ["a", "b"]
        stream.cancel()
        async with asyncio.timeout(DEADLINE_SECONDS):
            while core.decision_feed:
                await asyncio.sleep(0.01)


def test_a_slow_watcher_loses_the_oldest_and_is_told_how_many() -> None:
    made = scheduler("a")
    woken: list[None] = []
    watcher = DecisionWatcher("default", "", explain=False, wake=lambda: woken.append(None))
    made.decision_feed.add(watcher)
    for number in range(KEPT + 5):
        made.select(request(isl=number + 1))
    lost, records = watcher.take()
    assert (lost, [record.isl_tokens for record in records][:2]) == (5, [6, 7])
    assert len(woken) == KEPT + 5
    assert watcher.take() == (0, [])


def test_one_sees_only_the_tenant_and_the_model_that_one_watches() -> None:
    made = scheduler("a", worker("x", model="n"), worker("y", tenant="t"))
    everyone, other, mine = (
        DecisionWatcher("*", "", False, lambda: None),
        DecisionWatcher("t", "", False, lambda: None),
        DecisionWatcher("default", "n", False, lambda: None),
    )
    for watcher in (everyone, other, mine):
        made.decision_feed.add(watcher)
    made.select(request([1]))
    made.select(request([1], model="n"))
    made.select(request([1], tenant="t"))
    assert [len(list(watcher.take()[1])) for watcher in (everyone, other, mine)] == [3, 1, 1]


def test_watchers_are_bounded() -> None:
    made = scheduler("a")
    for _ in range(MAX_WATCHERS):
        made.decision_feed.add(DecisionWatcher("*", "", False, lambda: None))
    with pytest.raises(ResourceExhausted):
        made.decision_feed.add(DecisionWatcher("*", "", False, lambda: None))


def test_a_request_that_is_wrong_is_nobodys_decision() -> None:
    made = scheduler("a")
    watcher = DecisionWatcher("*", "", False, lambda: None)
    made.decision_feed.add(watcher)
    with pytest.raises(InvalidArgument):
        made.select(request(isl=0))
    assert watcher.take() == (0, [])


def watched(workers: int, isl: int, decisions: int, *, explain: bool) -> tuple[int, int, DecisionWatcher]:
    """Decisions on a long prompt that nobody reads: bytes that stay allocated for each side of the limit."""
    made = scheduler(*(f"w{number}" for number in range(workers)))
    watcher = DecisionWatcher("*", "", explain, lambda: None)
    made.decision_feed.add(watcher)
    hashes = list(range(isl // 16))
    made.select(request(hashes))
    tracemalloc.start()
    try:
        for number in range(decisions):
            made.select(request([number, *hashes[1:]], request_id=f"r{number}"))
            with pytest.raises(NotFound):
                made.select(request([number, *hashes[1:]], pinned_worker_id="nobody"))
        gc.collect()
        taken = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    # Not what threads that earlier tests left behind allocate meanwhile.
    own = [
        tracemalloc.Filter(True, name) for name in ("*/kvscout_scheduler/*", __file__, dataclasses.__file__, "<string>")
    ]
    kept = sum(trace.size for trace in taken.filter_traces(own).traces)
    return kept, 2 * decisions + 1, watcher


@pytest.mark.parametrize(("workers", "explain"), [(2, False), (100, True)])
def test_a_watcher_that_does_not_read_keeps_no_prompts_and_little_else(workers: int, explain: bool) -> None:
    kept, made, watcher = watched(workers, 16_384, 100, explain=explain)
    # As prompts these were 100 · 2 · 8 KiB, and 100 explanations of 100 candidates each.
    assert kept < (KEPT_BYTES if explain else 512 * 1024)
    lost, records = watcher.take()
    assert lost + len(list(records)) == made
    assert bool(lost) is explain


def test_a_decision_larger_than_the_limit_is_kept_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscout_scheduler.policies.decision_feed.KEPT_BYTES", 10)
    made = scheduler("a")
    watcher = DecisionWatcher("*", "", True, lambda: None)
    made.decision_feed.add(watcher)
    for _ in range(2):
        made.select(request([1]))
    lost, records = watcher.take()
    assert (lost, len(list(records))) == (1, 1)
