"""Status of indexes and sources, for GetStatus and the metrics."""

from __future__ import annotations

from collections.abc import Callable

from kvscout.v1 import indexer_pb2, workers_pb2
from kvscout_blocks.index.block_index import BlockIndex, WorkerStats
from kvscout_blocks.source.source import Observed, Source
from kvscout_common.nats.names import NatsNames
from kvscout_common.registry.worker_proto import rank_to_proto
from kvscout_common.worker import PoolKey, Transport, WorkerRank, WorkerSpec

RANKS_A_SLICE = 16
"""Worker ranks whose state is read between two iterations of the event loop."""
_DIRECT = (Transport.ZMQ, Transport.SUBSCRIBE)
"""Transports over which engines themselves are read."""
NOTHING_HELD = WorkerStats(
    blocks=0,
    hidden=0,
    orphans=0,
    ghosts=0,
    predictions=0,
    device_copies=0,
    window_blocks=0,
    unjudged_groups=(),
    over_capacity=False,
    incomplete=False,
    incompatible="",
    ignored={},
)
"""Statistics of a worker that another indexer has."""


def index_status(key: PoolKey, index: BlockIndex) -> indexer_pb2.IndexStatus:
    """Return the state of one index."""
    stats = index.stats()
    return indexer_pb2.IndexStatus(
        model=key.model,
        tenant=key.tenant,
        block_size=key.block_size,
        eagle=key.eagle,
        blocks=stats.blocks,
        memberships=stats.memberships,
        bytes=stats.bytes,
        orphans=stats.orphans,
        hidden=stats.hidden,
        ghosts=stats.ghosts,
        predictions=stats.predictions,
        bound_evictions=stats.evicted,
        queries=stats.queries,
        worker_ranks=stats.workers,
        shared_caches=[indexer_pb2.SharedCacheStatus(**cache._asdict()) for cache in index.shared_caches()],
    )


def source_state(
    spec: WorkerSpec, source: Source | None, observed: Observed | None, stats: WorkerStats, unread: str = ""
) -> tuple[indexer_pb2.SourceState.ValueType, str]:
    """Return what state a worker rank's events are in, and why it is not LIVE; arguments as of `source_status`."""
    if unread:
        return indexer_pb2.SOURCE_STATE_NONE, unread
    if source is None or observed is None:
        if spec.transport is Transport.ZMQ:
            return indexer_pb2.SOURCE_STATE_MISCONFIGURED, "no event endpoint is registered for this rank"
        if spec.transport in (Transport.NATS_CORE, Transport.JETSTREAM):
            return indexer_pb2.SOURCE_STATE_MISCONFIGURED, f"transport {spec.transport} needs --nats-server"
        return indexer_pb2.SOURCE_STATE_NONE, f"transport {spec.transport}: no events are read from this rank"
    sequence = observed.sequence
    # The order is that of what an operator has to fix first.
    table: tuple[tuple[bool, indexer_pb2.SourceState.ValueType, Callable[[], str]], ...] = (
        (bool(source.feed.broken), indexer_pb2.SOURCE_STATE_MISCONFIGURED, lambda: source.feed.broken),
        (bool(sequence.misconfigured), indexer_pb2.SOURCE_STATE_MISCONFIGURED, lambda: sequence.misconfigured),
        (bool(stats.incompatible), indexer_pb2.SOURCE_STATE_INCOMPATIBLE, lambda: stats.incompatible),
        (
            sequence.quarantined_until is not None,
            indexer_pb2.SOURCE_STATE_QUARANTINED,
            lambda: "too many malformed batches in a row",
        ),
        # An engine that serves requests and has no socket for events was started without them.
        (
            bool(source.feed.outage) and spec.transport in _DIRECT and _is_blind(source, observed),
            indexer_pb2.SOURCE_STATE_BLIND,
            lambda: _blindness(spec, source),
        ),
        (bool(source.feed.outage), indexer_pb2.SOURCE_STATE_DISCONNECTED, lambda: source.feed.outage),
        (source.peers.running, indexer_pb2.SOURCE_STATE_REPLAYING, lambda: f"{sequence.held} batches wait for peers"),
        (sequence.replaying, indexer_pb2.SOURCE_STATE_REPLAYING, lambda: f"{sequence.held} live batches wait"),
        # Before what is missing: of a source that never sent anything that says nothing new.
        (_is_blind(source, observed), indexer_pb2.SOURCE_STATE_BLIND, lambda: _blindness(spec, source)),
        (
            sequence.history_incomplete,
            indexer_pb2.SOURCE_STATE_INCOMPLETE,
            lambda: f"events are missing: {sequence.missing}",
        ),
        (stats.incomplete, indexer_pb2.SOURCE_STATE_INCOMPLETE, lambda: _limits(stats)),
        (
            observed.last_id is None,
            indexer_pb2.SOURCE_STATE_WAITING,
            lambda: f"no event has arrived yet{_where(spec, source)}",
        ),
    )
    for applies, state, reason in table:
        if applies:
            return state, reason()
    return indexer_pb2.SOURCE_STATE_LIVE, ""


def _limits(stats: WorkerStats) -> str:
    """Return what kept blocks out; the counts are since the worker was added."""
    counts = (f"{kind} {count:,}" for kind, count in stats.ignored.items() if kind.is_limit)
    return f"a limit of the index left blocks out: {', '.join(counts) or 'in the state that was loaded'}"


def _is_blind(source: Source, observed: Observed) -> bool:
    """Return whether requests were served and no event of them was ever received."""
    received = observed.last_id is not None or observed.received_at is not None or observed.applied
    return source.served > 0 and not received


def _blindness(spec: WorkerSpec, source: Source) -> str:
    where = _where(spec, source) or f" and published over {spec.transport}"
    served = "1 request was" if source.served == 1 else f"{source.served} requests were"
    return f"{served} served and no event ever came: are KV events switched on{where}?"


def _where(spec: WorkerSpec, source: Source) -> str:
    """Return where the engine's own events are awaited; "" = they are not."""
    endpoint = spec.event_endpoint(source.rank.dp_rank) if spec.transport in _DIRECT else None
    return f" at {endpoint.endpoint}" if endpoint is not None else ""


def source_status(
    spec: WorkerSpec,
    rank: WorkerRank,
    source: Source | None,
    observed: Observed | None,
    stats: WorkerStats,
    now: float,
    *,
    unread: str = "",
    names: NatsNames | None = None,
) -> indexer_pb2.SourceStatus:
    """Return the state of one worker rank's events.

    Args:
        spec: The worker.
        rank: Which of its ranks.
        source: None = it has none.
        observed: What the source was like; None = there is no source.
        stats: What is held of it, read after `observed`: a native thread applies batches meanwhile.
        now: The sources' clock.
        unread: Why this indexer reads no events of the worker, whatever its registration; "" = it does.
        names: In NATS; None = there is none.
    """
    state, reason = source_state(spec, source, observed, stats, unread)
    status = indexer_pb2.SourceStatus(
        worker=rank_to_proto(rank),
        model=spec.model,
        tenant=spec.tenant,
        transport=workers_pb2.EventTransport.Value(f"EVENT_TRANSPORT_{spec.transport.name}"),
        state=state,
        reason=reason,
        blocks=stats.blocks,
        orphans=stats.orphans,
        hidden=stats.hidden,
        ghosts=stats.ghosts,
        window_blocks=stats.window_blocks,
        unjudged_groups=stats.unjudged_groups,
        ignored={str(kind): count for kind, count in stats.ignored.items()},
        over_capacity=stats.over_capacity,
    )
    if source is not None and observed is not None:
        sequence, counters = observed.sequence, observed.sequence.counters
        status.endpoint, status.replay_endpoint = _endpoints(spec, rank, names)
        status.open_seconds = now - source.opened_at
        status.epoch = sequence.epoch
        if observed.last_id is not None:
            status.last_event_id = observed.last_id
        if observed.received_at is not None:
            # What came after `now` was read.
            status.last_event_age_seconds = max(0.0, now - observed.received_at)
        status.lag_batches = sequence.held
        status.applied = observed.applied
        status.dropped = source.dropped
        status.wrong_rank = counters["wrong_rank"]
        status.gaps = counters["gaps"]
        status.replays = counters["replays"]
        status.demotions = counters["demotions"]
        status.fences = counters["fences"]
        status.fenced = sequence.fenced
        status.states = counters["states"]
        status.resets = source.resets
        status.malformed = source.malformed
    return status


def _endpoints(spec: WorkerSpec, rank: WorkerRank, names: NatsNames | None) -> tuple[str, str]:
    """Return the addresses of a rank's events and of its replay, see `SourceStatus`."""
    endpoint = spec.event_endpoint(rank.dp_rank)
    if spec.transport in _DIRECT and endpoint is not None:
        return endpoint.endpoint, endpoint.replay_endpoint
    if names is not None and spec.transport is Transport.NATS_CORE:
        return names.core_events(spec.tenant, spec.model, rank), ""
    if names is not None and spec.transport is Transport.JETSTREAM:
        return names.stream(spec.tenant, spec.model), ""
    return "", ""
