"""Operations and their outcomes as protobuf messages: of streams, of unary calls, and between replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import InvalidArgument, KvscoutError
from kvscout_common.transport.statuses import from_status, status_code
from kvscout_scheduler.messages import translate
from kvscout_scheduler.values.operations import (
    AddOutput,
    CompletePrefill,
    Free,
    Operation,
    Outcome,
    Renew,
    Reserve,
    Select,
)
from kvscout_scheduler.values.reservation import MICROSECONDS, FreeOutcome


def operation_from_proto(
    kind: str, message: Any, tenant: str = "", *, output_tokens: int = 0, age_us: int = 0
) -> Operation:
    """Return an operation, of a stream or of a unary call.

    Args:
        kind: Its field in `LifecycleOperation`.
        message: What is in the field, or the request of the call.
        tenant: If it names none; "" = the default one.
        output_tokens: Of a request that is over.
        age_us: Microseconds since a prefill or a request was over.

    Raises:
        InvalidArgument: It cannot be read.
    """
    match kind:
        case "select" | "select_and_reserve":
            request = translate.selection_from_proto(message, tenant)
            return Select(request, kind != "select", message.lease_seconds, message.traceparent)
        case "reserve":
            return Reserve(translate.reserve_from_proto(message, tenant), message.lease_seconds)
        case "renew":
            if not message.requests:
                raise InvalidArgument("names no request", field="requests")
            tenant = message.tenant or tenant
            attempts = tuple((translate.key_from_proto(each, tenant), each.attempt_id) for each in message.requests)
            return Renew(attempts, message.lease_seconds)
    key = translate.key_from_proto(message, tenant)
    match kind:
        case "prefill_complete":
            return CompletePrefill(key, message.attempt_id, age_us / MICROSECONDS)
        case "add_output":
            return AddOutput(key, message.attempt_id, message.blocks)
        case "free":
            return Free(key, message.attempt_id, output_tokens, age_us / MICROSECONDS)
    raise TypeError(f"{kind} is not an operation")


def streamed_from_proto(message: scheduler_pb2.LifecycleOperation, tenant: str = "") -> Operation:
    """Return an operation of a stream; see `operation_from_proto`."""
    kind = message.WhichOneof("operation")
    if kind is None:
        raise InvalidArgument("names none", field="operation")
    return operation_from_proto(
        kind, getattr(message, kind), tenant, output_tokens=message.output_tokens, age_us=message.age_us
    )


_ANSWERS: Final[Mapping[type, tuple[str, Callable[[Any], Any]]]] = {
    Select: ("select", translate.decision_to_proto),
    Reserve: ("reserve", lambda tokens: scheduler_pb2.ReserveResponse(uncached_tokens=tokens)),
    CompletePrefill: (
        "prefill_complete",
        lambda changed: scheduler_pb2.MarkPrefillCompleteResponse(changed=changed),
    ),
    AddOutput: ("add_output", lambda blocks: scheduler_pb2.AddOutputResponse(output_blocks=blocks)),
    Free: ("free", lambda outcome: scheduler_pb2.FreeResponse(outcome=translate.OUTCOMES[outcome])),
    Renew: ("renew", lambda unknown: scheduler_pb2.RenewResponse(unknown=unknown)),
}
"""The field of a result, and the message in it, by the operation's type."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


def answer_to_proto(operation: Operation, outcome: Outcome) -> Any:
    """Return the message that answers a unary call."""
    return _ANSWERS[type(operation)][1](outcome)


def result_to_proto(operation: Operation | KvscoutError, outcome: Outcome) -> scheduler_pb2.LifecycleResult:
    """Return the result of an operation, without its number."""
    if isinstance(outcome, KvscoutError):
        code = status_code(outcome).value[0]
        return scheduler_pb2.LifecycleResult(
            code=code,
            message=str(outcome),
            retry_after_seconds=outcome.retry_after_seconds,
            cause=outcome.cause,
        )
    field, answer = _ANSWERS[type(operation)]
    return scheduler_pb2.LifecycleResult(**{field: answer(outcome)})


def operation_to_proto(operation: Operation) -> scheduler_pb2.LifecycleOperation:
    """Return an operation on bookings that are there already, for another replica."""
    match operation:
        case CompletePrefill(key, attempt_id, age_seconds):
            ref, age_us = translate.key_to_proto(key, attempt_id), int(age_seconds * MICROSECONDS)
            return scheduler_pb2.LifecycleOperation(prefill_complete=ref, age_us=age_us)
        case Free(key, attempt_id, output_tokens, age_seconds):
            ref, age_us = translate.key_to_proto(key, attempt_id), int(age_seconds * MICROSECONDS)
            return scheduler_pb2.LifecycleOperation(free=ref, output_tokens=output_tokens, age_us=age_us)
        case AddOutput(key, attempt_id, blocks):
            name = translate.key_to_proto(key, attempt_id).SerializeToString()
            # The fields that name a request are the same ones.
            output = scheduler_pb2.AddOutputRequest.FromString(name)
            output.blocks = blocks
            return scheduler_pb2.LifecycleOperation(add_output=output)
        case Renew(attempts, lease_seconds):
            refs = [translate.key_to_proto(*attempt) for attempt in attempts]
            renew = scheduler_pb2.RenewRequest(requests=refs, lease_seconds=int(lease_seconds))
            return scheduler_pb2.LifecycleOperation(renew=renew)
    raise TypeError(f"{type(operation).__name__} is carried out where it comes")


def outcome_from_proto(operation: Operation, result: scheduler_pb2.LifecycleResult) -> Outcome:
    """Return the outcome of such an operation at another replica."""
    if result.code:
        soon = result.retry_after_seconds if result.HasField("retry_after_seconds") else None
        return from_status(_CODES[result.code], result.message, retry_after_seconds=soon, cause=result.cause)
    match operation:
        case CompletePrefill():
            return result.prefill_complete.changed
        case AddOutput():
            return result.add_output.output_blocks
        case Free():
            # One that is not known here did nothing.
            known = {number: outcome for outcome, number in translate.OUTCOMES.items()}
            return known.get(result.free.outcome, FreeOutcome.UNKNOWN)
        case _:
            return list(result.renew.unknown)
