"""Bad requests are refused with the name of the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.scheduler_builders import key, request, scheduler, worker

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import ConfigError, FailedPrecondition, InvalidArgument
from kvscout_common.worker import WorkerRank
from kvscout_scheduler.estimates.engine_metrics import EngineMetrics
from kvscout_scheduler.messages.operation_messages import operation_from_proto
from kvscout_scheduler.rpc.listing import potential_loads
from kvscout_scheduler.values.overlaps import Overlaps, TierWeights
from kvscout_scheduler.values.request import ConfigOverride, Prompt, pack_hashes
from kvscout_scheduler.values.reservation import Reservation
from kvscout_scheduler.values.settings import SchedulerSettings


def test_hashes_are_packed_little_endian() -> None:
    assert pack_hashes([1, 2**64 - 1]) == b"\x01" + b"\x00" * 7 + b"\xff" * 8
    with pytest.raises(InvalidArgument, match="block_hashes"):
        pack_hashes([-1])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": ""}, "model"),
        ({"isl_tokens": 0}, "isl_tokens"),
        ({"pinned_dp_rank": 0}, "pinned_dp_rank"),
        ({"pinned_worker_id": "w1", "allowed_worker_ids": frozenset({"w0"})}, "pinned_worker_id"),
        ({"pinned_worker_id": "w0", "excluded_worker_ids": frozenset({"w0"})}, "pinned_worker_id"),
        ({"override": ConfigOverride(router_temperature=-0.1)}, "router_temperature"),
        ({"override": ConfigOverride(router_temperature=math.nan)}, "router_temperature"),
        ({"override": ConfigOverride(router_temperature=math.inf)}, "router_temperature"),
        ({"override": ConfigOverride(overlap_score_weight=-1.0)}, "overlap_score_weight"),
        ({"override": ConfigOverride(policy="best")}, "policy"),
        ({"prompt": Prompt(b"1234567")}, "block_hashes"),
        ({"prompt": Prompt(pack_hashes([1, 2, 3]))}, "block_hashes"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        scheduler("w0", "w1").select(request([1, 2], isl=40, **{"isl_tokens": 40, **fields}))
    assert error.value.field == field


@pytest.mark.parametrize(
    ("overlaps", "field"),
    [
        (Overlaps(("w0",), (), ()), "overlaps.device_blocks"),
        (Overlaps(("w0",), (), (-1,)), "overlaps.device_blocks"),
        (Overlaps(("w0",), (), (3,)), "overlaps.device_blocks"),
        (Overlaps(("w0",), (0, 1), (1,)), "overlaps.dp_ranks"),
        (Overlaps(("w0",), (), (2,), (1,)), "overlaps.host_blocks"),
        (Overlaps(("w0",), (), (1,), (1, 1)), "overlaps.host_blocks"),
        (Overlaps(("w0",), (), (1,), (2,), (1,)), "overlaps.disk_blocks"),
        (Overlaps(("w0",), (), (1,), (), (), (9,)), "overlaps.external_blocks"),
        (Overlaps(("w0",), (), (1,), predicted_blocks=(0,)), "overlaps.predicted_blocks"),
    ],
)
def test_columns_that_do_not_fit_are_named(overlaps: Overlaps, field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        scheduler("w0").select(request([1, 2], on=overlaps))
    assert error.value.field == field


def test_fewer_hashes_than_the_prompt_has_blocks_are_allowed() -> None:
    made = scheduler("w0")
    made.select_and_reserve(request([1], isl=100, request_id="r"))
    assert potential_loads(made, key("r").pool)[0].active_decode_blocks == 7


def test_hashes_for_another_block_size_are_a_failed_precondition() -> None:
    with pytest.raises(FailedPrecondition, match=r"\[64\].*\[16\]"):
        scheduler("w0").select(request(isl=64, prompt=Prompt(pack_hashes([1]), block_size=64)))


def test_workers_of_several_block_sizes_want_the_block_size_named() -> None:
    made = scheduler("w0", worker("w1", block_size=64))
    with pytest.raises(InvalidArgument) as error:
        made.select(request([1]))
    assert error.value.field == "block_size"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"rank": WorkerRank("", 0)}, "worker"),
        ({"key": key("")}, "request_id"),
        ({"isl_tokens": 0}, "isl_tokens"),
        ({"uncached_tokens": -1}, "cached_tokens"),
        ({"uncached_tokens": 33}, "cached_tokens"),
        ({"block_hashes": pack_hashes([1, 2, 3])}, "block_hashes"),
    ],
)
def test_a_bad_field_of_a_reservation_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        scheduler("w0").reserve(
            Reservation(**{"key": key("r"), "attempt_id": 0, "rank": WorkerRank("w0", 0), "isl_tokens": 32, **fields})
        )
    assert error.value.field == field


def test_lifecycle_calls_without_a_request_id_are_refused() -> None:
    made, unnamed = scheduler("w0"), scheduler_pb2.RequestRef(model="m")
    for kind in ("free", "prefill_complete", "add_output"):
        with pytest.raises(InvalidArgument, match="request_id"):
            operation_from_proto(kind, unnamed)
    with pytest.raises(InvalidArgument, match="request_id"):
        operation_from_proto("renew", scheduler_pb2.RenewRequest(requests=[unnamed]))
    with pytest.raises(InvalidArgument, match="request_id"):
        made.select_and_reserve(request([1]))
    with pytest.raises(InvalidArgument, match="lease_seconds"):
        made.select_and_reserve(request([1], request_id="r"), lease_seconds=1e9)


@pytest.mark.parametrize("usage", [-0.1, 1.1, math.nan])
def test_engine_metrics_out_of_range_are_refused(usage: float) -> None:
    with pytest.raises(InvalidArgument, match="kv_cache_usage"):
        scheduler("w0").report_metrics("default", WorkerRank("w0", 0), EngineMetrics(usage))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"overlap_score_weight": -1.0}, "overlap_score_weight"),
        ({"router_temperature": math.nan}, "router_temperature"),
        ({"lease_seconds": 0.0}, "lease_seconds"),
        ({"tier_weights": TierWeights(host=1.5)}, "host_weight"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        SchedulerSettings(**settings).validate()
    assert error.value.field == field


def test_an_unknown_policy_in_the_settings_is_refused_at_start() -> None:
    with pytest.raises(InvalidArgument, match=r"known are .*kv.*least-loaded.*round-robin"):
        scheduler("w0", policy="best")
