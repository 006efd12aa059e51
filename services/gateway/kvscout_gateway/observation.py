"""What the gateway sees of each worker: requests, failures, and whether cache predictions came true. Soft state."""

from __future__ import annotations

from dataclasses import dataclass

from kvscout_common.worker import WorkerRank


@dataclass(slots=True)
class Observation:
    """Totals of one worker rank since start."""

    requests: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    checked: int = 0
    mispredicted: int = 0
    prediction_error_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Cached / prompt tokens, 0..1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def predicted_cached_tokens(overlap_blocks: int, isl_tokens: int, block_size: int) -> int:
    """What an engine will report as cached: it always recomputes the last prompt token.

    min(overlap, (isl - 1) // block_size) · block_size, in tokens.
    """
    if block_size <= 0 or isl_tokens <= 0:
        return 0
    return min(overlap_blocks, (isl_tokens - 1) // block_size) * block_size


class Observations:
    """Observations by worker rank; as many as there are workers."""

    def __init__(self) -> None:
        self.by_rank: dict[tuple[str, WorkerRank], Observation] = {}

    def of(self, tenant: str, worker: WorkerRank) -> Observation:
        """The totals of a worker rank, made when first asked for."""
        return self.by_rank.setdefault((tenant, worker), Observation())

    def check(
        self, tenant: str, worker: WorkerRank, *, isl_tokens: int, predicted: int, cached: int
    ) -> tuple[Observation, int]:
        """Records what an engine reported against what was predicted, both in tokens.

        Returns:
            The worker's totals and the error of this request, in tokens.
        """
        totals = self.of(tenant, worker)
        error = abs(predicted - cached)
        totals.checked += 1
        totals.prompt_tokens += isl_tokens
        totals.cached_tokens += cached
        totals.mispredicted += error > 0
        totals.prediction_error_tokens += error
        return totals, error

    def forget(self, tenant: str, worker_id: str) -> None:
        """Drops a removed worker's totals."""
        for key in [k for k in self.by_rank if k[0] == tenant and k[1].worker_id == worker_id]:
            del self.by_rank[key]
