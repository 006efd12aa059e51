"""What the page is told, from values alone."""

from __future__ import annotations

import json
from typing import Any

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.snapshot import RankName, Service, ServiceKind, Snapshot
from kvscout_gateway.fronts.dashboard.document import state
from kvscout_gateway.fronts.dashboard.worker_rows import MAX_WORKERS

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
            ServiceKind.GATEWAY,
            serving=True,
            status=gateway_pb2.GatewayGetStatusResponse(requests=4, workers=seen),
            workers=workers,
        ),
        Service(
            "i:1",
            ServiceKind.INDEXER,
            serving=True,
            status=indexer_pb2.IndexerGetStatusResponse(sources=[source] if source is not None else []),
        ),
    )
    load = scheduler_pb2.WorkerLoad(active_decode_blocks=7, active_prefill_tokens=640, cooldown_seconds=float("nan"))
    return Moment(1.0, Snapshot(services), {RankName("t", worker_ids[0], 0): load})


def shown(now: Moment, *decisions: scheduler_pb2.WatchDecisionsResponse) -> Any:
    return json.loads(json.dumps(state(now, None, decisions), allow_nan=False))


def ranks(told: Any) -> list[dict[str, Any]]:
    table = told["workers"]
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def test_a_worker_has_its_cache_its_load_and_the_word_of_its_gateway() -> None:
    source = indexer_pb2.SourceStatus(
        tenant="t",
        worker=types_pb2.WorkerRank(worker_id="w"),
        model="m",
        state=indexer_pb2.SOURCE_STATE_BLIND,
        reason="no event came",
        blocks=12,
    )
    told = shown(moment("w", problem="fails", source=source))
    (row,) = ranks(told)
    assert (row["cached"], row["waiting"], row["hit"]) == (12, 640, 0.25)
    assert (row["well"], row["word"], row["cause"]) == (False, "left out", "fails")
    assert told["workers"]["ill"] == 1
    (row,) = ranks(shown(moment("w", source=source)))
    assert (row["well"], row["word"], row["cause"]) == (False, "events blind", "no event came")


def test_a_pool_is_named_once() -> None:
    told = shown(moment("a", "b", "c"))
    assert [pool["role"] for pool in told["workers"]["pools"]] == ["aggregated"]
    assert {row["pool"] for row in ranks(told)} == {0}


def test_what_engines_call_themselves_has_nothing_invisible_in_it() -> None:
    told = shown(moment("w"))
    assert told["workers"]["pools"][0]["model"] == "</script><img src=x onerror=alert(1)>\\u202e\\x1b[2J"


def test_of_too_many_workers_those_in_trouble_are_shown() -> None:
    names = [f"w{index:04}" for index in range(MAX_WORKERS + 5)]
    source = indexer_pb2.SourceStatus(
        tenant="t", worker=types_pb2.WorkerRank(worker_id="w0000"), state=indexer_pb2.SOURCE_STATE_LIVE
    )
    told = shown(moment(*names, source=source))
    assert (len(ranks(told)), told["workers"]["total"]) == (MAX_WORKERS, MAX_WORKERS + 5)
    assert "w0000" not in {one["worker"] for one in ranks(told)}


def test_a_failed_decision_has_its_error_as_text_and_no_worker() -> None:
    failed = scheduler_pb2.WatchDecisionsResponse(code=14, message=HOSTILE, isl_tokens=8)
    (row,) = shown(moment("w"), failed)["decisions"]
    assert row["error"].startswith("</script><img")
    assert "worker" not in row
