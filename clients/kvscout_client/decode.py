"""Protobuf answers → results."""

from __future__ import annotations

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_client.results import (
    ActiveRequest,
    BusyThresholds,
    Candidate,
    Explanation,
    Failure,
    FaultOwner,
    FinishReason,
    FreeOutcome,
    GenerateChunk,
    HelperState,
    Pull,
    RequestPhase,
    RouteDecision,
    RouterStatus,
    TokenLogprobs,
    Usage,
    WorkerHealth,
    WorkerLoad,
    WorkerObservation,
    WorkerRecord,
)
from kvscout_common.enum_words import word_of
from kvscout_common.registry.worker_proto import rank_from_proto, role_from_proto, spec_from_proto
from kvscout_common.worker import WorkerRank

_FINISH_REASONS = {
    gateway_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    gateway_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    gateway_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    gateway_pb2.FINISH_REASON_OTHER: FinishReason.OTHER,
}

_FREE_OUTCOMES = {
    scheduler_pb2.FREE_OUTCOME_FREED: FreeOutcome.FREED,
    scheduler_pb2.FREE_OUTCOME_ALREADY_FREED: FreeOutcome.ALREADY_FREED,
    scheduler_pb2.FREE_OUTCOME_DEQUEUED: FreeOutcome.DEQUEUED,
}

_PHASES = {
    scheduler_pb2.REQUEST_PHASE_QUEUED: RequestPhase.QUEUED,
    scheduler_pb2.REQUEST_PHASE_PREFILL: RequestPhase.PREFILL,
    scheduler_pb2.REQUEST_PHASE_DECODE: RequestPhase.DECODE,
}


def failure(message: gateway_pb2.Failure) -> Failure:
    """Return a request that failed."""
    owner = word_of(gateway_pb2.FaultOwner, message.owner)
    return Failure(
        number=message.number,
        at_unix_seconds=message.at_unix_seconds,
        request_id=message.request_id,
        tenant=message.tenant,
        model=message.model,
        front=message.front,
        status=message.status,
        cause=message.cause,
        owner=FaultOwner(owner) if owner else None,
        answered=message.answered,
        worker_ids=tuple(message.worker_ids),
        message=message.message,
        trace_id=message.trace_id,
    )


def active_request(message: scheduler_pb2.ActiveRequest) -> ActiveRequest:
    """Return a request that is booked."""
    return ActiveRequest(
        request_id=message.request.request_id,
        attempt_id=message.request.attempt_id,
        model=message.request.model,
        role=role_from_proto(message.request.role),
        worker=rank_from_proto(message.worker),
        phase=_PHASES.get(message.phase),
        blocks=message.blocks,
        output_blocks=message.output_blocks,
        uncached_tokens=message.uncached_tokens,
        age_seconds=message.age_seconds,
        phase_estimated=message.phase_estimated,
        session=message.session,
    )


def decision(message: gateway_pb2.RouteResponse, *, requested: bool) -> RouteDecision:
    """Return a routing decision.

    Args:
        message: The answer.
        requested: A booking was requested; a gateway that does not report it has made it.
    """
    return RouteDecision(
        worker=_rank(message.worker),
        http_endpoint=message.http_endpoint,
        overlap_blocks=message.overlap_blocks,
        effective_overlap_blocks=message.effective_overlap_blocks,
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        cost=message.cost,
        degraded=message.degraded,
        degraded_reasons=tuple(message.degraded_reasons),
        explanation=_explanation(message.explanation) if message.HasField("explanation") else None,
        confirmed_overlap_blocks=message.confirmed_overlap_blocks,
        booked=message.booked if message.HasField("booked") else requested,
        pull=_pull(message.pull) if message.HasField("pull") else None,
    )


def _pull(message: gateway_pb2.Pull) -> Pull:
    return Pull(
        source=_rank(message.source),
        address=message.address,
        blocks=message.blocks,
        seconds=message.seconds,
        compute_seconds=message.compute_seconds,
    )


def _explanation(message: scheduler_pb2.Explanation) -> Explanation:
    return Explanation(
        policy=message.policy,
        overlap_score_weight=message.overlap_score_weight,
        router_temperature=message.router_temperature,
        reason=message.reason,
        candidates=tuple(
            Candidate(
                worker=_rank(c.worker),
                eligible=c.eligible,
                ineligible_reason=word_of(scheduler_pb2.IneligibleReason, c.ineligible_reason),
                device_blocks=c.device_blocks,
                host_blocks=c.host_blocks,
                disk_blocks=c.disk_blocks,
                external_blocks=c.external_blocks,
                prefill_blocks=c.prefill_blocks,
                decode_blocks=c.decode_blocks,
                cost=c.cost,
                probability=c.probability,
                cached_tokens=c.cached_tokens,
                cost_text=c.cost_text,
            )
            for c in message.candidates
        ),
        summary=message.summary,
    )


def chunk(message: gateway_pb2.GenerateResponse) -> GenerateChunk:
    """Return a chunk of output."""
    return GenerateChunk(
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        engine_finish_reason=message.engine_finish_reason,
        decision=decision(message.route, requested=True) if message.HasField("route") else None,
        usage=_usage(message.usage) if message.HasField("usage") else None,
        request_id=message.request_id,
        logprobs=tuple(
            TokenLogprobs(place.logprob, dict(zip(place.top_token_ids, place.top_logprobs, strict=True)))
            for place in message.logprobs
        ),
    )


def _usage(message: gateway_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens if message.HasField("cached_tokens") else None,
    )


def free_outcome(message: scheduler_pb2.FreeResponse) -> FreeOutcome:
    """Return the outcome of a free."""
    return _FREE_OUTCOMES.get(message.outcome, FreeOutcome.UNKNOWN)


def load(message: scheduler_pb2.WorkerLoad) -> WorkerLoad:
    """Return the load of one rank."""
    return WorkerLoad(
        worker=_rank(message.worker),
        potential_prefill_tokens=message.potential_prefill_tokens,
        potential_decode_blocks=message.potential_decode_blocks,
        active_requests=message.active_requests,
        active_prefill_tokens=message.active_prefill_tokens,
        active_decode_blocks=message.active_decode_blocks,
        busy=message.busy,
        cooldown_seconds=message.cooldown_seconds,
        draining=message.draining,
        total_kv_blocks=message.total_kv_blocks,
        health=_health(message.health),
    )


def worker_record(message: workers_pb2.WorkerEntry) -> WorkerRecord:
    """Return a registered worker."""
    return WorkerRecord(
        spec=spec_from_proto(message.worker),
        source=word_of(workers_pb2.RegistrationSource, message.source),
        lease_remaining_seconds=(
            message.lease_remaining_seconds if message.HasField("lease_remaining_seconds") else None
        ),
        health=_health(message.health),
    )


def _health(message: types_pb2.WorkerHealth) -> WorkerHealth:
    return WorkerHealth(
        state=word_of(types_pb2.WorkerState, message.state),
        cause=message.cause,
        age_seconds=message.age_seconds if message.HasField("age_seconds") else None,
    )


def thresholds(message: types_pb2.BusyThresholds) -> BusyThresholds:
    """Return the thresholds of a model."""
    return BusyThresholds(
        model=message.model,
        tenant=message.tenant,
        active_decode_blocks_threshold=(
            message.active_decode_blocks_threshold if message.HasField("active_decode_blocks_threshold") else None
        ),
        active_prefill_tokens_threshold=(
            message.active_prefill_tokens_threshold if message.HasField("active_prefill_tokens_threshold") else None
        ),
    )


def status(message: gateway_pb2.GatewayGetStatusResponse) -> RouterStatus:
    """Return the state of a gateway."""
    service = message.service
    return RouterStatus(
        version=service.version,
        uptime_seconds=service.uptime_seconds,
        backend=word_of(types_pb2.Backend, service.backend),
        transport=word_of(types_pb2.RpcTransport, service.transport),
        draining=service.draining,
        warnings=tuple(service.warnings),
        helpers=tuple(
            HelperState(
                kind=word_of(gateway_pb2.HelperKind, h.kind),
                address=h.address,
                healthy=h.healthy,
                last_error=h.last_error,
                calls=h.calls,
                failures=h.failures,
                pending_registrations=h.pending_registrations,
            )
            for h in message.helpers
        ),
        workers=tuple(
            WorkerObservation(
                worker=_rank(w.worker),
                requests=w.requests,
                failures=w.failures,
                prompt_tokens=w.prompt_tokens,
                cached_tokens=w.cached_tokens,
                checked=w.checked,
                mispredicted=w.mispredicted,
                prediction_error_tokens=w.prediction_error_tokens,
                predicted_cached_tokens=w.predicted_cached_tokens,
                unreported=w.unreported,
                problem=w.problem,
                health_check_problem=w.health_check_problem,
            )
            for w in message.workers
        ),
        in_flight=message.in_flight,
        requests=message.requests,
        failures=message.failures,
        degraded=dict(message.degraded),
    )


def _rank(message: types_pb2.WorkerRank) -> WorkerRank:
    return WorkerRank(message.worker_id, message.dp_rank)
