"""Settings of a scheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvscout_common.errors import ConfigError
from kvscout_common.worker import Role
from kvscout_scheduler.values.overlaps import DEFAULT_TIER_WEIGHTS, TierWeights
from kvscout_scheduler.values.reservation import MAX_LEASE_SECONDS
from kvscout_scheduler.values.targets import NO_TARGETS, Targets
from kvscout_scheduler.values.thresholds import NO_THRESHOLDS, BusyThresholds

MAX_COOLDOWN_SECONDS = 60.0
"""Any client may report a failure: a worker that is well is back after this."""


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """Order of requests that wait, besides their priorities."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of a caller (name of a token, or the tenant) or of a fairness id; others have 1."""
    aged_share: float = 0.1
    """Share of the estimated seconds that lower priorities get once they have waited for long; 0 = none."""
    aged_seconds: float = 10.0
    """Time after which a request has waited for long."""

    def validate(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: Naming the first that is wrong.
        """
        for name, weight in self.weights.items():
            if not name or not (math.isfinite(weight) and weight > 0):
                raise ConfigError(
                    f"{name!r} needs a name, and a finite weight above 0, not {weight}", field="fairness_weight"
                )
        if not 0 <= self.aged_share < 1:
            raise ConfigError(f"must be at least 0 and below 1, not {self.aged_share}", field="queue_aged_share")
        if not (math.isfinite(self.aged_seconds) and self.aged_seconds >= 0):
            raise ConfigError(
                f"must be a finite number of at least 0, not {self.aged_seconds}", field="queue_aged_seconds"
            )


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Settings of one scheduler."""

    policy: str = "kv-time"
    """Policy where a request names none."""
    session_reuse_weight: float = 0.0
    """Of what `kv-time` evicts and would soon be used again; 0 = what caches hold of sessions is not followed."""
    overlap_score_weight: float = 1.0
    """0 = prefix caches are ignored."""
    router_temperature: float = 0.0
    """0 = always the cheapest worker."""
    tier_weights: TierWeights = DEFAULT_TIER_WEIGHTS
    cpu_to_gpu_ratio: float = 8.0
    """Requests that an accelerator carries in the time of one CPU worker; policy device-aware-weighted."""
    track_active_blocks: bool = True
    """Prefill pools never track them."""
    track_output_blocks: bool = False
    thresholds: BusyThresholds = NO_THRESHOLDS
    """Thresholds of models that have none of their own."""
    lease_seconds: float = 300.0
    """Lease of bookings of unary callers, where the call names none."""
    owner_grace_seconds: float = 10.0
    """Time for which an owner's stream may be gone before its bookings end."""
    worker_grace_seconds: float = 30.0
    """Time for which a worker whose registration ended keeps its bookings: it may come back to them."""
    engine_metrics_seconds: float = 30.0
    """Time for which a report of an engine counts."""
    tombstone_seconds: float = 60.0
    """Time for which ended attempts are remembered."""
    max_tombstones: int = 262_144
    """Ended attempts remembered at most; 60 s of 4,000 requests a second."""
    cooldown_seconds: float = 10.0
    """Time for which a worker that failed a request is left out."""
    expiry_seconds: float = 0.5
    """Time between two calls of `Scheduler.expire`: a fraction of the shortest lease, one second."""
    max_active_requests: int = 1_000_000
    tenant_share: float = 0.5
    """Share of `max_active_requests` that one tenant may hold while others have workers."""
    queue_threshold: float | None = None
    """Requests wait while all workers have more active prefill tokens than this times max_num_batched_tokens;
    None = nobody waits."""
    queue_limit: int = 1_024
    """Requests that wait in one pool; more are refused."""
    queue_order: QueueOrder = field(default_factory=QueueOrder)
    revision_weights: Mapping[str, float] = field(default_factory=dict)
    """Share of sessions by the revision label of workers, relative to the others'; "" = workers without it. Empty = the
    policy alone decides."""
    targets: Targets = NO_TARGETS
    """Targets of requests that bring none, for models that have none of their own; policy kv-time."""
    model_targets: Mapping[str, Targets] = field(default_factory=dict)
    """By model."""

    def targets_of(self, model: str, own: Targets) -> Targets:
        """Return the targets of a request.

        Args:
            model: Model that it is for.
            own: Targets that it brings.
        """
        return own.or_else(self.model_targets.get(model, NO_TARGETS)).or_else(self.targets)

    @property
    def longest_cooldown_seconds(self) -> float:
        """Return the seconds for which one report of a failure leaves a worker out at most."""
        return max(MAX_COOLDOWN_SECONDS, self.cooldown_seconds)

    def tracks_blocks(self, role: Role) -> bool:
        """Return whether requests on workers of a role occupy blocks; a prefill worker gives them away at once."""
        return self.track_active_blocks and role is not Role.PREFILL

    def validate(self) -> SchedulerSettings:
        """Return itself, if every setting is in range.

        Raises:
            ConfigError: Naming the first that is not.
        """
        for name in (
            "overlap_score_weight",
            "session_reuse_weight",
            "router_temperature",
            "owner_grace_seconds",
            "cooldown_seconds",
            "worker_grace_seconds",
        ):
            value: float = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"must be a finite number of at least 0, not {value}", field=name)
        for name in (
            "lease_seconds",
            "engine_metrics_seconds",
            "tombstone_seconds",
            "max_tombstones",
            "expiry_seconds",
            "max_active_requests",
            "cpu_to_gpu_ratio",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"must be a finite number above 0, not {value}", field=name)
        if self.lease_seconds > MAX_LEASE_SECONDS:
            raise ConfigError(f"must be at most {MAX_LEASE_SECONDS}, not {self.lease_seconds}", field="lease_seconds")
        if self.queue_threshold is not None and not (math.isfinite(self.queue_threshold) and self.queue_threshold >= 0):
            raise ConfigError(
                f"must be a finite number of at least 0, not {self.queue_threshold}", field="queue_threshold"
            )
        if not 0 < self.tenant_share <= 1:
            raise ConfigError(f"must be above 0 and at most 1, not {self.tenant_share}", field="tenant_share")
        if self.queue_limit < 1:
            raise ConfigError("must be at least 1", field="queue_limit")
        for name in ("host", "disk"):
            weight: float = getattr(self.tier_weights, name)
            if not 0 <= weight <= 1:
                raise ConfigError(f"must be between 0 and 1, not {weight}", field=f"{name}_weight")
        _check_revision_weights(self.revision_weights)
        self.thresholds.validate()
        self.queue_order.validate()
        for targets in (self.targets, *self.model_targets.values()):
            targets.validate()
        return self


def _check_revision_weights(weights: Mapping[str, float]) -> None:
    for revision, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"{revision!r} needs a finite weight of at least 0, not {weight}", field="revision_weight"
            )
    if weights and not any(weights.values()):
        raise ConfigError("at least one weight must be above 0", field="revision_weight")
