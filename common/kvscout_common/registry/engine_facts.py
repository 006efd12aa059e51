"""Facts that an engine reports, and how they complete or contradict a registration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvscout_common.worker import EngineKind, EventEndpoint, Transport, WorkerSpec

QUERIED_ENGINES = frozenset({EngineKind.VLLM, EngineKind.SGLANG, EngineKind.MOCK})
"""Engines that report where they publish their events over HTTP."""


SHOWN = 8
"""Entries of a list that a sentence shows."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that one engine reports; zero, "" and () = not reported."""

    http_endpoint: str
    """URL at which it was queried."""
    event_endpoints: tuple[EventEndpoint, ...] = ()
    """By rank, as a subscriber connects to them."""
    models: tuple[str, ...] = ()
    """Names under which it serves."""
    block_size: int = 0
    total_kv_blocks: int = 0
    engine: EngineKind | None = None
    """Kind of the engine; None = its answers fit several kinds."""

    def complete(self, spec: WorkerSpec) -> WorkerSpec:
        """Return a registration with what it leaves open.

        The ranks of an engine that publishes for several are taken over where the registration says nothing of ranks.
        Model and block size never are: whoever registers a worker has to know them.
        """
        completed = spec
        if not spec.event_endpoints and self.event_endpoints and spec.transport is Transport.ZMQ:
            ranks = sorted(endpoint.dp_rank for endpoint in self.event_endpoints)
            open_ranks = (spec.dp_start_rank, spec.dp_size) == (0, 1)
            if open_ranks and ranks == list(range(ranks[0], ranks[0] + len(ranks))):
                completed = replace(completed, dp_start_rank=ranks[0], dp_size=len(ranks))
            known = {rank.dp_rank for rank in completed.ranks}
            endpoints = tuple(endpoint for endpoint in self.event_endpoints if endpoint.dp_rank in known)
            completed = replace(completed, event_endpoints=endpoints)
        if not spec.total_kv_blocks and self.total_kv_blocks:
            completed = replace(completed, total_kv_blocks=self.total_kv_blocks)
        return completed

    def contradictions(self, spec: WorkerSpec) -> dict[str, str]:
        """Return what a completed registration says otherwise than its engine, in words, by the field that differs."""
        found = {}
        if self.block_size and self.block_size != spec.block_size:
            found["block_size"] = f"registered with block_size {spec.block_size}, the engine has {self.block_size}"
        if self.models and spec.model not in self.models:
            more = f" and {len(self.models) - SHOWN} more" if len(self.models) > SHOWN else ""
            found["model"] = f"registered for {spec.model!r}, the engine serves {', '.join(self.models[:SHOWN])}{more}"
        reported = {endpoint.dp_rank for endpoint in self.event_endpoints}
        silent = [rank.dp_rank for rank in spec.ranks if rank.dp_rank not in reported]
        if reported and silent:
            found["dp_size"] = (
                f"the engine publishes events of {len(reported)} ranks, and not of {len(silent)} that are registered, "
                f"such as {', '.join(map(str, silent[:SHOWN]))}"
            )
        return found


def lacks_event_endpoints(spec: WorkerSpec) -> bool:
    """Return whether a worker's events are to be read from its engine, and only the engine can say where."""
    return bool(
        spec.transport is Transport.ZMQ
        and not spec.event_endpoints
        and spec.http_endpoint
        and spec.engine in QUERIED_ENGINES
    )
