"""State of a kvscout at one time beside the statuses of its services: load, and rates. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvscout.v1 import gateway_pb2, scheduler_pb2
from kvscout_common.doctor.overview import reported_prompt_tokens
from kvscout_common.doctor.snapshot import RankName, Snapshot, observed_name


@dataclass(frozen=True, slots=True)
class Moment:
    """State of a kvscout at one time."""

    at: float
    """Seconds."""
    snapshot: Snapshot
    loads: Mapping[RankName, scheduler_pb2.WorkerLoad]

    @property
    def requests(self) -> int:
        """Return the number of requests that all gateways served since their start."""
        return sum(status.requests for _, status in self.snapshot.statuses(gateway_pb2.GatewayGetStatusResponse))

    def requests_per_second(self, before: Moment | None) -> float | None:
        """Return the requests per second since an earlier moment; None = there is none."""
        if before is None or self.at <= before.at:
            return None
        return max(0, self.requests - before.requests) / (self.at - before.at)

    @property
    def in_flight(self) -> int:
        """Return the running requests of all gateways."""
        return sum(status.in_flight for _, status in self.snapshot.statuses(gateway_pb2.GatewayGetStatusResponse))

    @property
    def failures(self) -> int:
        """Return the requests that failed by an engine's or the router's fault, of all gateways since their start."""
        return sum(
            # One of an older release does not say whose fault it was.
            _ours(status) if status.recent_seconds else status.failures
            for _, status in self.snapshot.statuses(gateway_pb2.GatewayGetStatusResponse)
        )

    @property
    def queued(self) -> int:
        """Return the requests that are queued at schedulers."""
        statuses = self.snapshot.statuses(scheduler_pb2.SchedulerGetStatusResponse)
        return sum(pool.queued for _, status in statuses for pool in status.pools)

    def hit_rate(self, before: Moment | None) -> float | None:
        """Return cached ÷ prompt tokens since an earlier moment or the gateways' start; None = nothing was reported."""
        earlier = before._tokens() if before is not None else {}
        prompt = cached = 0
        for rank, (prompt_now, cached_now) in self._tokens().items():
            prompt_before, cached_before = earlier.get(rank, (0, 0))
            if prompt_now >= prompt_before:  # else its gateway was started anew
                prompt += prompt_now - prompt_before
                cached += cached_now - cached_before
        return cached / prompt if prompt > 0 else None

    def _tokens(self) -> dict[tuple[str, RankName], tuple[int, int]]:
        """Return prompt and cached tokens by gateway and worker rank: ranks come and go between two moments."""
        return {
            (service.address, observed_name(one)): (reported_prompt_tokens(one), one.cached_tokens)
            for service, status in self.snapshot.statuses(gateway_pb2.GatewayGetStatusResponse)
            for one in status.workers
        }


def _ours(status: gateway_pb2.GatewayGetStatusResponse) -> int:
    caller = gateway_pb2.FAULT_OWNER_CALLER
    return sum(one.total for one in status.failure_counts if not one.answered and one.owner != caller)
