"""Results of the client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvscout_common.worker import Role, WorkerRank, WorkerSpec


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker rank that was considered."""

    worker: WorkerRank
    eligible: bool
    ineligible_reason: str
    """Reason why it could not be chosen; "" = it could."""
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    external_blocks: int
    prefill_blocks: float
    decode_blocks: float
    cost: float
    probability: float
    """Probability of being drawn, where the temperature is above 0."""
    cached_tokens: int = 0
    """Tokens of the prompt that it has, slower tiers weighted."""
    cost_text: str = ""
    """Cost with its unit, such as "38 ms"; "" = costs do not show why a worker was chosen."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of the choice of a worker."""

    policy: str
    overlap_score_weight: float
    router_temperature: float
    reason: str
    candidates: tuple[Candidate, ...]
    summary: str = ""
    """Reason for the choice, in one sentence; "" = an earlier scheduler, which does not report it."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Blocks that a worker's engine can fetch from another one instead of computing them."""

    source: WorkerRank
    address: str
    """HOST:PORT at which the other engine serves them."""
    blocks: int
    """Blocks that it holds beyond those of the chosen worker."""
    seconds: float
    """Time in which they are fetched; 0 = unknown."""
    compute_seconds: float
    """Time in which they are computed; 0 = unknown."""


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """Choice of a worker for a prompt."""

    worker: WorkerRank
    http_endpoint: str
    """The worker's HTTP endpoint; "" = none registered."""
    overlap_blocks: int
    """Leading blocks of the prompt on its device."""
    effective_overlap_blocks: float
    """Overlap as the cost counted it, slower tiers weighted."""
    num_blocks: int
    """Complete blocks in the prompt."""
    block_size: int
    """Tokens a block."""
    cost: float
    degraded: bool
    """A helper was out of reach: the choice was made with less knowledge than usual."""
    degraded_reasons: tuple[str, ...]
    explanation: Explanation | None
    """Set where it was requested."""
    confirmed_overlap_blocks: int
    """Blocks of overlap_blocks that the worker's events confirm; the rest is predicted."""
    booked: bool
    """A scheduler has booked the request; False for a query, and where no scheduler answered."""
    pull: Pull | None = None
    """Set where another engine holds more of the prompt, and fetching that takes less time than computing it."""


class FinishReason(StrEnum):
    """Reason why generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    OTHER = "other"
    """See `GenerateChunk.engine_finish_reason`."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """Prompt tokens that the engine took from its cache; None = it did not report."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at the place of one generated token."""

    logprob: float
    """Log probability of the token itself."""
    top: Mapping[int, float]
    """Log probabilities of the likeliest tokens there, the likeliest first."""


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """A chunk of the output."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    """Set in the last chunk of output."""
    engine_finish_reason: str = ""
    """With it: the engine's own word."""
    decision: RouteDecision | None = None
    """Worker of the request: in the first chunk, and again if it had to move before its first token."""
    usage: Usage | None = None
    """In the last chunk."""
    request_id: str = ""
    """In the first chunk."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, where they were requested."""


class FreeOutcome(StrEnum):
    """Return the outcome of a free."""

    FREED = "freed"
    UNKNOWN = "unknown"
    """Nothing was active under this id and attempt."""
    ALREADY_FREED = "already_freed"
    DEQUEUED = "dequeued"
    """It was waiting in the queue and is taken out."""


class RequestPhase(StrEnum):
    """Phase of an active request."""

    QUEUED = "queued"
    """It waits for a worker."""
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class ActiveRequest:
    """A request that is booked."""

    request_id: str
    attempt_id: int
    model: str
    role: Role
    worker: WorkerRank
    phase: RequestPhase | None
    """None = one that this release has no name for."""
    blocks: int
    """Blocks of the prompt, the partial one included."""
    output_blocks: int
    uncached_tokens: int
    """Prompt tokens charged as prefill."""
    age_seconds: float
    """Since it was booked."""
    phase_estimated: bool = False
    """Nobody reports its first token, since its engine answers as a whole: that it decodes is an estimate."""
    session: int = 0
    """Conversation that it belongs to; 0 = unknown."""


class FaultOwner(StrEnum):
    """Whose fault a failure is."""

    CALLER = "caller"
    ENGINE = "engine"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed, or was not answered as it should have been."""

    number: int
    """Ascending from 1, for each gateway."""
    at_unix_seconds: float
    request_id: str
    tenant: str
    model: str
    front: str
    """Path or rpc by which it came."""
    status: str
    """Status that the client got; "" = none of the gateway's."""
    cause: str
    owner: FaultOwner | None
    """None = one that this release has no name for."""
    answered: bool
    """It was answered all the same."""
    worker_ids: tuple[str, ...]
    """Workers that it was sent to, in order."""
    message: str
    trace_id: str
    """"" = it is not traced."""


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """Health of a worker or one of its ranks, as the gateway that answers judges it."""

    state: str
    """"ok", "no events", "slow", "busy", "draining", "suspected" or "left out"; "" = it is not judged."""
    cause: str = ""
    """Part of a sentence; "" = the state says it."""
    age_seconds: float | None = None
    """Since the cause was first seen; None = not known."""


UNJUDGED = WorkerHealth("")


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Load of one worker rank, now and with the prompt of the question added."""

    worker: WorkerRank
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int
    active_prefill_tokens: int
    active_decode_blocks: int
    busy: bool
    cooldown_seconds: float
    draining: bool
    total_kv_blocks: int
    """0 = unknown."""
    health: WorkerHealth = UNJUDGED


@dataclass(frozen=True, slots=True)
class RegisteredWorker:
    """Answer to a registration."""

    spec: WorkerSpec
    """As stored, defaults filled in."""
    created: bool
    """False = an existing registration was replaced."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One registered worker."""

    spec: WorkerSpec
    source: str
    """Origin of the registration, such as "rpc" or "file"."""
    lease_remaining_seconds: float | None
    """None = no lease."""
    health: WorkerHealth = UNJUDGED
    """Health of its worst rank."""


@dataclass(frozen=True, slots=True)
class BusyThresholds:
    """Load from which the workers of a model count as busy; None = off."""

    model: str
    tenant: str
    active_decode_blocks_threshold: float | None
    """Fraction of total_kv_blocks in active decode blocks."""
    active_prefill_tokens_threshold: int | None


@dataclass(frozen=True, slots=True)
class HelperState:
    """An indexer or scheduler as the gateway sees it."""

    kind: str
    address: str
    healthy: bool
    last_error: str
    calls: int
    failures: int
    pending_registrations: int
    """Registrations not sent to it yet."""


@dataclass(frozen=True, slots=True)
class WorkerObservation:
    """Observations of the gateway on one worker rank."""

    worker: WorkerRank
    requests: int
    failures: int
    prompt_tokens: int
    cached_tokens: int
    checked: int
    """Requests whose cached tokens the engine reported."""
    mispredicted: int
    prediction_error_tokens: int
    """Σ |predicted − reported| cached tokens."""
    predicted_cached_tokens: int = 0
    """Σ predicted cached tokens of the checked requests."""
    unreported: int = 0
    """Requests that were predicted to be cached in part, of a worker that has never reported cached tokens."""
    problem: str = ""
    """Reason why it gets no requests now; "" = it gets requests."""
    health_check_problem: str = ""
    """Error of its last health check, once several failed; "" = none."""


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """State of the gateway and of what it depends on."""

    version: str
    uptime_seconds: float
    backend: str
    """"native" with the Rust extension, "reference" without it."""
    transport: str
    """Transport of its calls: "native" or "grpcio"; "" = a release that does not report it."""
    draining: bool
    warnings: tuple[str, ...]
    helpers: tuple[HelperState, ...]
    workers: tuple[WorkerObservation, ...]
    in_flight: int
    requests: int
    failures: int
    degraded: Mapping[str, int]
    """Decisions made with less knowledge than usual, by reason."""
