"""Scheduler messages ↔ the core's plain values. Pure."""

from __future__ import annotations

from dataclasses import fields
from math import inf
from typing import Any, Final

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.enum_words import value_of
from kvscout_common.errors import InvalidArgument
from kvscout_common.registry.worker_proto import rank_from_proto, rank_to_proto, role_from_proto, role_to_proto
from kvscout_common.rpc.request_names import NamesRequest
from kvscout_common.worker import DEFAULT_TENANT
from kvscout_scheduler.values.decision import Decision, Explanation
from kvscout_scheduler.values.overlaps import NO_OVERLAPS, CommonOverlap, Overlaps
from kvscout_scheduler.values.request import (
    NO_OVERRIDE,
    ConfigOverride,
    Prompt,
    SelectionRequest,
    WorkerConstraints,
    pack_hashes,
)
from kvscout_scheduler.values.reservation import MICROSECONDS, FreeOutcome, PoolId, RequestKey, Reservation
from kvscout_scheduler.values.targets import NO_TARGETS, Targets
from kvscout_scheduler.values.thresholds import BusyThresholds

OUTCOMES: Final[dict[FreeOutcome, scheduler_pb2.FreeOutcome.ValueType]] = {
    each: value_of(scheduler_pb2.FreeOutcome, each) for each in FreeOutcome
}

_COLUMNS: Final = tuple(column.name for column in fields(Overlaps) if column.name != "others")


def same_fields(record: Any, *but: str) -> dict[str, Any]:
    """Return the fields of a record that its message has under the same names.

    Args:
        record: A NamedTuple.
        but: Those that the message has in another form.
    """
    return {name: value for name, value in record._asdict().items() if name not in but}


def given_fields(message: Any, *names: str) -> dict[str, Any]:
    """Return the fields of a message that are set, of some optional ones."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def overlaps_from_proto(message: types_pb2.Overlaps) -> Overlaps:
    """Return the columns of FindMatches; they are checked against the prompt later."""
    others = None
    if message.HasField("others"):
        others = CommonOverlap(*(getattr(message.others, f"{level}_blocks") for level in CommonOverlap._fields))
    elif not message.worker_ids:
        return NO_OVERLAPS
    return Overlaps(**{name: list(getattr(message, name)) for name in _COLUMNS}, others=others)


def prompt_from_proto(message: scheduler_pb2.SelectRequest | scheduler_pb2.SchedulerGetPotentialLoadsRequest) -> Prompt:
    """Return the hashes and overlaps that a message has of its own."""
    return Prompt(
        block_hashes=pack_hashes(message.block_hashes),
        block_size=message.block_size,
        overlaps=overlaps_from_proto(message.overlaps),
    )


def other_prompts_from_proto(
    message: scheduler_pb2.SelectRequest | scheduler_pb2.SchedulerGetPotentialLoadsRequest,
) -> tuple[Prompt, ...]:
    """Return those that it has for workers of other block sizes."""
    return tuple(
        Prompt(pack_hashes(p.block_hashes), p.block_size, p.eagle, overlaps_from_proto(p.overlaps))
        for p in message.other_pools
    )


def selection_from_proto(message: scheduler_pb2.SelectRequest, outer_tenant: str = "") -> SelectionRequest:
    """Return a request that wants a worker; an unset tenant is that of the message around it.

    Raises:
        InvalidArgument: If a field cannot be read; the core checks the rest.
    """
    override = NO_OVERRIDE
    if message.HasField("router_config_override"):
        override = override_from_proto(message.router_config_override)
    return SelectionRequest(
        model=message.model,
        isl_tokens=message.isl_tokens,
        prompt=prompt_from_proto(message),
        other_prompts=other_prompts_from_proto(message),
        tenant=message.tenant or outer_tenant or DEFAULT_TENANT,
        role=role_from_proto(message.role),
        request_id=message.request_id,
        attempt_id=message.attempt_id,
        constraints=WorkerConstraints(
            message.pinned_worker_id,
            message.pinned_dp_rank if message.HasField("pinned_dp_rank") else None,
            frozenset(message.allowed_worker_ids),
            frozenset(message.excluded_worker_ids),
            frozenset(message.required_labels.items()),
            message.lora_name,
        ),
        override=override,
        priority=message.priority,
        caller=message.caller,
        fairness_id=message.fairness_id,
        deadline_seconds=deadline_of(message.deadline_ms),
        targets=targets_of(message.ttft_target_us, message.itl_target_us),
        expected_output_tokens=message.expected_output_tokens,
        max_output_tokens=message.max_output_tokens,
        output_class=message.output_class,
        estimates_prefill=message.estimate_prefill_complete,
        charge_prefill=not message.prefill_elsewhere,
        explain=message.explain,
        session=message.session,
        by_lineage=not message.no_lineage,
        overlaps_unknown=message.overlaps_unknown,
        parent_session=message.parent_session,
    )


def deadline_of(milliseconds: int) -> float:
    """Return the seconds that a message leaves a request; 0 = it has no deadline."""
    return milliseconds / 1000 if milliseconds else inf


def targets_of(ttft_us: int, itl_us: int) -> Targets:
    """Return the targets that a message has, in microseconds; 0 = none."""
    if not (ttft_us or itl_us):
        return NO_TARGETS
    return Targets(ttft_us / MICROSECONDS if ttft_us else inf, itl_us / MICROSECONDS if itl_us else inf)


def override_from_proto(message: types_pb2.RouterConfigOverride) -> ConfigOverride:
    """Return settings that a request changes."""
    names = ("overlap_score_weight", "router_temperature", "policy", "seed")
    return ConfigOverride(**given_fields(message, *names))


def explanation_to_proto(explanation: Explanation) -> scheduler_pb2.Explanation:
    """Return why a worker was picked."""
    candidates = [
        scheduler_pb2.Candidate(
            worker=rank_to_proto(each.rank),
            ineligible_reason=value_of(scheduler_pb2.IneligibleReason, each.ineligible_reason),
            **same_fields(each, "rank", "ineligible_reason"),
        )
        for each in explanation.candidates
    ]
    return scheduler_pb2.Explanation(candidates=candidates, **same_fields(explanation, "candidates"))


def decision_to_proto(decision: Decision) -> scheduler_pb2.SelectResponse:
    """Return the worker that was picked."""
    return scheduler_pb2.SelectResponse(
        worker=rank_to_proto(decision.rank),
        http_endpoint=decision.spec.http_endpoint,
        overlap_blocks=decision.overlap_blocks,
        effective_overlap_blocks=decision.effective_overlap_blocks,
        cost=decision.cost,
        uncached_tokens=decision.uncached_tokens,
        explanation=None if decision.explanation is None else explanation_to_proto(decision.explanation),
        block_size=decision.spec.block_size,
        session=decision.session,
        policy_problem=decision.policy_problem,
        saved_seconds=decision.saved_seconds,
    )


def reserve_from_proto(message: scheduler_pb2.ReserveRequest, outer_tenant: str = "") -> Reservation:
    """Return a request to be booked on a given worker; an unset tenant is that of the message around it.

    Raises:
        InvalidArgument: If it names no worker, or a hash is out of range.
    """
    return Reservation(
        key=RequestKey(
            message.tenant or outer_tenant or DEFAULT_TENANT,
            message.model,
            role_from_proto(message.role),
            message.request_id,
        ),
        rank=rank_from_proto(message.worker),
        isl_tokens=message.isl_tokens,
        block_hashes=pack_hashes(message.block_hashes),
        attempt_id=message.attempt_id,
        uncached_tokens=message.isl_tokens - message.cached_tokens,
        expected_output_tokens=message.expected_output_tokens,
        max_output_tokens=message.max_output_tokens,
        output_class=message.output_class,
        estimates_prefill=message.estimate_prefill_complete,
        running=message.running or message.prefill_complete,
        prefilled=message.prefill_complete,
        session=message.session,
    )


def key_from_proto(message: NamesRequest, outer_tenant: str = "") -> RequestKey:
    """Return the name of a booking; an unset tenant is that of the message around it.

    Raises:
        InvalidArgument: If it names no request or no model.
    """
    if not message.request_id:
        raise InvalidArgument("must not be empty", field="request_id")
    if not message.model:
        raise InvalidArgument("must not be empty", field="model")
    tenant = message.tenant or outer_tenant or DEFAULT_TENANT
    return RequestKey(tenant, message.model, role_from_proto(message.role), message.request_id)


def key_to_proto(key: RequestKey, attempt_id: int) -> scheduler_pb2.RequestRef:
    """Return the name of a booking."""
    return scheduler_pb2.RequestRef(
        model=key.model,
        tenant=key.tenant,
        role=role_to_proto(key.role),
        request_id=key.request_id,
        attempt_id=attempt_id,
    )


def thresholds_to_proto(tenant: str, model: str, thresholds: BusyThresholds) -> types_pb2.BusyThresholds:
    """Return the thresholds of a model."""
    return types_pb2.BusyThresholds(
        model=model,
        tenant=tenant,
        active_decode_blocks_threshold=thresholds.active_decode_blocks_threshold,
        active_prefill_tokens_threshold=thresholds.active_prefill_tokens_threshold,
    )


def pool_from_request(
    message: scheduler_pb2.SchedulerGetPotentialLoadsRequest | scheduler_pb2.WatchLoadsRequest,
) -> PoolId:
    """Return the pool whose loads are requested."""
    return PoolId(message.tenant or DEFAULT_TENANT, message.model, role_from_proto(message.role))
