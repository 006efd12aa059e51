"""From where an engine fetches blocks that it lacks: from another one, which holds more of the prompt. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kvscout_common.endpoints import MAX_PORT
from kvscout_common.worker import KV_SOURCE, KV_SOURCE_BLOCKS_PER_SECOND, WorkerRank, WorkerSpec
from kvscout_gateway.values.decision import Pull
from kvscout_gateway.values.overlaps import Rows


def pull_of(
    worker: WorkerRank,
    spec: WorkerSpec,
    rows: Rows,
    specs: Mapping[str, WorkerSpec],
    *,
    overlap_blocks: int,
    block_seconds: float,
) -> Pull | None:
    """Return from where a worker rank had better fetch blocks than compute them; None = from nowhere.

    Engines serve blocks from host memory, to which they copy what the device has: that is what counts of others. Of the
    worker all tiers count: what it can load itself need not be fetched.

    Args:
        worker: Who computes the prompt.
        spec: Its registration.
        rows: Overlaps with the caches of its geometry.
        specs: The tenant's workers by id.
        overlap_blocks: What the worker holds, confirmed or predicted.
        block_seconds: Time in which a block is computed; 0 = unknown.
    """
    if not spec.labels.get(KV_SOURCE):
        return None
    ids, ranks, device, host, disk, external, _ = rows.columns
    held = host or device
    slowest = external or disk or held
    others = rows.others
    own, longest, row = others[3] if others else 0, others[1] if others else 0, -1
    # A rank without a row stands for all of those, of which none needs to be a source.
    for place, worker_id in enumerate(ids):
        rank = ranks[place] if ranks else 0
        if (worker_id, rank) == worker:
            own = slowest[place]
        elif held[place] > longest and _serves(specs.get(worker_id), spec):
            longest, row = held[place], place
    own = max(own, overlap_blocks)
    if row < 0 or longest <= own:
        return None
    source = WorkerRank(ids[row], ranks[row] if ranks else 0)
    return _priced(source, specs[source.worker_id], spec, longest - own, block_seconds)


def _serves(source: WorkerSpec | None, spec: WorkerSpec) -> bool:
    """Return whether a worker's engine serves blocks that another one's can use."""
    return source is not None and bool(source.labels.get(KV_SOURCE)) and source.pool == spec.pool


def _priced(source: WorkerRank, there: WorkerSpec, here: WorkerSpec, blocks: int, block_seconds: float) -> Pull | None:
    host, _, port = there.labels[KV_SOURCE].rpartition(":")
    # The slower end of the link decides.
    rates = [int(each.labels[KV_SOURCE_BLOCKS_PER_SECOND]) for each in (there, here) if _is_rated(each)]
    seconds, compute_seconds = blocks / min(rates) if rates else 0.0, blocks * block_seconds
    if seconds and compute_seconds and seconds >= compute_seconds:
        return None
    # Each rank of an engine has a port of its own, from the one that it was started with.
    own_port = int(port) + source.dp_rank
    return Pull(source, host.strip("[]"), own_port, blocks, seconds, compute_seconds) if own_port <= MAX_PORT else None


def _is_rated(spec: WorkerSpec) -> bool:
    return KV_SOURCE_BLOCKS_PER_SECOND in spec.labels
