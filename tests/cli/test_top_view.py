"""A frame of `kvscout top`, from values alone."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2, types_pb2
from kvscout_cli.top_keys import View
from kvscout_cli.top_view import frame, shown_rows
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.snapshot import RankName, Service, ServiceKind, Snapshot

NAME = RankName("t", "w", 0)


def moment(at: float, requests: int, cached: int, problem: str = "") -> Moment:
    worker = types_pb2.WorkerRank(worker_id="w")
    seen = gateway_pb2.WorkerObservation(
        worker=worker,
        tenant="t",
        prompt_tokens=100 * requests,
        cached_tokens=cached,
        requests=requests,
        first_tokens=requests,
        ttft_seconds=0.05 * requests,
        problem=problem,
    )
    status = gateway_pb2.GatewayGetStatusResponse(requests=requests, in_flight=2, failures=1, workers=[seen])
    load = scheduler_pb2.WorkerLoad(
        active_requests=3, active_prefill_tokens=640, active_decode_blocks=40, busy=True, total_kv_blocks=4096
    )
    pools = [scheduler_pb2.PoolLoad(model="m", queued=5)]
    services = (
        Service("g:1", ServiceKind.GATEWAY, serving=True, status=status),
        Service(
            "s:1", ServiceKind.SCHEDULER, serving=True, status=scheduler_pb2.SchedulerGetStatusResponse(pools=pools)
        ),
    )
    return Moment(at, Snapshot(services), {NAME: load})


def shown(now: Moment, before: Moment | None, *decisions: scheduler_pb2.WatchDecisionsResponse) -> str:
    console = Console(file=io.StringIO(), width=240)
    console.print(frame(now, before, decisions, width=240))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rates_are_those_since_the_frame_before() -> None:
    text = shown(moment(12.0, 30, 900), moment(10.0, 10, 100))
    assert text.splitlines()[0] == (
        "10.0 req/s · TTFT 50 ms · hit rate 40 % now, 30 % since start · in flight 2 · queued 5 · requests 30 · "
        "failed 1 (0.0/s)"
    )
    assert "– req/s · TTFT – · hit rate 30 % now, 30 % since start" in shown(moment(12.0, 30, 900), None)


def test_the_callers_whose_requests_wait_are_named_the_largest_first() -> None:
    waiting = (("flood", "a", 3), ("flood", "", 9), ("quiet", "", 2), ("", "b\n", 4), ("one", "", 1))
    queue = [scheduler_pb2.QueueShare(caller=name, fairness_id=fid, waiting=count) for name, fid, count in waiting]
    pools = [scheduler_pb2.PoolLoad(tenant="t", model="m", queued=19, queue=queue)]
    status = scheduler_pb2.SchedulerGetStatusResponse(pools=pools)
    service = Service("s:1", ServiceKind.SCHEDULER, serving=True, status=status)
    text = shown(Moment(1.0, Snapshot((service,)), {}), None)
    assert "queued 19 (flood 9, t/b\\n 4, flood/a 3, …)" in text


def test_a_worker_of_several_indexers_is_one_line_that_shows_trouble_first() -> None:
    def status(state: indexer_pb2.SourceState.ValueType) -> indexer_pb2.IndexerGetStatusResponse:
        source = indexer_pb2.SourceStatus(worker=types_pb2.WorkerRank(worker_id="w"), model="m", state=state)
        return indexer_pb2.IndexerGetStatusResponse(sources=[source])

    live, lost = indexer_pb2.SOURCE_STATE_LIVE, indexer_pb2.SOURCE_STATE_DISCONNECTED
    for states, expected in (((live, live), "live"), ((live, lost), "disconnected"), ((lost, live), "disconnected")):
        services = [
            Service(f"i:{number}", ServiceKind.INDEXER, serving=True, status=status(state))
            for number, state in enumerate(states)
        ]
        text = shown(Moment(1.0, Snapshot(tuple(services)), {}), None)
        assert text.count("w/0") == 1
        assert expected in text


def test_a_gateway_that_started_anew_meanwhile_has_no_rates_below_zero() -> None:
    assert "0.0 req/s · TTFT – · hit rate – now, 0 % since start" in shown(moment(12.0, 1, 0), moment(10.0, 10, 100))


def test_decisions_are_shown_with_their_worker_or_why_there_is_none() -> None:
    worker = types_pb2.WorkerRank(worker_id="w", dp_rank=1)
    made = scheduler_pb2.WatchDecisionsResponse(
        request=scheduler_pb2.RequestRef(request_id="r", model="m"),
        isl_tokens=64,
        decision=scheduler_pb2.SelectResponse(worker=worker, overlap_blocks=4, block_size=16, cost=1.25),
    )
    failed = scheduler_pb2.WatchDecisionsResponse(code=14, message="no worker\x1b[2J", isl_tokens=8)
    lines = shown(moment(1.0, 1, 0), None, made, failed).splitlines()
    assert lines[-2].split() == ["w/1", "████████", "100", "%", "64", "4", "1.2", "–", "r"]
    assert lines[-1].split() == ["no", "worker\\x1b[2J", "–", "8", "–", "–", "–", "query"]


LONG = "vllm-llama-3-8b-deployment-7d9f8b6c5d-x2x4z"


def fleet(*names: str) -> Moment:
    """Workers of two models with some load, of one indexer."""
    sources = [
        indexer_pb2.SourceStatus(
            worker=types_pb2.WorkerRank(worker_id=name),
            tenant="t",
            model=f"a/model-{number % 2}",
            state=indexer_pb2.SOURCE_STATE_LIVE,
            blocks=1_000 * number,
        )
        for number, name in enumerate(names)
    ]
    seen = [
        gateway_pb2.WorkerObservation(
            worker=source.worker, tenant="t", requests=10 * number, prompt_tokens=100, cached_tokens=number
        )
        for number, source in enumerate(sources)
    ]
    services = (
        Service("g:1", ServiceKind.GATEWAY, serving=True, status=gateway_pb2.GatewayGetStatusResponse(workers=seen)),
        Service("i:1", ServiceKind.INDEXER, serving=True, status=indexer_pb2.IndexerGetStatusResponse(sources=sources)),
    )
    load = scheduler_pb2.WorkerLoad(active_requests=12, active_prefill_tokens=20_000, total_kv_blocks=4_096)
    return Moment(1.0, Snapshot(services), {RankName("t", name, 0): load for name in names})


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_no_name_is_cut_for_another_column(width: int) -> None:
    names = [f"{LONG[: width - 20]}{number}" for number in range(3)]
    console = Console(file=io.StringIO(), width=width)
    decision = scheduler_pb2.WatchDecisionsResponse(
        request=scheduler_pb2.RequestRef(request_id="r" * 36, model="m"),
        decision=scheduler_pb2.SelectResponse(worker=types_pb2.WorkerRank(worker_id=names[0])),
    )
    console.print(frame(fleet(*names), None, [decision], width=width))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(cell_len, text.splitlines())) <= width
    assert all(f"{name}/0" in text for name in names)
    assert ("event age" in text) == (width == 200)


def test_a_frame_is_as_high_as_the_terminal_with_the_selected_worker_in_it() -> None:
    now = fleet(*(f"w{number:03}" for number in range(200)))
    chosen = RankName("t", "w150", 0)
    console = Console(file=io.StringIO(), width=80)
    console.print(frame(now, None, [], View(selected=chosen), width=80, height=24))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert len(text.splitlines()) <= 24
    assert "› w150/0" in text
    assert "200 workers by worker" in text


def test_workers_are_sorted_and_filtered_as_the_view_says() -> None:
    now = fleet("a", "b", "c")

    def names(view: View) -> list[str]:
        return [row.name.worker_id for row in shown_rows(now, None, view)]

    assert names(View()) == ["a", "b", "c"]
    assert names(View(sort="hit rate")) == ["c", "b", "a"]
    assert names(View(filter="MODEL-1")) == ["b"]
    assert names(View(filter="c/0")) == ["c"]


def test_a_worker_that_gets_no_requests_is_in_trouble_and_its_page_says_why() -> None:
    now = moment(1.0, 1, 0, problem="5 health checks failed in a row")
    services = [*now.snapshot.services, *fleet("w").snapshot.services[1:]]
    console = Console(file=io.StringIO(), width=80)
    now = Moment(1.0, Snapshot(tuple(services)), {})
    console.print(frame(now, None, [], View(selected=NAME, is_opened=True)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "state          left out: 5 health checks failed in a row" in text
    assert "1 in trouble: see kvscout doctor" in text


def test_a_decision_shows_its_cost_with_the_unit_that_the_scheduler_gives() -> None:
    made = scheduler_pb2.WatchDecisionsResponse(isl_tokens=64)
    made.decision.worker.worker_id = "w"
    made.decision.cost = 0.038
    candidate = made.decision.explanation.candidates.add(cost=0.038, cost_text="38 ms")
    candidate.worker.worker_id = "w"
    assert "38 ms" in shown(moment(1.0, 1, 0), None, made)
