"""What the gateway sees of each worker: requests, failures, and whether cache predictions came true. Soft state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvscout_common.worker import WorkerRank
from kvscout_gateway.patience import Pulse

EVENTFUL_KEPT = 16
"""One would do to find that a worker's events never come; people want to see that it was no accident."""


@dataclass(slots=True)
class Observation:
    """Totals of one worker rank since start, or of all."""

    requests: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    """Dispatched."""
    cached_tokens: int = 0
    reported_tokens: int = 0
    """Prompt tokens of requests whose cached tokens the engine reported."""
    checked: int = 0
    """Requests whose prediction was compared with the engine's report."""
    mispredicted: int = 0
    prediction_error_tokens: int = 0
    eventful: deque[float] = field(default_factory=lambda: deque(maxlen=EVENTFUL_KEPT))
    """When the last requests were dispatched that ran to their end and computed a block of their prompt, in seconds on
    the clock of Generate: whoever hears the worker's events heard of each."""

    pulse: Pulse = field(default_factory=Pulse, compare=False)

    @property
    def hit_rate(self) -> float:
        """Cached / prompt tokens as the engine reports them, 0..1."""
        return self.cached_tokens / self.reported_tokens if self.reported_tokens else 0.0


def predicted_cached_tokens(overlap_blocks: int, isl_tokens: int, block_size: int) -> int:
    """What an engine will report as cached: it always recomputes the last prompt token.

    min(overlap, (isl - 1) // block_size) · block_size, in tokens.
    """
    if block_size <= 0 or isl_tokens <= 0:
        return 0
    return min(overlap_blocks, (isl_tokens - 1) // block_size) * block_size


def computes_a_block(isl_tokens: int, cached_tokens: int, block_size: int) -> bool:
    """Whether a prompt had a complete block that the engine did not have cached, and did not only recompute."""
    whole = predicted_cached_tokens(isl_tokens, isl_tokens, block_size)
    return cached_tokens < whole


class Observations:
    """Observations by worker rank: of those that are registered, no others."""

    def __init__(self, is_registered: Callable[[str, str], bool]) -> None:
        """Starts with nothing seen.

        Args:
            is_registered: Whether a worker is, by tenant and worker id.
        """
        self._is_registered = is_registered
        self.by_rank: dict[tuple[str, WorkerRank], Observation] = {}
        self.total = Observation()
        """Of all workers that ever were; tokens and predictions only."""

    def of(self, tenant: str, worker: WorkerRank) -> Observation:
        """The totals of a worker rank; of one that is not registered, a record that nobody keeps."""
        seen = self.by_rank.get((tenant, worker))
        if seen is None:
            seen = Observation()
            if self._is_registered(tenant, worker.worker_id):
                self.by_rank[tenant, worker] = seen
        return seen

    def reported(self, seen: Observation, *, isl_tokens: int, cached: int, predicted: int | None) -> None:
        """Records what an engine reported, in tokens.

        Args:
            seen: Of the worker.
            isl_tokens: Prompt length.
            cached: What the engine says it had cached.
            predicted: What we thought; None = nothing was known.
        """
        for totals in (seen, self.total):
            totals.reported_tokens += isl_tokens
            totals.cached_tokens += cached
            if predicted is not None:
                totals.checked += 1
                totals.mispredicted += predicted != cached
                totals.prediction_error_tokens += abs(predicted - cached)

    def forget(self, tenant: str, worker_id: str) -> None:
        """Drops a removed worker's totals."""
        for key in [k for k in self.by_rank if k[0] == tenant and k[1].worker_id == worker_id]:
            del self.by_rank[key]
