"""Decisions of the scheduler in traces: see `kvscout_common.observability.tracing`."""

from __future__ import annotations

from kvscout_common.errors import KvscoutError
from kvscout_common.observability import tracing
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.request import SelectionRequest


def traced(rpc: str, traceparent: str) -> tracing.Span:
    """Return the span of an operation that is part of a trace; nothing of one that is not."""
    if not traceparent:
        return tracing.NOTHING
    return tracing.span(f"kvscout.v1.Scheduler/{rpc}", tracing.SpanKind.SERVER, parent=traceparent)


def record(span: tracing.Span, request: SelectionRequest, outcome: Decision | KvscoutError) -> None:
    """Record a decision, or its error, in a span."""
    if span is tracing.NOTHING:
        return
    span.record(
        tenant=request.tenant,
        model=request.model,
        role=request.role.value,
        request_id=request.request_id,
        isl_tokens=request.isl_tokens,
    )
    if isinstance(outcome, KvscoutError):
        span.failed(outcome)
        return
    span.record(
        worker=outcome.rank.worker_id,
        dp_rank=outcome.rank.dp_rank,
        policy=outcome.policy,
        overlap_blocks=outcome.overlap_blocks,
        uncached_tokens=outcome.uncached_tokens,
        cost=outcome.cost,
    )
    if outcome.session:
        span.record(session=f"{outcome.session:016x}")
