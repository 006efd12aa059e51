"""Decision of the router: the worker of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvscout.v1 import scheduler_pb2
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_gateway.values.booking import Booking
from kvscout_gateway.values.prompt import HASH_BYTES, Geometry

POLICY_FAILED = "policy failed"
"""Begins the reason of a decision that the default policy made in place of one that failed."""


class Choice(NamedTuple):
    """Worker that a scheduler chose for a prompt."""

    worker: WorkerRank
    endpoint: str
    """URL of its HTTP API."""
    block_size: int
    """Tokens a block; 0 = the scheduler does not say."""
    overlap_blocks: int
    effective_overlap_blocks: float
    uncached_tokens: int
    cost: float
    explanation: scheduler_pb2.Explanation | None
    """None unless the request wanted one."""
    session_id: int = 0
    """Session of the request, named or found by lineage; 0 = the scheduler does not say."""
    policy_problem: str = ""
    """Policy that failed, and how: the default policy decided; "" = none did."""
    saved_seconds: float = 0.0
    """Cost of the worker that holds most, minus that of this one; 0 = it was chosen, or costs are not in seconds."""


class Pull(NamedTuple):
    """A worker rank from which an engine can fetch blocks instead of computing them."""

    source: WorkerRank
    host: str
    port: int
    """Where its engine serves blocks to others."""
    blocks: int
    """Leading blocks that it holds beyond those of the chosen worker."""
    seconds: float
    """Time in which they are fetched; 0 = unknown."""
    compute_seconds: float
    """Time in which they are computed; 0 = unknown."""

    @property
    def address(self) -> str:
        """Return HOST:PORT, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def in_words(self, block_size: int) -> str:
        """Return it in words, such as "4,096 tokens fetched from w1 in 20 ms, computed in 310 ms"."""
        words = f"{self.blocks * block_size:,} tokens fetched from {self.source.worker_id}"
        if self.seconds:
            words += f" in {self.seconds * 1000:,.3g} ms"
        return words + (f", computed in {self.compute_seconds * 1000:,.3g} ms" if self.compute_seconds else "")


@dataclass(slots=True, eq=False)
class Decision:
    """A prompt that goes to a worker rank."""

    tenant: str
    model: str
    """Base model."""
    worker: WorkerRank
    pool: Geometry
    """The worker's geometry."""
    block_hashes: bytes
    """Local hashes of the prompt's complete blocks, in the worker's own geometry: little-endian u64s."""
    lora_name: str = ""
    """Adapter; "" = none."""
    endpoint: str = ""
    """URL of the worker's HTTP API."""
    spec: WorkerSpec | None = None
    """The worker's registration; None if this gateway does not know it (yet)."""
    overlap_blocks: int = 0
    """Confirmed or predicted, whichever reaches further."""
    held_blocks: int | None = None
    """Longest overlap of any worker, confirmed or predicted; None = nobody looked, or no indexer knows."""
    confirmed_blocks: int | None = None
    """Overlap that the worker's events confirm; None = no indexer knows, or what it knows is incomplete."""
    effective_overlap_blocks: float = 0.0
    uncached_tokens: int = 0
    """Tokens of the prompt that the worker has to compute, as far as is known."""
    cost: float = 0.0
    saved_seconds: float = 0.0
    """As of `Choice`."""
    session_id: int = 0
    """Session of the request, named or found by lineage; 0 = unknown."""
    degraded: tuple[str, ...] = ()
    """Reasons why less was known than usual, with the addresses of upstreams."""
    pull: Pull | None = None
    """From where its engine had better fetch blocks than compute them; None = from nowhere."""
    explanation: scheduler_pb2.Explanation | None = None
    booking: Booking | None = None
    """None for a query; its scheduler is None where none answered."""
    seconds: float = 0.0
    """Time that it took, with the wait in a scheduler's queue; 0 = no upstream was asked."""
    select_seconds: float = 0.0
    """Part of it that the scheduler took, with its queue."""
    withdrawn: bool = False
    """Not reported to the indexers, or not any more: prefix caches are ignored, or the worker failed before it had
    anything to cache."""

    @property
    def blocks(self) -> int:
        """Complete blocks of the prompt."""
        return len(self.block_hashes) // HASH_BYTES

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.pool.block_size

    @property
    def engine_model(self) -> str:
        """Return the name under which the engine serves the requested model: the adapter's, or the model's."""
        return self.lora_name or self.model

    @property
    def rank_header(self) -> int | None:
        """Return the rank to name to the engine; None for an engine that is known to have one only."""
        return None if self.spec is not None and self.spec.dp_size == 1 else self.worker.dp_rank

    def degraded_for(self, *, in_full: bool) -> tuple[str, ...]:
        """Return why less was known than usual: in full, with addresses, or only what is missed."""
        return self.degraded if in_full else tuple(dict.fromkeys(map(_missed_in, self.degraded)))


def _missed_in(reason: str) -> str:
    if reason.startswith(POLICY_FAILED):
        return "policy"
    return next((name for name in ("scheduler", "indexer", "tokenizer") if name in reason), "time")
