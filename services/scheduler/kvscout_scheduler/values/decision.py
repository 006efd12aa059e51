"""Decision of the scheduler: the worker, its overlap with the prompt, and on request why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvscout_common.worker import WorkerRank, WorkerSpec


class Candidate(NamedTuple):
    """One worker rank that was considered."""

    rank: WorkerRank
    eligible: bool
    ineligible_reason: str
    """"" where it is eligible."""
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    external_blocks: int
    """Overlaps are cumulative, as in `Overlaps`."""
    prefill_blocks: float
    decode_blocks: float
    cost: float
    probability: float
    """Probability of being drawn; 0 where the policy drew without a temperature."""
    cached_tokens: int = 0
    """Tokens of the prompt that it has, slower tiers weighted."""
    cost_text: str = ""
    """Cost with its unit, such as "38 ms"; "" where the policy's costs say nothing."""


class Explanation(NamedTuple):
    """Explanation of a decision."""

    policy: str
    overlap_score_weight: float
    router_temperature: float
    reason: str
    candidates: tuple[Candidate, ...]
    """Every worker rank of the pool, by rank."""
    summary: str = ""
    """Reason for the choice, in one sentence for a person."""


@dataclass(slots=True)
class Decision:
    """The worker that was picked."""

    rank: WorkerRank
    spec: WorkerSpec
    policy: str
    overlap_blocks: int
    """Leading blocks of the prompt on its device, confirmed or predicted."""
    effective_overlap_blocks: float
    """Slower tiers weighted; 0 where prefix caches are ignored."""
    cost: float
    """In seconds for `kv-time`, in blocks for `kv`, else in the policy's own unit (`Policy.unit`)."""
    uncached_tokens: int
    """Prompt tokens charged as prefill."""
    explanation: Explanation | None = None
    session: int = 0
    """Conversation of the request, as its caller says or by lineage; 0 = unknown."""
    policy_problem: str = ""
    """Policy that failed, and how, in one line: `policy` decided in its place; "" = none failed."""
    saved_seconds: float = 0.0
    """Cost of the worker that holds most, minus that of this one; 0 = it was chosen, or costs are not in seconds."""
