"""A snapshot as rows, from values alone."""

from __future__ import annotations

from kvscout.v1 import gateway_pb2, indexer_pb2, types_pb2, workers_pb2
from kvscout_common.doctor.overview import Seen, overview
from kvscout_common.doctor.snapshot import Service, ServiceKind, Snapshot
from kvscout_common.enum_words import value_of

INFO = types_pb2.ServiceInfo(version="1", uptime_seconds=60.0)


def gateway(*helpers: gateway_pb2.HelperStatus, dp_size: int = 1) -> Service:
    entry = workers_pb2.WorkerEntry(
        worker=workers_pb2.Worker(worker_id="w", tenant="t", model="m", block_size=16, dp_size=dp_size)
    )
    status = gateway_pb2.GatewayGetStatusResponse(service=INFO, helpers=helpers)
    return Service("g:1", ServiceKind.GATEWAY, serving=True, status=status, workers=(entry,))


def helper(kind: str, *, healthy: bool) -> gateway_pb2.HelperStatus:
    number = value_of(gateway_pb2.HelperKind, kind)
    return gateway_pb2.HelperStatus(kind=number, address="h:1", healthy=healthy, last_error="" if healthy else "late")


def test_a_service_that_only_its_gateway_reaches_is_well_and_said_to_be_out_of_reach() -> None:
    unreached = Service("h:1", ServiceKind.SCHEDULER, error="failed to connect")
    _, row = overview(Snapshot((gateway(helper("scheduler", healthy=True)), unreached))).services
    assert (row.state, row.well) == ("ok, says the gateway; from here: failed to connect", True)
    _, row = overview(Snapshot((gateway(helper("scheduler", healthy=False)), unreached))).services
    assert (row.state, row.well) == ("failed to connect", False)


def test_a_service_that_answers_here_and_not_to_its_gateway_is_not_well() -> None:
    status = indexer_pb2.IndexerGetStatusResponse(service=INFO)
    indexer = Service("h:1", ServiceKind.INDEXER, serving=True, status=status)
    _, row = overview(Snapshot((gateway(helper("indexer", healthy=False)), indexer))).services
    assert (row.state, row.well) == ("its gateway: late", False)


def test_a_service_that_drains_or_is_not_ready_is_not_well() -> None:
    draining = types_pb2.ServiceInfo(draining=True)
    for info, serving, state in ((draining, True, "draining"), (INFO, False, "not serving")):
        status = indexer_pb2.IndexerGetStatusResponse(service=info)
        [row] = overview(Snapshot((Service("h:1", ServiceKind.INDEXER, serving=serving, status=status),))).services
        assert (row.state, row.well) == (state, False)


def test_a_worker_that_no_indexer_told_of_and_one_where_there_is_no_indexer_are_told_apart() -> None:
    [row] = overview(Snapshot((gateway(),))).sources
    assert (row.state, row.reason, row.well) == ("unknown", "there is no indexer", True)
    [row] = overview(Snapshot((gateway(), Service("h:1", ServiceKind.INDEXER, error="no answer")))).sources
    assert (row.state, row.reason, row.well) == ("unknown", "no indexer reported it", False)


def test_of_a_worker_that_claims_a_million_ranks_no_more_rows_are_made_than_a_worker_can_have() -> None:
    assert len(overview(Snapshot((gateway(dp_size=1_000_000),))).sources) == 1024


def test_the_prediction_error_is_a_share_of_what_was_predicted_and_reported() -> None:
    assert Seen().prediction_error is None
    assert Seen(checked=1).prediction_error == 0
    assert Seen(checked=2, predicted_tokens=64, cached_tokens=64, error_tokens=32).prediction_error == 0.25
    assert Seen(checked=1, predicted_tokens=64, error_tokens=64).prediction_error == 1


def test_a_state_of_a_newer_release_has_a_row() -> None:
    source = indexer_pb2.SourceStatus(worker=types_pb2.WorkerRank(worker_id="w"), tenant="t")
    source.state = 77  # type: ignore[assignment]
    status = indexer_pb2.IndexerGetStatusResponse(service=INFO, sources=[source])
    [row] = overview(Snapshot((Service("h:1", ServiceKind.INDEXER, serving=True, status=status),))).sources
    assert row.state == "state 77"
