"""What `kvscout top` shows of the services and worker ranks, from two moments. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvscout.v1 import gateway_pb2
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.overview import Overview, Seen, SourceRow, seen_by_gateways
from kvscout_common.doctor.snapshot import RankName
from kvscout_common.doctor.worker_health import OK, UNJUDGED, Health, health_of, load_healths, worst

MAX_CHARACTERS: Final = 300
"""Maximum length of a name or a sentence."""


@dataclass(frozen=True, slots=True)
class Totals:
    """All gateways and schedulers together."""

    requests: int
    """Since the gateways' start."""
    requests_per_second: float | None
    """In the time between the moments, as all that follows; None = unknown."""
    failures: int
    """Since the gateways' start, by an engine's or the router's fault."""
    failures_per_second: float | None
    ttft_seconds: float | None
    """Mean."""
    hit_rate: float | None
    hit_rate_since_start: float | None
    in_flight: int
    queued: int
    in_trouble: int
    """Services and worker ranks."""
    failed: Mapping[str, int]
    """Failures since the gateways' start by whose fault they are: "caller", "engine", "router"."""
    troubles: tuple[str, ...]
    """Problems of requests, one sentence each."""

    @property
    def callers_mistakes(self) -> int:
        """Return the requests that failed by their callers' fault."""
        return self.failed.get("caller", 0)


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker rank."""

    name: RankName
    model: str
    state: str
    """State of its health, such as "left out"; that of its events where they alone are in trouble."""
    reason: str
    """Reason of the state, in one sentence; "" = nothing is wrong."""
    well: bool
    requests: int
    """Since the gateways' start."""
    requests_per_second: float | None
    failures: int
    active_requests: int | None
    """None = no scheduler knows, as in the next two."""
    prefill_tokens: int | None
    decode_blocks: int | None
    total_blocks: int
    """0 = unknown."""
    cached_blocks: int
    hit_rate: float | None
    """Cached ÷ prompt tokens between the moments, else since start; None = nothing was reported."""
    ttft_seconds: float | None
    """Mean between the moments, else since start; None = no output came."""
    event_age_seconds: float | None
    """None = no event came."""


def totals(now: Moment, before: Moment | None, shown: Overview, rows: Sequence[WorkerRow]) -> Totals:
    """Return the sums of all services, from their overview and rows."""
    seen, seen_before = _sum(now), _sum(before)
    elapsed = now.at - before.at if before is not None else 0.0
    return Totals(
        requests=now.requests,
        requests_per_second=now.requests_per_second(before),
        failures=now.failures,
        failures_per_second=max(0, now.failures - before.failures) / elapsed if before and elapsed > 0 else None,
        ttft_seconds=_ttft(seen, seen_before) if before is not None else None,
        hit_rate=now.hit_rate(before),
        hit_rate_since_start=now.hit_rate(None),
        in_flight=now.in_flight,
        queued=now.queued,
        in_trouble=sum(not row.well for row in shown.services) + sum(not row.well for row in rows),
        failed=shown.failed,
        troubles=shown.troubles,
    )


def worker_rows(now: Moment, before: Moment | None, shown: Overview) -> list[WorkerRow]:
    """Return a row of each worker rank, by name; texts that are too long for a person are cut."""
    seen = seen_by_gateways(now.snapshot)
    earlier = seen_by_gateways(before.snapshot) if before is not None else {}
    elapsed = now.at - before.at if before is not None else 0.0
    sources: dict[RankName, SourceRow] = {}
    for row in shown.sources:
        # Of several indexers, one that has trouble, else the one with the most.
        name = RankName(row.tenant, row.worker_id, row.dp_rank)
        sources[name] = min(row, sources.get(name, row), key=lambda one: (one.well, -one.blocks))
    found = []
    for name, source in sources.items():
        one, load = seen.get(name, Seen()), now.loads.get(name)
        health = worst(source.health, *map(health_of, load_healths(load))) if load is not None else source.health
        past = earlier.get(name, Seen())
        found.append(
            WorkerRow(
                name=RankName(name.tenant[:MAX_CHARACTERS], name.worker_id[:MAX_CHARACTERS], name.dp_rank),
                model=source.model[:MAX_CHARACTERS],
                state=_shows(source, health),
                reason=(source.reason if health.well else health.why)[:MAX_CHARACTERS],
                well=source.well and health.well,
                requests=one.requests,
                requests_per_second=max(0, one.requests - past.requests) / elapsed if elapsed > 0 else None,
                failures=one.failures,
                active_requests=load.active_requests if load is not None else None,
                prefill_tokens=load.active_prefill_tokens if load is not None else None,
                decode_blocks=load.active_decode_blocks if load is not None else None,
                total_blocks=load.total_kv_blocks if load is not None else 0,
                cached_blocks=source.blocks,
                hit_rate=_hit(one, past) if one.prompt_tokens > past.prompt_tokens else _hit(one, Seen()),
                ttft_seconds=_ttft(one, past) if one.first_tokens > past.first_tokens else _ttft(one, Seen()),
                event_age_seconds=source.last_event_age_seconds,
            )
        )
    return found


def _shows(source: SourceRow, health: Health) -> str:
    """Return the state to show of a worker rank: that of its events where they are worse, or all that is known."""
    events = health.state == UNJUDGED or (health.state == OK and not source.well)
    return source.state if events else health.state


def _sum(moment: Moment | None) -> Seen:
    total = Seen()
    for _, status in moment.snapshot.statuses(gateway_pb2.GatewayGetStatusResponse) if moment is not None else ():
        for one in status.workers:
            total.add(one)
    return total


def _hit(now: Seen, before: Seen) -> float | None:
    prompt = now.prompt_tokens - before.prompt_tokens
    return min(1.0, max(0, now.cached_tokens - before.cached_tokens) / prompt) if prompt > 0 else None


def _ttft(now: Seen, before: Seen) -> float | None:
    count = now.first_tokens - before.first_tokens
    return max(0.0, now.ttft_seconds - before.ttft_seconds) / count if count > 0 else None
