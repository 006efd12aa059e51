"""A frame of `kvscout top`, from values alone."""

from __future__ import annotations

import io

from rich.console import Console

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2, types_pb2
from kvscout_cli.top_view import frame
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.snapshot import Kind, RankName, Service, Snapshot

NAME = RankName("t", "w", 0)


def moment(at: float, requests: int, cached: int) -> Moment:
    worker = types_pb2.WorkerRank(worker_id="w")
    seen = gateway_pb2.WorkerObservation(worker=worker, tenant="t", prompt_tokens=100 * requests, cached_tokens=cached)
    status = gateway_pb2.GatewayGetStatusResponse(requests=requests, in_flight=2, failures=1, workers=[seen])
    load = scheduler_pb2.WorkerLoad(
        active_requests=3, active_prefill_tokens=640, active_decode_blocks=40, busy=True, total_kv_blocks=4096
    )
    pools = [scheduler_pb2.PoolLoad(model="m", queued=5)]
    services = (
        Service("g:1", Kind.GATEWAY, serving=True, status=status),
        Service("s:1", Kind.SCHEDULER, serving=True, status=scheduler_pb2.SchedulerGetStatusResponse(pools=pools)),
    )
    return Moment(at, Snapshot(services), {NAME: load})


def shown(now: Moment, before: Moment | None, *decisions: scheduler_pb2.WatchDecisionsResponse) -> str:
    console = Console(file=io.StringIO(), width=240)
    console.print(frame(now, before, decisions))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rates_are_those_since_the_frame_before() -> None:
    text = shown(moment(12.0, 30, 900), moment(10.0, 10, 100))
    assert "requests 30 (10.0/s) · in flight 2 · failed 1 · queued 5 · hit rate 40 % now, 30 % in all" in text
    assert "requests 30 (–)" in shown(moment(12.0, 30, 900), None)


def test_a_worker_of_several_indexers_is_one_line_that_shows_trouble_first() -> None:
    def status(state: indexer_pb2.SourceState.ValueType) -> indexer_pb2.IndexerGetStatusResponse:
        source = indexer_pb2.SourceStatus(worker=types_pb2.WorkerRank(worker_id="w"), model="m", state=state)
        return indexer_pb2.IndexerGetStatusResponse(sources=[source])

    live, lost = indexer_pb2.SOURCE_STATE_LIVE, indexer_pb2.SOURCE_STATE_DISCONNECTED
    for states, expected in (((live, live), "live"), ((live, lost), "disconnected"), ((lost, live), "disconnected")):
        services = [
            Service(f"i:{number}", Kind.INDEXER, serving=True, status=status(state))
            for number, state in enumerate(states)
        ]
        text = shown(Moment(1.0, Snapshot(tuple(services)), {}), None)
        assert text.count("w/0") == 1
        assert expected in text


def test_a_gateway_that_started_anew_meanwhile_has_no_rates_below_zero() -> None:
    assert "requests 1 (0.0/s) · in flight 2 · failed 1 · queued 5 · hit rate – now" in shown(
        moment(12.0, 1, 0), moment(10.0, 10, 100)
    )


def test_decisions_are_shown_with_their_worker_or_why_there_is_none() -> None:
    worker = types_pb2.WorkerRank(worker_id="w", dp_rank=1)
    made = scheduler_pb2.WatchDecisionsResponse(
        request=scheduler_pb2.RequestRef(request_id="r", model="m"),
        isl_tokens=64,
        decision=scheduler_pb2.SelectResponse(worker=worker, overlap_blocks=4, cost=1.25),
    )
    failed = scheduler_pb2.WatchDecisionsResponse(code=14, message="no worker\x1b[2J", isl_tokens=8)
    lines = shown(moment(1.0, 1, 0), None, made, failed).splitlines()
    assert lines[-2].split() == ["r", "m", "64", "w/1", "4", "1.2"]
    assert lines[-1].split() == ["query", "8", "no", "worker\\x1b[2J", "–", "–"]
