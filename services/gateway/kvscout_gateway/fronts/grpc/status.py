"""Status of a gateway and observations of its workers, for GetStatus."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import TYPE_CHECKING

from kvscout.v1 import gateway_pb2
from kvscout_common.observability.recent_counts import RECENT_SECONDS
from kvscout_common.registry.worker_proto import rank_to_proto
from kvscout_common.worker import ALL_TENANTS, WorkerRank
from kvscout_gateway.engines.judge import health_to_proto
from kvscout_gateway.engines.observation import Observation
from kvscout_gateway.engines.worker_state import WorkerState
from kvscout_gateway.fronts.grpc.failures import failure_counts
from kvscout_gateway.fronts.shadow.report import Hour, Span, Sums

if TYPE_CHECKING:
    from kvscout_gateway.gateway import Gateway

_NOTHING = Observation()


def gateway_status(gateway: Gateway, tenant: str, model: str) -> gateway_pb2.GatewayGetStatusResponse:
    """Return the state of a gateway and of what it depends on.

    Args:
        gateway: The gateway.
        tenant: Tenant of the workers; "*" = all.
        model: Model of the workers; "" = all.
    """
    return gateway_pb2.GatewayGetStatusResponse(
        service=gateway.info(),
        helpers=gateway.upstream_statuses(),
        workers=_observations(gateway, tenant, model),
        in_flight=gateway.exchanges.in_flight,
        requests=gateway.exchanges.requests,
        failures=gateway.exchanges.failures,
        degraded=gateway.metrics.degraded_counts,
        token_differences=[
            gateway_pb2.TokenDifference(model=of.model, tenant=of.tenant, difference=f"{of}: {how}")
            for of, how in gateway.tokens.parity.differences().items()
            if tenant in (ALL_TENANTS, of.tenant) and model in ("", of.model)
        ],
        shadowed_balancer=gateway.config.shadow.balancer if gateway.config.shadow is not None else "",
        shadow_hours=[
            _shadow_hour(hour, span)
            for hour, span in gateway.shadow_report.hours()
            if tenant in (ALL_TENANTS, hour.tenant) and model in ("", hour.model)
        ],
        failure_counts=failure_counts(gateway.failure_log, in_full=tenant == ALL_TENANTS),
        recent_requests=gateway.failure_log.ended.recent()[None],
        recent_seconds=RECENT_SECONDS,
        late_tokens=_late_tokens(gateway, tenant, model),
    )


def _late_tokens(gateway: Gateway, tenant: str, model: str) -> list[gateway_pb2.LateTokens]:
    late = gateway.tokens.prompts.late
    recent = late.recent()
    return [
        gateway_pb2.LateTokens(
            source=of.source, tenant=of.tenant, model=of.model, total=late.total[of], recent=recent[of]
        )
        for of in sorted(late.total)
        if tenant in (ALL_TENANTS, of.tenant) and model in ("", of.model)
    ]


def _shadow_hour(hour: Hour, span: Span) -> gateway_pb2.ShadowHour:
    sums = {each.name: getattr(span.sums, each.name) for each in fields(Sums)}
    return gateway_pb2.ShadowHour(
        begin_unix_seconds=hour.begin,
        tenant=hour.tenant,
        model=hour.model,
        requests=span.requests,
        left_out=span.reasons(),
        **sums,
    )


def _observations(gateway: Gateway, tenant: str, model: str) -> list[gateway_pb2.WorkerObservation]:
    """Return observations of the ranks that got requests, and of those that are not well."""
    # The clock of `Observation.eventful`.
    now, failing = time.perf_counter(), gateway.health.failing()
    seen = gateway.observations.by_rank
    found = []
    for entry in gateway.registry.entries(tenant, model):
        owner = entry.spec.tenant
        unanswered = gateway.health.problem(owner, entry.spec.worker_id)
        for rank in entry.spec.ranks:
            problem, judged = failing.get((owner, rank), ""), gateway.judge.rank(entry.spec, rank)
            if judged.state is WorkerState.OK and (owner, rank) not in seen:
                continue
            one = _observation(owner, rank, seen.get((owner, rank), _NOTHING), now)
            if judged.state is WorkerState.LEFT_OUT:
                one.problem = problem or "does not answer its health checks"
                one.health_check_problem = unanswered
            one.health.CopyFrom(health_to_proto(judged))
            found.append(one)
    return found


def _observation(tenant: str, rank: WorkerRank, seen: Observation, now: float) -> gateway_pb2.WorkerObservation:
    return gateway_pb2.WorkerObservation(
        worker=rank_to_proto(rank),
        tenant=tenant,
        requests=seen.requests,
        failures=seen.failures,
        prompt_tokens=seen.prompt_tokens,
        first_tokens=seen.first_tokens,
        ttft_seconds=seen.ttft_seconds,
        reported_prompt_tokens=seen.reports.prompt_tokens,
        cached_tokens=seen.reports.cached_tokens,
        checked=seen.reports.checked,
        mispredicted=seen.reports.mispredicted,
        prediction_error_tokens=seen.reports.prediction_error_tokens,
        predicted_cached_tokens=seen.reports.predicted_tokens,
        unreported=seen.unreported,
        eventful_age_seconds=[now - dispatched_at for dispatched_at in seen.eventful],
    )
