"""A request for a worker as schedulers read it: a `Request` and the overlaps of its prompt → messages."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Final, TypeAlias

from kvscout.v1 import scheduler_pb2
from kvscout_common.observability import tracing
from kvscout_common.registry.worker_proto import role_to_proto
from kvscout_common.transport.wire_fields import bytes_field, number_field
from kvscout_gateway.upstreams.indexer.overlaps import message_of
from kvscout_gateway.values.booking import Booking
from kvscout_gateway.values.overlaps import Overlaps, Rows
from kvscout_gateway.values.request import Request

MOST: Final = 2**32 - 1
"""Largest number of a field: of milliseconds, fifty days; of microseconds, over an hour."""
_HasPrompt: TypeAlias = type[scheduler_pb2.SelectRequest | scheduler_pb2.SchedulerGetPotentialLoadsRequest]


def select_request(request: Request, overlaps: Overlaps, booking: Booking | None) -> bytes:
    """Serialise a `SelectRequest`.

    Args:
        request: The request, by the name of its base model.
        overlaps: Overlaps of its prompt.
        booking: Has the attempt that is made; None for a query.
    """
    kind, output, session = scheduler_pb2.SelectRequest, request.output, request.session
    # Empty fields are left out: each collection that a message takes over costs more than all plain fields.
    message = kind(
        model=request.model,
        tenant=request.tenant,
        role=role_to_proto(request.role),
        request_id=booking.request_id if booking is not None else "",
        attempt_id=booking.attempt_id if booking is not None else 0,
        isl_tokens=request.prompt.isl_tokens,
        allowed_worker_ids=request.allowed or None,
        pinned_worker_id=request.pinned,
        pinned_dp_rank=request.pinned_rank,
        excluded_worker_ids=request.excluded or None,
        required_labels=request.required_labels or None,
        lora_name=request.lora_name,
        router_config_override=request.override,
        priority=request.priority,
        fairness_id=request.fairness_id,
        caller=request.caller,
        expected_output_tokens=output.expected_tokens,
        max_output_tokens=output.max_tokens,
        output_class=output.output_class,
        estimate_prefill_complete=output.unseen,
        explain=request.explain,
        traceparent=tracing.traceparent(),
        lease_seconds=request.lease_seconds,
        prefill_elsewhere=request.remote_prefill,
        session=session.session_id,
        no_lineage=not session.by_lineage,
        overlaps_unknown=overlaps.unknown,
        parent_session=session.parent_id,
    )
    if request.deadline < inf:
        message.deadline_ms = min(max(1, int(request.seconds_left() * 1000)), MOST)
    if request.ttft_target_seconds < inf:
        message.ttft_target_us = min(max(1, int(request.ttft_target_seconds * 1e6)), MOST)
    if request.itl_target_seconds < inf:
        message.itl_target_us = min(max(1, int(request.itl_target_seconds * 1e6)), MOST)
    return message.SerializeToString() + _prompt_fields(kind, overlaps)


def loads_request(request: Request, overlaps: Overlaps) -> scheduler_pb2.SchedulerGetPotentialLoadsRequest:
    """Return the request for the load of each worker with a prompt added."""
    kind = scheduler_pb2.SchedulerGetPotentialLoadsRequest
    message = kind(
        model=request.model,
        tenant=request.tenant,
        role=role_to_proto(request.role),
        isl_tokens=request.prompt.isl_tokens,
    )
    message.MergeFromString(_prompt_fields(kind, overlaps))
    return message


def _prompt_fields(kind: _HasPrompt, overlaps: Overlaps) -> bytes:
    """Serialise the prompt, for each geometry of the model's workers."""
    fields: list[bytes] = []
    for pool, hashes in overlaps.hashes.items():
        rows = overlaps.rows.get(pool)
        if not fields:
            fields.append(number_field(kind.BLOCK_SIZE_FIELD_NUMBER, pool.block_size))
            fields += _pool_fields(kind, hashes, rows)
            continue
        other = scheduler_pb2.PoolPrompt(block_size=pool.block_size, eagle=pool.eagle).SerializeToString()
        other += b"".join(_pool_fields(scheduler_pb2.PoolPrompt, hashes, rows))
        fields.append(bytes_field(kind.OTHER_POOLS_FIELD_NUMBER, other))
    return b"".join(fields)


def _pool_fields(
    kind: _HasPrompt | type[scheduler_pb2.PoolPrompt], hashes: bytes, rows: Rows | None
) -> Iterator[bytes]:
    if hashes:
        yield bytes_field(kind.BLOCK_HASHES_FIELD_NUMBER, hashes)
    if rows is not None:
        yield bytes_field(kind.OVERLAPS_FIELD_NUMBER, message_of(rows).SerializeToString())
