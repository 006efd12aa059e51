"""What routing by cached prefixes saved, and how much of what was possible. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.overview import seen_by_gateways
from kvscout_common.registry.registry import WorkerName
from kvscout_gateway.fronts.dashboard.decision_rows import reach

KEPT: Final = 500
"""Decisions by which what was found is compared with what was possible."""


def savings(now: Moment) -> dict[str, Any]:
    """Return the prompt tokens that engines had cached since the gateways' start, and the time of prefill that they
    would have taken: at the speed that schedulers learned, one GPU a worker rank."""
    speeds, workers = _speeds(now), now.snapshot.workers
    prompt = cached = 0
    timed, seconds = 0, 0.0
    for name, seen in seen_by_gateways(now.snapshot).items():
        prompt += seen.prompt_tokens
        cached += seen.cached_tokens
        worker = workers.get(WorkerName(name.tenant, name.worker_id))
        role = worker.role or types_pb2.ROLE_AGGREGATED if worker is not None else None
        speed = speeds.get((worker.tenant, worker.model, role)) if worker is not None else None
        if speed is not None:
            timed += seen.cached_tokens
            seconds += seen.cached_tokens * speed
    return {
        "prompt": prompt,
        "cached": cached,
        "gpu_seconds": seconds if timed else None,
        "token_seconds": seconds / timed if timed else None,
    }


def _speeds(now: Moment) -> dict[tuple[str, str, int | None], float]:
    """Return the seconds of a prompt token by tenant, model and role of a pool, where they are learned."""
    return {
        (pool.tenant, pool.model, pool.role): pool.prefill_token_seconds
        for _, status in now.snapshot.statuses(scheduler_pb2.SchedulerGetStatusResponse)
        for pool in status.pools
        if pool.HasField("prefill_token_seconds")
    }


class _Found(NamedTuple):
    blocks: int
    """Blocks of the prompt that the chosen worker held."""
    possible: int
    """Blocks of the prompt that the worker with most of them held."""


class Possible:
    """Hit rate that was possible, by the last decisions that were watched."""

    def __init__(self) -> None:
        self._newest: scheduler_pb2.WatchDecisionsResponse | None = None
        self._found: deque[_Found] = deque(maxlen=KEPT)

    def follow(self, decisions: Iterable[scheduler_pb2.WatchDecisionsResponse]) -> None:
        """Take the decisions that came since the last call, of the last ones, the newest first."""
        newest = self._newest
        for index, event in enumerate(decisions):
            if event is newest:
                break
            if not index:
                self._newest = event
            if not event.code:
                has = event.decision.overlap_blocks
                best = max(map(reach, event.decision.explanation.candidates), default=0)
                self._found.append(_Found(has, max(has, best)))

    def document(self) -> dict[str, Any]:
        """Return the share of the possible blocks that the chosen workers had; None = none was possible."""
        possible = sum(one.possible for one in self._found)
        share = sum(one.blocks for one in self._found) / possible if possible else None
        return {"share": share, "decisions": len(self._found)}
