"""What the flows hand one another: what is asked of a worker, where a prompt goes, what was booked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.worker import Role, WorkerRank, WorkerSpec
from kvscout_gateway.failover import Failover, Member
from kvscout_gateway.prompt import Prompt
from kvscout_gateway.reporter import Decision

Schedulers: TypeAlias = "Failover[scheduler_pb2_grpc.SchedulerAsyncStub]"
SchedulerMember: TypeAlias = "Member[scheduler_pb2_grpc.SchedulerAsyncStub]"


@dataclass(frozen=True, slots=True)
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
    pinned: str = ""
    pinned_rank: int | None = None
    required_labels: Mapping[str, str] = field(default_factory=dict)
    override: types_pb2.RouterConfigOverride | None = None
    priority: int = 0
    expected_output_tokens: int = 0
    explain: bool = False
    lease_seconds: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Booking:
    """A reservation that somebody owes a Free, and the scheduler that has it. Two are never equal."""

    ref: scheduler_pb2.RequestRef
    scheduler: SchedulerMember


@dataclass(frozen=True, slots=True)
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
    cost: float = 0.0
    degraded: tuple[str, ...] = ()
    explanation: scheduler_pb2.Explanation | None = None
    booking: Booking | None = None
    """None where nothing was booked: query only, or no scheduler."""
    decision: Decision | None = None
    """What the indexers are to be told once the prompt goes to its engine; None = prefix caches are ignored."""

    @property
    def rank_header(self) -> int | None:
        """The rank that the engine must be told; None for an engine that is known to have one only."""
        return None if self.spec is not None and self.spec.dp_size == 1 else self.worker.dp_rank
