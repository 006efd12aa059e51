"""What the page is told, from values alone."""

from __future__ import annotations

import json
from typing import Any

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.snapshot import Kind, RankName, Service, Snapshot
from kvscout_gateway.fronts.dashboard.document import MAX_CANDIDATES, MAX_WORKERS, state
from kvscout_gateway.fronts.dashboard.history import KEPT, History, Totals
from kvscout_gateway.values.tally import Tally

HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[2J"


def moment(*worker_ids: str, problem: str = "", source: indexer_pb2.SourceStatus | None = None) -> Moment:
    workers = tuple(
        workers_pb2.WorkerEntry(worker=workers_pb2.Worker(worker_id=one, tenant="t", model=HOSTILE))
        for one in worker_ids
    )
    seen = [
        gateway_pb2.WorkerObservation(
            worker=types_pb2.WorkerRank(worker_id=worker_ids[0]),
            tenant="t",
            requests=4,
            prompt_tokens=100,
            cached_tokens=25,
            problem=problem,
        )
    ]
    services = (
        Service(
            "g:1",
            Kind.GATEWAY,
            serving=True,
            status=gateway_pb2.GatewayGetStatusResponse(requests=4, workers=seen),
            workers=workers,
        ),
        Service(
            "i:1",
            Kind.INDEXER,
            serving=True,
            status=indexer_pb2.IndexerGetStatusResponse(sources=[source] if source is not None else []),
        ),
    )
    load = scheduler_pb2.WorkerLoad(active_decode_blocks=7, active_prefill_tokens=640, cooldown_seconds=float("nan"))
    return Moment(1.0, Snapshot(services), {RankName("t", worker_ids[0], 0): load})


def shown(now: Moment, *decisions: scheduler_pb2.WatchDecisionsResponse) -> Any:
    return json.loads(json.dumps(state(now, None, decisions), allow_nan=False))


def test_a_worker_has_its_cache_its_load_its_queue_and_why_it_is_in_trouble() -> None:
    source = indexer_pb2.SourceStatus(
        tenant="t",
        worker=types_pb2.WorkerRank(worker_id="w"),
        model="m",
        state=indexer_pb2.SOURCE_STATE_BLIND,
        reason="no event came",
        blocks=12,
    )
    told = shown(moment("w", problem="fails", source=source))
    (row,) = told["workers"]
    assert (row["cached"], row["load"]["decode"], row["load"]["prefill"], row["hit"]) == (12, 7, 640, 0.25)
    assert (row["well"], row["problem"]) == (False, "fails")
    assert row["events"][0] | {"age": None} == {
        "indexer": "i:1",
        "state": "blind",
        "reason": "no event came",
        "well": False,
        "age": None,
    }
    assert told["totals"]["trouble"] == 1


def test_what_engines_call_themselves_has_nothing_invisible_in_it_and_numbers_that_are_none_are_left_out() -> None:
    told = shown(moment("w"))
    assert told["workers"][0]["model"] == "</script><img src=x onerror=alert(1)>\\u202e\\x1b[2J"
    assert told["workers"][0]["load"]["cooldown"] is None


def test_of_too_many_workers_those_in_trouble_are_shown() -> None:
    names = [f"w{index:04}" for index in range(MAX_WORKERS + 5)]
    source = indexer_pb2.SourceStatus(
        tenant="t", worker=types_pb2.WorkerRank(worker_id="w0000"), state=indexer_pb2.SOURCE_STATE_LIVE
    )
    told = shown(moment(*names, source=source))
    assert (len(told["workers"]), told["more_workers"]) == (MAX_WORKERS, 5)
    assert "w0000" not in {one["worker"] for one in told["workers"]}


def test_a_decision_shows_the_chosen_candidate_first_then_the_cheapest() -> None:
    candidates = [
        scheduler_pb2.Candidate(
            worker=types_pb2.WorkerRank(worker_id=f"w{index}"), eligible=index != 3, cost=float(index)
        )
        for index in range(40)
    ]
    candidates[9].device_blocks, candidates[9].host_blocks, candidates[9].disk_blocks = 4, 4, 6
    candidates[3].ineligible_reason = scheduler_pb2.INELIGIBLE_REASON_BUSY
    made = scheduler_pb2.WatchDecisionsResponse(
        isl_tokens=640,
        decided_unix_seconds=5.0,
        decision=scheduler_pb2.SelectResponse(
            worker=types_pb2.WorkerRank(worker_id="w9"),
            block_size=16,
            overlap_blocks=4,
            cost=float("inf"),
            explanation=scheduler_pb2.Explanation(policy="kv", reason="r", candidates=candidates),
        ),
    )
    failed = scheduler_pb2.WatchDecisionsResponse(code=14, message=HOSTILE, isl_tokens=8)
    first, second = shown(moment("w"), made, failed)["decisions"]
    assert [one["worker"] for one in first["candidates"][:4]] == ["w9/0", "w0/0", "w1/0", "w2/0"]
    assert (len(first["candidates"]), first["more_candidates"]) == (MAX_CANDIDATES, 40 - MAX_CANDIDATES)
    assert (first["blocks"], first["overlap"], first["cost"]) == (40, 4, None)
    assert (first["candidates"][0]["device"], first["candidates"][0]["slower"]) == (4, 2)
    assert second["error"].startswith("</script><img")
    assert "worker" not in second


def test_the_history_has_what_happened_in_each_span_and_an_hour_of_them() -> None:
    def totals(at: float, requests: int, cached: int, *ttft: float) -> Totals:
        tally = Tally()
        for one in ttft:
            tally.observe(one)
        return Totals(at, requests, 0, 100 * requests, cached, tuple(tally.counts), tuple(Tally().counts))

    history = History(totals(100.0, 10, 0))
    history.add(totals(110.0, 30, 500, 0.1, 0.1, 4.0))
    (point,) = history.points
    assert (point["rate"], point["hit"], point["itl"]) == (2.0, 0.25, [None, None])
    assert 90 < point["ttft"][0] < 110
    assert 3_700 < point["ttft"][1] < 4_300
    unfinished = history.unfinished(totals(112.0, 30, 500, 0.1, 0.1, 4.0))
    assert (unfinished["seconds"], unfinished["hit"], unfinished["ttft"]) == (2.0, None, [None, None])
    for index in range(KEPT + 10):
        history.add(totals(120.0 + 10 * index, 30, 500, 0.1, 0.1, 4.0))
    assert len(history.points) == KEPT
