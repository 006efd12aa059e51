"""The Scheduler service over a real gRPC server: every rpc, its refusals by field and status, what is rolled back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from support.grpc_server import serving
from support.processes import eventually
from support.scheduler_builders import BLOCK, MODEL, ManualClock
from support.scheduler_invariants import check_scheduler

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2, workers_pb2
from kvscout_common.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvscout_common.registry.backends import Backends
from kvscout_common.registry.registry import Registry
from kvscout_common.rpc.channel import call
from kvscout_common.rpc.pages import page_token
from kvscout_common.settings.config import ServerConfig
from kvscout_scheduler.rpc.servicer import SchedulerServicer
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.settings import SchedulerSettings

NAN = float("nan")
Loads = dict[tuple[str, int], scheduler_pb2.WorkerLoad]


class SlowServicer(SchedulerServicer):
    """Answers bookings when told to: what a caller sees of a server that is slow after it has booked."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.answering = 0
        """Calls that have booked and not answered."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def SelectAndReserve(self, request: Any, context: Any) -> Any:
        return await self._slowly(await super().SelectAndReserve(request, context))

    async def Reserve(self, request: Any, context: Any) -> Any:
        return await self._slowly(await super().Reserve(request, context))

    async def _slowly(self, answer: Any) -> Any:
        self.answering += 1
        try:
            await self.may_answer.wait()
        finally:
            self.answering -= 1
        return answer


class Client:
    """Rpcs of a scheduler on the running loop."""

    def __init__(
        self, core: Scheduler, clock: ManualClock, servicer: SlowServicer, stub: scheduler_pb2_grpc.SchedulerStub
    ) -> None:
        self.core = core
        self.clock = clock
        self.servicer = servicer
        self.stub = stub
        self._ids = itertools.count()

    async def rpc(self, name: str, request: Any, timeout: float | None = 10) -> Any:
        return await call(getattr(self.stub, name), request, timeout=timeout)

    async def register(self, worker_id: str, *, tenant: str = "", **fields: Any) -> None:
        worker = workers_pb2.Worker(worker_id=worker_id, **{"model": MODEL, "block_size": BLOCK, **fields})
        await self.rpc("RegisterWorker", workers_pb2.RegisterWorkerRequest(worker=worker, tenant=tenant))

    async def reserve_any(self, request_id: str | None = None, **fields: Any) -> scheduler_pb2.SelectResponse:
        """Books a prompt of two blocks; None = under a new request id."""
        if request_id is None:
            request_id = f"r{next(self._ids)}"
        request = scheduler_pb2.SelectRequest(
            **{"model": MODEL, "isl_tokens": 2 * BLOCK, "request_id": request_id, **fields}
        )
        answer: scheduler_pb2.SelectResponse = await self.rpc("SelectAndReserve", request)
        return answer

    async def loads(self, **fields: Any) -> Loads:
        answer = await self.rpc(
            "GetPotentialLoads", scheduler_pb2.SchedulerGetPotentialLoadsRequest(model=MODEL, **fields)
        )
        return {(load.worker.worker_id, load.worker.dp_rank): load for load in answer.loads}

    async def booked(self) -> None:
        """Waits until something is active."""

        async def anything() -> bool:
            return any(load.active_requests for load in (await self.loads()).values())

        await eventually(anything, what="a booking")

    async def idle(self) -> None:
        """Waits until nothing is active."""

        async def nothing() -> bool:
            return all(load.active_requests == 0 for load in (await self.loads()).values())

        await eventually(nothing, what="idleness")
        check_scheduler(self.core)


def mark(request_id: str, **fields: Any) -> scheduler_pb2.MarkPrefillCompleteRequest:
    return scheduler_pb2.MarkPrefillCompleteRequest(**{"model": MODEL, "request_id": request_id, **fields})


def free(request_id: str, **fields: Any) -> scheduler_pb2.FreeRequest:
    return scheduler_pb2.FreeRequest(**{"model": MODEL, "request_id": request_id, **fields})


def ref(request_id: str, **fields: Any) -> scheduler_pb2.RequestRef:
    return scheduler_pb2.RequestRef(model=MODEL, request_id=request_id, **fields)


@asynccontextmanager
async def scheduler(*worker_ids: str, **settings: Any) -> AsyncIterator[Client]:
    clock = ManualClock()
    core = Scheduler(SchedulerSettings(**{"policy": "kv", **settings}), clock=clock, rng=Random(7))
    registry = Registry(clock)
    registry.listen(core.workers)
    servicer = SlowServicer(core, registry, Backends(registry, ServerConfig()))
    async with serving(lambda s: scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, s)) as channel:
        client = Client(core, clock, servicer, scheduler_pb2_grpc.SchedulerStub(channel))
        for worker_id in worker_ids:
            await client.register(worker_id)
        yield client


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A scheduler with the workers a and b."""
    async with scheduler("a", "b") as started:
        yield started


async def test_select_books_nothing_and_select_and_reserve_does(client: Client) -> None:
    request = scheduler_pb2.SelectRequest(
        model=MODEL,
        isl_tokens=3 * BLOCK,
        block_hashes=[1, 2, 3],
        overlaps=types_pb2.Overlaps(worker_ids=["b"], device_blocks=[2]),
        request_id="r",
    )
    for _ in range(2):
        picked = await client.rpc("Select", request)
        assert (picked.worker.worker_id, picked.overlap_blocks, picked.effective_overlap_blocks) == ("b", 2, 2.0)
        assert (picked.uncached_tokens, picked.block_size, picked.cost) == (BLOCK, BLOCK, 4.0)
    assert all(load.active_requests == 0 for load in (await client.loads()).values())
    booked = await client.rpc("SelectAndReserve", request)
    assert booked == picked
    load = (await client.loads())["b", 0]
    assert (load.active_requests, load.active_prefill_tokens, load.active_decode_blocks) == (1, BLOCK, 3)


async def test_overlaps_of_slower_tiers_count_by_their_weights(client: Client) -> None:
    picked = await client.rpc(
        "Select",
        scheduler_pb2.SelectRequest(
            model=MODEL,
            isl_tokens=8 * BLOCK,
            overlaps=types_pb2.Overlaps(
                worker_ids=["a"], device_blocks=[1], host_blocks=[3], disk_blocks=[5], external_blocks=[5]
            ),
        ),
    )
    assert (picked.overlap_blocks, picked.effective_overlap_blocks) == (1, 1 + 2 * 0.75 + 2 * 0.25)


async def test_a_decision_is_explained_when_asked(client: Client) -> None:
    await client.rpc("DrainWorker", workers_pb2.DrainWorkerRequest(worker_id="a"))
    picked = await client.reserve_any(explain=True)
    why = picked.explanation
    assert (why.policy, why.overlap_score_weight, why.router_temperature) == ("kv", 1.0, 0.0)
    assert why.reason
    assert {c.worker.worker_id: (c.eligible, c.ineligible_reason) for c in why.candidates} == {
        "a": (False, scheduler_pb2.INELIGIBLE_REASON_DRAINING),
        "b": (True, scheduler_pb2.INELIGIBLE_REASON_UNSPECIFIED),
    }
    assert not (await client.reserve_any()).HasField("explanation")


async def test_settings_can_be_changed_for_one_request(client: Client) -> None:
    weightless = await client.rpc(
        "Select",
        scheduler_pb2.SelectRequest(
            model=MODEL,
            isl_tokens=BLOCK,
            explain=True,
            router_config_override=types_pb2.RouterConfigOverride(
                overlap_score_weight=0, router_temperature=0.5, policy="round-robin", seed=3
            ),
        ),
    )
    why = weightless.explanation
    assert (why.policy, why.overlap_score_weight, why.router_temperature) == ("round-robin", 0.0, 0.5)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": ""}, "model"),
        ({"isl_tokens": 0}, "isl_tokens"),
        ({"request_id": ""}, "request_id"),
        ({"router_config_override": {"router_temperature": -1}}, "router_temperature"),
        ({"router_config_override": {"router_temperature": NAN}}, "router_temperature"),
        ({"router_config_override": {"overlap_score_weight": -0.5}}, "overlap_score_weight"),
        ({"router_config_override": {"policy": "nonsense"}}, "policy"),
        ({"pinned_worker_id": "a", "allowed_worker_ids": ["b"]}, "pinned_worker_id"),
        ({"pinned_worker_id": "a", "excluded_worker_ids": ["a"]}, "pinned_worker_id"),
        ({"pinned_dp_rank": 0}, "pinned_dp_rank"),
        ({"block_hashes": [1, 2, 3]}, "block_hashes"),
        ({"overlaps": {"worker_ids": ["a", "b"], "device_blocks": [1]}}, "overlaps.device_blocks"),
        ({"lease_seconds": 10_000_000}, "lease_seconds"),
        ({"role": 77}, "role"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
async def test_bad_input_names_the_field(client: Client, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await client.reserve_any(**{"request_id": "r", **fields})
    assert refused.value.field is not None
    assert field in refused.value.field
    assert all(load.active_requests == 0 for load in (await client.loads()).values())


async def test_a_block_size_that_the_workers_do_not_have_is_a_failed_precondition(client: Client) -> None:
    with pytest.raises(FailedPrecondition, match="32"):
        await client.reserve_any(block_hashes=[1], block_size=32)


async def test_models_are_not_found_before_and_unavailable_after_their_workers(client: Client) -> None:
    with pytest.raises(NotFound, match="'other'"):
        await client.reserve_any(model="other")
    with pytest.raises(NotFound, match="'t'"):
        await client.reserve_any(tenant="t")
    with pytest.raises(Unavailable, match="prefill"):
        await client.reserve_any(role=types_pb2.ROLE_PREFILL)
    for worker_id in ("a", "b"):
        await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id=worker_id))
    with pytest.raises(Unavailable) as refused:
        await client.reserve_any()
    assert refused.value.answered
    assert await client.loads() == {}


async def test_pins_labels_and_adapters_each_have_their_own_refusal(client: Client) -> None:
    assert (await client.reserve_any(pinned_worker_id="b")).worker.worker_id == "b"
    for fields, kind in (
        ({"pinned_worker_id": "c"}, NotFound),
        ({"pinned_worker_id": "a", "pinned_dp_rank": 3}, NotFound),
        ({"required_labels": {"zone": "x"}}, FailedPrecondition),
        ({"lora_name": "x"}, FailedPrecondition),
        ({"allowed_worker_ids": ["c"]}, Unavailable),
        ({"excluded_worker_ids": ["a", "b"]}, Unavailable),
    ):
        with pytest.raises(kind):
            await client.reserve_any(**fields)
    await client.register("c", labels={"zone": "x"}, adapters=[workers_pb2.Adapter(name="x")])
    for fields in ({"required_labels": {"zone": "x"}}, {"lora_name": "x"}, {"allowed_worker_ids": ["c"]}):
        assert (await client.reserve_any(**fields)).worker.worker_id == "c"


async def test_busy_workers_are_refused_pinned_or_all(client: Client) -> None:
    await client.rpc(
        "SetBusyThresholds", types_pb2.SetBusyThresholdsRequest(model=MODEL, active_prefill_tokens_threshold=0)
    )
    await client.reserve_any(pinned_worker_id="a")
    with pytest.raises(ResourceExhausted, match="pinned worker 'a' is busy"):
        await client.reserve_any(pinned_worker_id="a")
    assert (await client.reserve_any()).worker.worker_id == "b"
    with pytest.raises(ResourceExhausted, match="all 2 workers"):
        await client.reserve_any()
    assert [load.busy for load in (await client.loads()).values()] == [True, True]


async def test_reported_usage_makes_busy_too_and_is_checked(client: Client) -> None:
    await client.register("a", total_kv_blocks=100)
    await client.rpc(
        "SetBusyThresholds", types_pb2.SetBusyThresholdsRequest(model=MODEL, active_decode_blocks_threshold=0.85)
    )

    async def report(usage: float, worker_id: str = "a") -> None:
        rank = types_pb2.WorkerRank(worker_id=worker_id)
        await client.rpc(
            "ReportWorkerMetrics", scheduler_pb2.ReportWorkerMetricsRequest(worker=rank, kv_cache_usage=usage)
        )

    await report(0.85)
    assert (await client.reserve_any(pinned_worker_id="a")).worker.worker_id == "a"
    await report(0.86)
    with pytest.raises(ResourceExhausted):
        await client.reserve_any(pinned_worker_id="a")
    for usage in (-0.1, 1.1, NAN):
        with pytest.raises(InvalidArgument) as refused:
            await report(usage)
        assert refused.value.field == "kv_cache_usage"
    with pytest.raises(NotFound):
        await report(0.5, "c")
    with pytest.raises(InvalidArgument):
        await report(0.5, "")


async def test_thresholds_are_set_kept_and_cleared_one_by_one(client: Client) -> None:
    async def change(**fields: Any) -> tuple[float | None, int | None]:
        request = types_pb2.SetBusyThresholdsRequest(model="later", **fields)
        return shown((await client.rpc("SetBusyThresholds", request)).thresholds)

    def shown(thresholds: types_pb2.BusyThresholds) -> tuple[float | None, int | None]:
        assert (thresholds.model, thresholds.tenant) == ("later", "default")
        return (
            thresholds.active_decode_blocks_threshold
            if thresholds.HasField("active_decode_blocks_threshold")
            else None,
            thresholds.active_prefill_tokens_threshold
            if thresholds.HasField("active_prefill_tokens_threshold")
            else None,
        )

    assert await change() == (None, None)
    assert await change(active_decode_blocks_threshold=0.5) == (0.5, None)
    assert await change(active_prefill_tokens_threshold=0) == (0.5, 0)
    assert await change(clear=["active_decode_blocks_threshold"]) == (None, 0)
    assert await change(active_decode_blocks_threshold=1, clear=["active_prefill_tokens_threshold"]) == (1, None)
    got = (await client.rpc("GetBusyThresholds", types_pb2.GetBusyThresholdsRequest(model="later"))).thresholds
    assert shown(got) == (1, None)
    listed = await client.rpc("ListBusyThresholds", types_pb2.ListBusyThresholdsRequest())
    assert list(listed.thresholds) == [got]
    other = await client.rpc("ListBusyThresholds", types_pb2.ListBusyThresholdsRequest(tenant="t"))
    assert not other.thresholds
    assert await change(clear=["active_decode_blocks_threshold"]) == (None, None)
    listed = await client.rpc("ListBusyThresholds", types_pb2.ListBusyThresholdsRequest())
    assert not listed.thresholds


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": ""}, "model"),
        ({"active_decode_blocks_threshold": 0}, "active_decode_blocks_threshold"),
        ({"active_decode_blocks_threshold": 1.01}, "active_decode_blocks_threshold"),
        ({"active_decode_blocks_threshold": NAN}, "active_decode_blocks_threshold"),
        (
            {"active_prefill_tokens_threshold": 5, "clear": ["active_prefill_tokens_threshold"]},
            "active_prefill_tokens_threshold",
        ),
        ({"clear": ["nonsense"]}, "nonsense"),
        ({"clear": ["model"]}, "model"),
        ({"clear": ["self"]}, "self"),
    ],
    ids=str,
)
async def test_thresholds_that_are_wrong_name_the_field_and_change_nothing(
    client: Client, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await client.rpc("SetBusyThresholds", types_pb2.SetBusyThresholdsRequest(**{"model": MODEL, **fields}))
    assert refused.value.field == field
    with pytest.raises(InvalidArgument):
        await client.rpc("GetBusyThresholds", types_pb2.GetBusyThresholdsRequest())
    assert not (await client.rpc("ListBusyThresholds", types_pb2.ListBusyThresholdsRequest())).thresholds


async def test_a_repeated_attempt_gets_its_first_answer_and_another_attempt_is_refused(client: Client) -> None:
    first = await client.reserve_any("r", attempt_id=1)
    for _ in range(3):
        assert await client.reserve_any("r", attempt_id=1) == first
    with pytest.raises(AlreadyExists):
        await client.reserve_any("r", attempt_id=2)
    total = sum(load.active_requests for load in (await client.loads()).values())
    assert total == 1


async def test_a_request_goes_through_its_life(client: Client) -> None:
    where = (await client.reserve_any("r", block_hashes=[1])).worker
    listed = await client.rpc("ListActiveRequests", scheduler_pb2.ListActiveRequestsRequest())
    (active,) = listed.requests
    assert listed.total == 1
    assert active.request == ref("r", tenant="default", role=types_pb2.ROLE_AGGREGATED)
    assert (active.worker, active.phase) == (where, scheduler_pb2.REQUEST_PHASE_PREFILL)
    assert (active.blocks, active.uncached_tokens, active.owner_id) == (2, 2 * BLOCK, "")
    assert active.lease_remaining_seconds == 300
    assert (await client.rpc("MarkPrefillComplete", mark("r"))).changed
    assert not (await client.rpc("MarkPrefillComplete", mark("r"))).changed
    load = (await client.loads())[where.worker_id, 0]
    assert (load.active_prefill_tokens, load.active_decode_blocks) == (0, 2)
    listed = await client.rpc("ListActiveRequests", scheduler_pb2.ListActiveRequestsRequest(model=MODEL))
    assert listed.requests[0].phase == scheduler_pb2.REQUEST_PHASE_DECODE
    freed = scheduler_pb2.FREE_OUTCOME_FREED, scheduler_pb2.FREE_OUTCOME_ALREADY_FREED
    assert tuple([(await client.rpc("Free", free("r"))).outcome for _ in freed]) == freed
    await client.idle()


async def test_that_a_request_decodes_of_which_nobody_tells_is_shown_as_an_estimate(client: Client) -> None:
    await client.reserve_any("whole", estimate_prefill_complete=True)
    await client.reserve_any("told")
    assert (await client.rpc("MarkPrefillComplete", mark("told"))).changed

    async def shown() -> dict[str, tuple[int, bool]]:
        listed = await client.rpc("ListActiveRequests", scheduler_pb2.ListActiveRequestsRequest())
        return {each.request.request_id: (each.phase, each.phase_estimated) for each in listed.requests}

    assert (await shown())["whole"] == (scheduler_pb2.REQUEST_PHASE_PREFILL, False)
    client.clock.advance(60)
    client.core.expire()
    assert (await shown())["whole"] == (scheduler_pb2.REQUEST_PHASE_DECODE, True)
    assert (await shown())["told"] == (scheduler_pb2.REQUEST_PHASE_DECODE, False)
    for request_id in ("whole", "told"):
        await client.rpc("Free", free(request_id))
    await client.idle()


async def test_a_free_that_overtakes_its_booking_cancels_it(client: Client) -> None:
    assert (await client.rpc("Free", free("r", attempt_id=1))).outcome == scheduler_pb2.FREE_OUTCOME_UNKNOWN
    with pytest.raises(Cancelled):
        await client.reserve_any("r", attempt_id=1)
    await client.reserve_any("r", attempt_id=2)


async def test_unknown_requests_are_not_found_and_unnamed_ones_refused(client: Client) -> None:
    with pytest.raises(NotFound):
        await client.rpc("MarkPrefillComplete", mark("x"))
    for name, kind in (("MarkPrefillComplete", mark), ("Free", free)):
        for request, field in ((kind(""), "request_id"), (kind("r", model=""), "model")):
            with pytest.raises(InvalidArgument) as refused:
                await client.rpc(name, request)
            assert refused.value.field == field
    with pytest.raises(InvalidArgument) as refused:
        await client.rpc("Renew", scheduler_pb2.RenewRequest())
    assert refused.value.field == "requests"


async def test_a_reservation_names_its_worker(client: Client) -> None:
    def reserve(**fields: Any) -> scheduler_pb2.ReserveRequest:
        given = {"worker": types_pb2.WorkerRank(worker_id="b"), "request_id": "r", "isl_tokens": 3 * BLOCK, **fields}
        return scheduler_pb2.ReserveRequest(model=MODEL, **given)

    booked = await client.rpc("Reserve", reserve(block_hashes=[1, 2, 3], cached_tokens=BLOCK))
    assert booked.uncached_tokens == 2 * BLOCK
    assert (await client.loads())["b", 0].active_decode_blocks == 3
    assert (await client.rpc("Reserve", reserve())).uncached_tokens == 2 * BLOCK
    with pytest.raises(AlreadyExists):
        await client.rpc("Reserve", reserve(attempt_id=1))
    with pytest.raises(AlreadyExists):
        await client.rpc("Reserve", reserve(worker=types_pb2.WorkerRank(worker_id="a")))
    with pytest.raises(NotFound):
        await client.rpc("Reserve", reserve(request_id="s", worker=types_pb2.WorkerRank(worker_id="c")))
    for fields, field in (
        ({"request_id": ""}, "request_id"),
        ({"worker": types_pb2.WorkerRank()}, "worker_id"),
        ({"request_id": "s", "isl_tokens": 0}, "isl_tokens"),
        ({"request_id": "s", "cached_tokens": 99 * BLOCK}, "cached_tokens"),
        ({"request_id": "s", "block_hashes": [1] * 4}, "block_hashes"),
        ({"request_id": "s", "role": types_pb2.ROLE_DECODE}, None),
    ):
        with pytest.raises(InvalidArgument if field else Unavailable) as refused:
            await client.rpc("Reserve", reserve(**fields))
        assert refused.value.field == field


async def test_output_is_counted_where_it_is_tracked(client: Client) -> None:
    async with scheduler("a", track_output_blocks=True) as tracking:
        await tracking.reserve_any("r")
        for blocks, total in ((1, 1), (2, 3)):
            request = scheduler_pb2.AddOutputRequest(model=MODEL, request_id="r", blocks=blocks)
            assert (await tracking.rpc("AddOutput", request)).output_blocks == total
        assert (await tracking.loads())["a", 0].active_decode_blocks == 5
        for request, kind in (
            (scheduler_pb2.AddOutputRequest(model=MODEL, request_id="r"), InvalidArgument),
            (scheduler_pb2.AddOutputRequest(blocks=1), InvalidArgument),
            (scheduler_pb2.AddOutputRequest(model=MODEL, request_id="x", blocks=1), NotFound),
        ):
            with pytest.raises(kind):
                await tracking.rpc("AddOutput", request)
        await tracking.rpc("Free", free("r"))
        await tracking.idle()
    await client.reserve_any("r")
    with pytest.raises(FailedPrecondition):
        await client.rpc("AddOutput", scheduler_pb2.AddOutputRequest(model=MODEL, request_id="r", blocks=1))


async def test_leases_end_unless_renewed(client: Client) -> None:
    await client.reserve_any("short", lease_seconds=10)
    await client.reserve_any("kept", lease_seconds=10)
    client.clock.advance(9)
    request = scheduler_pb2.RenewRequest(requests=[ref("gone"), ref("kept")], lease_seconds=60)
    assert list((await client.rpc("Renew", request)).unknown) == [0]
    client.clock.advance(2)
    assert client.core.expire() == 1
    listed = await client.rpc("ListActiveRequests", scheduler_pb2.ListActiveRequestsRequest())
    assert [active.request.request_id for active in listed.requests] == ["kept"]
    assert listed.requests[0].lease_remaining_seconds == 58
    status = await client.rpc("GetStatus", types_pb2.GetStatusRequest())
    assert dict(status.expired) == {"lease": 1}


async def test_a_booking_whose_caller_ran_out_of_time_is_taken_back(client: Client) -> None:
    client.servicer.may_answer.clear()
    with pytest.raises(DeadlineExceeded):
        await client.rpc("SelectAndReserve", booking("r"), timeout=1.0)
    await client.idle()
    status = await client.rpc("GetStatus", types_pb2.GetStatusRequest())
    assert dict(status.expired) == {"undelivered": 1}
    client.servicer.may_answer.set()
    # The caller may try again: nothing of the first try is in its way.
    await client.reserve_any("r")


@pytest.mark.parametrize("name", ["SelectAndReserve", "Reserve"])
async def test_a_booking_whose_caller_went_away_is_taken_back(client: Client, name: str) -> None:
    client.servicer.may_answer.clear()
    request: Any = booking("r")
    if name == "Reserve":
        request = scheduler_pb2.ReserveRequest(
            model=MODEL, request_id="r", isl_tokens=BLOCK, worker=types_pb2.WorkerRank(worker_id="a")
        )
    calling = asyncio.create_task(client.rpc(name, request))
    await client.booked()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await client.idle()


async def test_a_booking_stays_when_a_repeated_call_got_its_answer(client: Client) -> None:
    client.servicer.may_answer.clear()
    calling = asyncio.create_task(client.rpc("SelectAndReserve", booking("r")))
    await client.booked()
    again = asyncio.create_task(client.rpc("SelectAndReserve", booking("r")))
    await eventually(lambda: client.servicer.answering == 2, what="the second call")
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await eventually(lambda: client.servicer.answering == 1, what="the end of the first call")
    client.servicer.may_answer.set()
    await again
    assert (await client.rpc("MarkPrefillComplete", mark("r"))).changed


def booking(request_id: str) -> scheduler_pb2.SelectRequest:
    return scheduler_pb2.SelectRequest(model=MODEL, isl_tokens=2 * BLOCK, request_id=request_id)


async def test_sixty_four_at_once_are_spread_evenly() -> None:
    async with scheduler(*(f"w{number}" for number in range(8))) as client:
        await asyncio.gather(
            *(
                client.rpc(
                    "SelectAndReserve",
                    scheduler_pb2.SelectRequest(
                        model=MODEL, isl_tokens=4 * BLOCK, request_id=str(number), block_hashes=[number * 10 + 1]
                    ),
                )
                for number in range(64)
            )
        )
        assert [load.active_requests for load in (await client.loads()).values()] == [8] * 8


async def test_loads_tell_what_a_prompt_would_add(client: Client) -> None:
    await client.reserve_any("r", block_hashes=[1, 2], pinned_worker_id="a")
    loads = await client.loads(
        block_hashes=[1, 2, 3],
        isl_tokens=3 * BLOCK,
        overlaps=types_pb2.Overlaps(worker_ids=["b"], device_blocks=[3]),
    )
    a, b = loads["a", 0], loads["b", 0]
    assert (a.potential_prefill_tokens, a.potential_decode_blocks) == (5 * BLOCK, 3)
    assert (b.potential_prefill_tokens, b.potential_decode_blocks) == (0, 3)
    assert (a.active_prefill_tokens, a.active_decode_blocks, a.active_requests) == (2 * BLOCK, 2, 1)
    for model, kind in (("", InvalidArgument), ("other", NotFound)):
        with pytest.raises(kind):
            await client.rpc("GetPotentialLoads", scheduler_pb2.SchedulerGetPotentialLoadsRequest(model=model))


async def test_a_worker_that_failed_cools_down(client: Client) -> None:
    def report(worker_id: str, seconds: float = 0) -> scheduler_pb2.ReportFailureRequest:
        return scheduler_pb2.ReportFailureRequest(
            worker=types_pb2.WorkerRank(worker_id=worker_id), reason="test", cooldown_seconds=seconds
        )

    assert (await client.rpc("ReportFailure", report("a"))).cooldown_remaining_seconds == 10
    for _ in range(5):
        assert (await client.reserve_any()).worker.worker_id == "b"
    assert (await client.loads())["a", 0].cooldown_seconds == 10
    with pytest.raises(Unavailable) as refused:
        await client.reserve_any(pinned_worker_id="a")
    assert refused.value.retry_after_seconds == 10
    # It failed later, so it is the one that is left out: one of two must do.
    assert (await client.rpc("ReportFailure", report("b", 1e9))).cooldown_remaining_seconds == 60
    assert (await client.reserve_any()).worker.worker_id == "a"
    cleared = await client.rpc("ClearCooldowns", scheduler_pb2.ClearCooldownsRequest(worker_id="b"))
    assert [rank.worker_id for rank in cleared.workers] == ["b"]
    assert (await client.reserve_any()).worker.worker_id == "b"
    with pytest.raises(NotFound):
        await client.rpc("ReportFailure", report("c"))
    for seconds in (-1, NAN):
        with pytest.raises(InvalidArgument) as wrong:
            await client.rpc("ReportFailure", report("a", seconds))
        assert wrong.value.field == "cooldown_seconds"


async def test_a_draining_worker_takes_nothing_new_and_a_removed_one_frees_its_requests(client: Client) -> None:
    await client.reserve_any("r", pinned_worker_id="a")
    drained = await client.rpc("DrainWorker", workers_pb2.DrainWorkerRequest(worker_id="a"))
    assert drained.active_requests == 1
    assert (await client.loads())["a", 0].draining
    with pytest.raises(Unavailable, match="draining"):
        await client.reserve_any(pinned_worker_id="a")
    assert (await client.reserve_any("s")).worker.worker_id == "b"
    await client.rpc("DrainWorker", workers_pb2.DrainWorkerRequest(worker_id="a", undo=True))
    await client.reserve_any("t", pinned_worker_id="a")
    await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="a"))
    listed = await client.rpc("ListActiveRequests", scheduler_pb2.ListActiveRequestsRequest())
    assert [active.request.request_id for active in listed.requests] == ["s"]
    status = await client.rpc("GetStatus", types_pb2.GetStatusRequest())
    assert dict(status.expired) == {"worker_removed": 2}
    outcome = (await client.rpc("Free", free("r"))).outcome
    assert outcome == scheduler_pb2.FREE_OUTCOME_ALREADY_FREED


async def test_active_requests_are_listed_by_model_worker_and_tenant(client: Client) -> None:
    await client.register("z", model="other")
    await client.register("y", tenant="t")
    for request_id, fields in (
        ("1", {"pinned_worker_id": "a"}),
        ("2", {"pinned_worker_id": "b"}),
        ("3", {"model": "other"}),
        ("4", {"tenant": "t"}),
    ):
        await client.reserve_any(request_id, **fields)

    async def listed(**fields: Any) -> tuple[list[str], int]:
        answer = await client.rpc("ListActiveRequests", scheduler_pb2.ListActiveRequestsRequest(**fields))
        return [active.request.request_id for active in answer.requests], answer.total

    assert await listed() == (["1", "2", "3"], 3)
    assert await listed(page_size=2) == (["1", "2"], 3)
    assert await listed(model="other") == (["3"], 1)
    assert await listed(worker_id="b") == (["2"], 1)
    assert await listed(tenant="t") == (["4"], 1)


async def test_active_requests_come_in_pages_of_which_each_request_is_in_one(client: Client) -> None:
    names = [f"r{number:02}" for number in range(11)]
    for name in names:
        await client.reserve_any(name)
    request = scheduler_pb2.ListActiveRequestsRequest(page_size=4)
    pages: list[list[str]] = []
    while True:
        answer = await client.rpc("ListActiveRequests", request)
        pages.append([active.request.request_id for active in answer.requests])
        assert answer.total == 11 - (len(pages) > 1)
        if len(pages) == 1:
            await client.rpc("Free", free(names[0]))
        if not answer.next_page_token:
            break
        request.page_token = answer.next_page_token
    assert pages == [names[:4], names[4:8], names[8:]]
    for token in ("!", "AAAA", request.page_token[:-4], page_token("other", 0, 1.0, "m", "prefill", "r")):
        with pytest.raises(InvalidArgument) as refused:
            await client.rpc("ListActiveRequests", scheduler_pb2.ListActiveRequestsRequest(page_token=token))
        assert refused.value.field == "page_token"


async def test_workers_come_in_pages(client: Client) -> None:
    for name in ("e", "c", "d"):
        await client.register(name)
    request = workers_pb2.ListWorkersRequest(page_size=2)
    pages: list[list[str]] = []
    while not pages or request.page_token:
        answer = await client.rpc("ListWorkers", request)
        pages.append([entry.worker.worker_id for entry in answer.workers])
        request.page_token = answer.next_page_token
        if len(pages) == 1:
            await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="b"))
    assert pages == [["a", "b"], ["c", "d"], ["e"]]
    with pytest.raises(InvalidArgument, match="page_token"):
        await client.rpc("ListWorkers", workers_pb2.ListWorkersRequest(page_token="nonsense"))


async def test_the_status_tells_of_pools_settings_and_policies(client: Client) -> None:
    await client.register("p", role=types_pb2.ROLE_PREFILL, dp_size=2)
    await client.register("y", tenant="t")
    await client.reserve_any("r", block_hashes=[1, 2])
    status = await client.rpc("GetStatus", types_pb2.GetStatusRequest())
    assert (status.policy, status.overlap_score_weight, status.router_temperature) == ("kv", 1.0, 0.0)
    assert {"kv", "round-robin", "random", "least-loaded"} <= set(status.policies)
    pools = {pool.role: pool for pool in status.pools}
    assert pools.keys() == {types_pb2.ROLE_AGGREGATED, types_pb2.ROLE_PREFILL}
    both = pools[types_pb2.ROLE_AGGREGATED]
    assert (both.model, both.tenant, both.worker_ranks, both.active_requests) == (MODEL, "default", 2, 1)
    assert (both.active_prefill_tokens, both.active_decode_blocks, both.decisions) == (2 * BLOCK, 2, 1)
    assert pools[types_pb2.ROLE_PREFILL].worker_ranks == 2
    everywhere = await client.rpc("GetStatus", types_pb2.GetStatusRequest(tenant="*", model=MODEL))
    assert {pool.tenant for pool in everywhere.pools} == {"default", "t"}
    for tenant in ("", "*"):
        with pytest.raises(NotFound):
            await client.rpc("GetStatus", types_pb2.GetStatusRequest(tenant=tenant, model="other"))
    for worker_id in ("a", "b", "p"):
        await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id=worker_id))
    for tenant, pools_left in (("", 0), ("*", 1)):
        seen = await client.rpc("GetStatus", types_pb2.GetStatusRequest(tenant=tenant, model=MODEL))
        assert len(seen.pools) == pools_left


async def test_the_status_has_the_speed_of_prefill_once_it_is_learned(client: Client) -> None:
    async def learned() -> float | None:
        status = await client.rpc("GetStatus", types_pb2.GetStatusRequest())
        (pool,) = status.pools
        return pool.prefill_token_seconds if pool.HasField("prefill_token_seconds") else None

    await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="b"))
    assert await learned() is None
    for request_id in ("first", "second"):
        blocks = range(1, 2_000 // BLOCK + 1)
        await client.reserve_any(request_id, isl_tokens=2_000, block_hashes=blocks)
        client.clock.advance(1.0)
        # The first tokens of one step come together: the next one's ends it.
        await client.rpc("MarkPrefillComplete", mark(request_id))
    seconds = await learned()
    assert seconds is not None
    assert 1e-5 < seconds < 1e-2


async def test_workers_are_registered_updated_listed_and_kept_alive(client: Client) -> None:
    worker = workers_pb2.Worker(worker_id="l", model=MODEL, block_size=BLOCK)
    registered = await client.rpc("RegisterWorker", workers_pb2.RegisterWorkerRequest(worker=worker, lease_seconds=10))
    assert (registered.created, registered.worker.tenant, registered.worker.dp_size) == (True, "default", 1)
    worker.labels["zone"] = "x"
    updated = await client.rpc("UpdateWorker", workers_pb2.UpdateWorkerRequest(worker=worker))
    assert dict(updated.worker.labels) == {"zone": "x"}
    assert (await client.reserve_any(required_labels={"zone": "x"})).worker.worker_id == "l"
    listed = await client.rpc("ListWorkers", workers_pb2.ListWorkersRequest(model=MODEL))
    assert [entry.worker.worker_id for entry in listed.workers] == ["a", "b", "l"]
    assert {entry.source for entry in listed.workers} == {workers_pb2.REGISTRATION_SOURCE_RPC}
    assert listed.workers[2].lease_remaining_seconds == 10
    assert not listed.workers[0].HasField("lease_remaining_seconds")
    kept = await client.rpc("KeepAlive", workers_pb2.KeepAliveRequest(worker_ids=["x", "l", "y"]))
    assert list(kept.unknown_worker_ids) == ["x", "y"]
    with pytest.raises(InvalidArgument):
        await client.rpc("RegisterWorker", workers_pb2.RegisterWorkerRequest(worker=worker, lease_seconds=2**31))


async def test_a_scheduler_that_drains_takes_nothing_new_and_finishes_the_rest(client: Client) -> None:
    await client.reserve_any("r")
    client.core.drain()
    for name in ("Select", "SelectAndReserve"):
        with pytest.raises(Unavailable, match="draining"):
            await client.rpc(name, booking("s"))
    assert (await client.rpc("GetStatus", types_pb2.GetStatusRequest())).service.draining
    assert (await client.rpc("MarkPrefillComplete", mark("r"))).changed
    await client.rpc("Free", free("r"))
    await client.idle()


async def test_without_replicas_it_says_how_to_have_them(client: Client) -> None:
    found = await client.rpc("GetReplicas", scheduler_pb2.GetReplicasRequest())
    assert "--router-replica-sync" in found.problem
    assert not found.replicas
