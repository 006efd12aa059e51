"""Where a prompt goes."""

from __future__ import annotations

from dataclasses import dataclass

from kvscout.v1 import scheduler_pb2
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_gateway.values.booking import Booking
from kvscout_gateway.values.prompt import HASH_BYTES, Geometry


def _upstream_in(reason: str) -> str:
    return next((name for name in ("scheduler", "indexer", "tokenizer") if name in reason), "time")


@dataclass(slots=True, eq=False)
class Decision:
    """A prompt that goes to a worker rank."""

    tenant: str
    model: str
    worker: WorkerRank
    pool: Geometry
    block_hashes: bytes
    """Local hashes of its complete blocks, in the worker's own geometry: little-endian u64s."""
    withdrawn: bool = False
    """The worker failed before it had anything to cache: not reported any more, if it has not been."""

    @property
    def blocks(self) -> int:
        """Its complete blocks."""
        return len(self.block_hashes) // HASH_BYTES


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
        return self.degraded if in_full else tuple(dict.fromkeys(map(_upstream_in, self.degraded)))

    @property
    def rank_header(self) -> int | None:
        """The rank that the engine must be told; None for an engine that is known to have one only."""
        return None if self.spec is not None and self.spec.dp_size == 1 else self.worker.dp_rank

    @property
    def lora_name(self) -> str:
        """`engine_model` if that is an adapter, else ""."""
        return self.engine_model if self.spec is not None and self.spec.model != self.engine_model else ""
