"""Checks of events: those of every worker come, and can be read. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from kvscout.v1 import gateway_pb2, indexer_pb2, workers_pb2
from kvscout_common.doctor.conditions import (
    BLOCK_SIZE_DIFFERS,
    BLOCKS_ORPHANED,
    CACHE_EMPTIED,
    EVENTS_MISCONFIGURED,
    EVENTS_SILENT,
    EVENTS_UNREACHABLE,
    EVENTS_UNREADABLE,
    GROUPS_UNJUDGED,
    HISTORY_INCOMPLETE,
    LORA_UNNAMED,
    NATS_UNREACHABLE,
    RANKS_DIFFER,
    REMOVALS_LOST,
    REPLAY_MISSING,
    SCOPES_UNTOLD,
    Condition,
)
from kvscout_common.doctor.missing_events import EVENTS_WITHIN_SECONDS, silence
from kvscout_common.doctor.snapshot import RankName, Snapshot, observed_name, source_name
from kvscout_common.doctor.symptom import Symptom, of_worker
from kvscout_common.doctor.worker_health import NO_EVENTS, Health, judged_healths

_NATS = (workers_pb2.EVENT_TRANSPORT_NATS_CORE, workers_pb2.EVENT_TRANSPORT_JETSTREAM)
_CONDITIONS: dict[int, Condition] = {
    indexer_pb2.SOURCE_STATE_DISCONNECTED: EVENTS_UNREACHABLE,
    indexer_pb2.SOURCE_STATE_BLIND: EVENTS_SILENT,
    indexer_pb2.SOURCE_STATE_INCOMPATIBLE: BLOCK_SIZE_DIFFERS,
    indexer_pb2.SOURCE_STATE_MISCONFIGURED: EVENTS_MISCONFIGURED,
    indexer_pb2.SOURCE_STATE_QUARANTINED: EVENTS_UNREADABLE,
    indexer_pb2.SOURCE_STATE_INCOMPLETE: HISTORY_INCOMPLETE,
}
ORPHANS = 16
ORPHANS_SHARE = 10
"""With this number of blocks without their parent, and more than this part of those that have it, events were lost."""
_UNINDEXED = ("bad_length", "hash_conflict")
"""Reasons for which events are left out that no engine should give."""


def check_events(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield every source of every indexer."""
    served, judged = _served(snapshot), judged_healths(snapshot)
    reported_by_engines = {
        RankName(*engine.worker, endpoint.dp_rank): endpoint
        for engine in snapshot.engines
        if engine.facts is not None
        for endpoint in engine.facts.event_endpoints
    }
    told: set[RankName] = set()
    workers = snapshot.workers
    for service, status in snapshot.statuses(indexer_pb2.IndexerGetStatusResponse):
        for source in status.sources:
            name = source_name(source)
            condition = _condition(source, served[name])
            if condition is EVENTS_UNREACHABLE and judged.get(name, Health()).is_down:
                condition = None  # what is wrong with the engine says it
            where = f"worker {name} at {service.name}"
            about, subject = of_worker(name.worker_id), f"worker {name.worker_id}"
            reported = reported_by_engines.get(name)
            if condition is not None:
                hint = ""
                if reported is not None and source.endpoint and _port(reported.endpoint) != _port(source.endpoint):
                    hint = f"; the engine says that it publishes at {reported.endpoint}"
                # An engine may start after its indexer; one that was heard of, or has run requests, does not start.
                has_run = any(EVENTS_WITHIN_SECONDS < age < source.open_seconds for age in served[name].ages)
                young = source.HasField("open_seconds") and not source.HasField("last_event_id") and not has_run
                age = source.open_seconds if young else float("inf")
                evidence = f"{where}: {_reason(source, served[name])}{hint}"
                yield Symptom(condition, evidence, about, age, subject)
            if condition is EVENTS_SILENT:
                told.add(name)
            if source.endpoint and source.transport == workers_pb2.EVENT_TRANSPORT_ZMQ and not source.replay_endpoint:
                hint = (
                    f", the engine has one at {reported.replay_endpoint}"
                    if reported and reported.replay_endpoint
                    else ""
                )
                yield Symptom(REPLAY_MISSING, f"{where}: none is registered{hint}")
            yield from _contents(source, where)
            worker = workers.get(name.worker)
            if source.applied and worker is not None and worker.engine == workers_pb2.ENGINE_KIND_TRTLLM:
                adapters = f", {len(worker.adapters)} adapters are registered" if worker.adapters else ""
                yield Symptom(SCOPES_UNTOLD, f"{where}: {source.blocks:,} blocks{adapters}")
    for name, health in judged.items():
        if health.state == NO_EVENTS and name not in told:
            about, subject = of_worker(name.worker_id), f"worker {name.worker_id}"
            yield Symptom(EVENTS_SILENT, health.sentence(str(name)), about, subject=subject)


class _Served(NamedTuple):
    """Requests that a worker rank ran, and that its events report."""

    ages: list[float]
    """Seconds since they were dispatched."""
    reports: bool
    """The engine says what it had cached: the others computed something."""


def _served(snapshot: Snapshot) -> defaultdict[RankName, _Served]:
    """Return what the ranks ran, as all gateways saw it."""
    found: defaultdict[RankName, _Served] = defaultdict(lambda: _Served([], reports=False))
    for _, status in snapshot.statuses(gateway_pb2.GatewayGetStatusResponse):
        for seen in status.workers:
            before = found[observed_name(seen)]
            ages = [*before.ages, *seen.eventful_age_seconds]
            found[observed_name(seen)] = _Served(ages, before.reports or seen.cached_tokens > 0 or seen.checked > 0)
    return found


def _condition(source: indexer_pb2.SourceStatus, served: _Served) -> Condition | None:
    """Return what a source's state amounts to; None = nothing is wrong with it."""
    condition = _CONDITIONS.get(source.state)
    if condition is HISTORY_INCOMPLETE and source.fenced:
        return CACHE_EMPTIED
    if condition is EVENTS_MISCONFIGURED and source.wrong_rank:
        return RANKS_DIFFER
    if condition is EVENTS_UNREACHABLE and source.transport in _NATS:
        return NATS_UNREACHABLE
    return EVENTS_SILENT if silence(source, served.ages, reports=served.reports) else condition


def _reason(source: indexer_pb2.SourceStatus, served: _Served) -> str:
    missing = silence(source, served.ages, reports=served.reports)
    return f"it {missing}" if missing else source.reason


def _contents(source: indexer_pb2.SourceStatus, where: str) -> Iterator[Symptom]:
    """Yield what came, and could not be used."""
    if unnamed := source.ignored.get("unnamed_lora", 0):
        yield Symptom(LORA_UNNAMED, f"{where}: {unnamed:,} events")
    for reason in _UNINDEXED:
        if count := source.ignored.get(reason, 0):
            yield Symptom(EVENTS_UNREADABLE, f"{where}: {count:,} events left out ({reason})")
    if source.malformed and source.state != indexer_pb2.SOURCE_STATE_QUARANTINED:
        yield Symptom(EVENTS_UNREADABLE, f"{where}: {source.malformed:,} batches or events could not be decoded")
    if source.orphans >= ORPHANS and source.orphans * ORPHANS_SHARE > source.blocks:
        yield Symptom(BLOCKS_ORPHANED, f"{where}: {source.orphans:,} blocks, beside {source.blocks:,} that are found")
    if source.over_capacity:
        yield Symptom(REMOVALS_LOST, f"{where}: {source.blocks:,} blocks")
    if groups := source.unjudged_groups:
        yield Symptom(GROUPS_UNJUDGED, f"{where}: group{'s' * (len(groups) > 1)} {', '.join(map(str, groups))}")


def _port(endpoint: str) -> str:
    """Return what two ways to name one endpoint have in common: an engine rarely knows how it is reached."""
    return endpoint.rpartition(":")[2]
