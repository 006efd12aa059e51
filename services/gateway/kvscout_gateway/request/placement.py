"""What the flows hand one another: what is asked of a worker, and where a prompt goes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.observability import tracing
from kvscout_common.worker import Role, WorkerRank, WorkerSpec
from kvscout_gateway.request.prompt import Prompt
from kvscout_gateway.upstreams.indexer.reporter import Decision
from kvscout_gateway.upstreams.scheduler.booking import Booking
from kvscout_gateway.upstreams.scheduler.output import UNKNOWN, Output


def new_request_id() -> str:
    """One that no other request has."""
    return f"gen-{os.urandom(16).hex()}"


# What each request makes is not frozen, which would make it three times as dear; it is not changed all the same.
@dataclass(slots=True)
class Wish:
    """What a request asks of its worker."""

    model: str
    tenant: str
    prompt: Prompt
    lora_name: str = ""
    role: Role = Role.AGGREGATED
    request_id: str = ""
    """"" = query only."""
    attempt_id: int = 0
    allowed: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    preferred: tuple[str, ...] = ()
    """Workers that are asked for first; the others, if none of these takes it."""
    pinned: str = ""
    pinned_rank: int | None = None
    required_labels: Mapping[str, str] = field(default_factory=dict)
    override: types_pb2.RouterConfigOverride | None = None
    priority: int = 0
    output: Output = UNKNOWN
    explain: bool = False
    lease_seconds: int = 0
    prefill_elsewhere: bool = False
    """Another worker computes the prompt: none of it is charged to this one."""
    owned: bool = False
    """This gateway runs the request itself, and holds its booking; else a caller does, who has a lease."""
    untold: bool = False
    """Whoever has it run tells nothing of its attempts but their end."""
    queue_wait_seconds: float | None = None
    """Longest wait in line at a scheduler; None = as for all."""
    running: bool = False
    """It is on the worker that it is pinned to already, whatever that has room for: it is booked there as one that was
    not sent there now."""
    fallback_reason: str = ""
    """Why no helper is asked, and the worker whose turn it is takes it; "" = they are asked."""

    def tell_trace(self) -> None:
        """Says what is asked in the span that runs now, if there are traces."""
        if tracing.enabled():
            tracing.current().tell(tenant=self.tenant, model=self.model, request_id=self.request_id)


def _helper_in(reason: str) -> str:
    return next((name for name in ("scheduler", "indexer", "tokenizer") if name in reason), "time")


@dataclass(slots=True)
class Placement:
    """Where a prompt goes."""

    worker: WorkerRank
    endpoint: str
    spec: WorkerSpec | None
    """The worker's registration; None if this gateway does not know it (yet)."""
    engine_model: str
    """The name under which the engine serves what was asked for: the adapter's, or the model's."""
    num_blocks: int
    block_size: int
    overlap_blocks: int = 0
    """Confirmed or predicted, whichever reaches further."""
    confirmed_blocks: int | None = None
    """What of it the worker's events confirm; None = no indexer told, or what it knows of the worker is incomplete."""
    effective_overlap_blocks: float = 0.0
    uncached_tokens: int = 0
    """Of the prompt, those that the worker has to compute, as far as is known."""
    cost: float = 0.0
    degraded: tuple[str, ...] = ()
    explanation: scheduler_pb2.Explanation | None = None
    booking: Booking | None = None
    """None for a query; its scheduler is None where none answered."""
    decision: Decision | None = None
    """What the indexers are to be told once the prompt goes to its engine; None = prefix caches are ignored."""

    def degraded_for(self, *, in_full: bool) -> tuple[str, ...]:
        """Why less was known than usual: in full, with addresses, or only who did not help."""
        return self.degraded if in_full else tuple(dict.fromkeys(map(_helper_in, self.degraded)))

    @property
    def rank_header(self) -> int | None:
        """The rank that the engine must be told; None for an engine that is known to have one only."""
        return None if self.spec is not None and self.spec.dp_size == 1 else self.worker.dp_rank
