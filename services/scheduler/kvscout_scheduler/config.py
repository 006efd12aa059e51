"""Configuration of a scheduler process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kvscout_common.errors import ConfigError, InvalidArgument
from kvscout_common.nats.config import NatsConfig
from kvscout_common.settings.config import ServerConfig
from kvscout_scheduler.values.settings import QueueOrder, SchedulerSettings
from kvscout_scheduler.values.targets import Targets
from kvscout_scheduler.values.thresholds import BusyThresholds

SCRAPES_THAT_COUNT = 3
"""Failed scrapes in a row after which an engine's last metrics expire."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Configuration of one scheduler process."""

    server: ServerConfig = field(default_factory=ServerConfig)
    nats: NatsConfig | None = None
    """None = runs without NATS."""
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    seed: int | None = None
    """Seed of the random draws; None = from the system."""
    scrape_seconds: float = 0.0
    """Between two looks at the engines' own metrics; 0 = never."""
    replica_id: str = ""
    """Name among the replicas that share bookings; "" = it shares them with nobody."""

    @classmethod
    def from_flags(cls, values: Mapping[str, Any]) -> SchedulerConfig:
        """Take the values of `flags.scheduler_flags` and of those that servers share.

        Raises:
            ConfigError: If they contradict one another; names the flag.
        """
        return cls(
            server=ServerConfig.from_flags(values),
            nats=NatsConfig.from_flags(values),
            settings=SchedulerSettings(
                policy=values["router_mode"],
                overlap_score_weight=values["kv_overlap_score_weight"],
                session_reuse_weight=values["session_reuse_weight"],
                router_temperature=values["router_temperature"],
                cpu_to_gpu_ratio=values["cpu_to_gpu_ratio"],
                track_active_blocks=not values["no_track_active_blocks"],
                track_output_blocks=values["router_track_output_blocks"],
                thresholds=BusyThresholds(
                    values["active_decode_blocks_threshold"], values["active_prefill_tokens_threshold"]
                ),
                cooldown_seconds=values["worker_cooldown_seconds"],
                lease_seconds=values["lease_seconds"],
                worker_grace_seconds=values["worker_grace_seconds"],
                engine_metrics_seconds=max(
                    values["engine_metrics_seconds"], SCRAPES_THAT_COUNT * values["scrape_engine_metrics"]
                ),
                max_active_requests=values["max_active_requests"],
                tenant_share=values["tenant_share"],
                queue_threshold=values["router_queue_threshold"],
                queue_limit=values["router_queue_limit"],
                queue_order=QueueOrder(
                    weights=_weights(values["fairness_weight"], "fairness_weight"),
                    aged_share=values["queue_aged_share"],
                    aged_seconds=values["queue_aged_seconds"],
                ),
                revision_weights=_weights(values["revision_weight"], "revision_weight"),
                targets=Targets(_seconds(values["ttft_target_ms"]), _seconds(values["itl_target_ms"])),
                model_targets=_model_targets(values["model_target"]),
            ).validate(),
            seed=values["seed"],
            scrape_seconds=values["scrape_engine_metrics"],
            replica_id=_replica_id(values),
        )


def _weights(texts: Iterable[str], flag: str) -> dict[str, float]:
    """Return the weights of a flag by name; their ranges are checked with the other settings."""
    found = {}
    for text in texts:
        name, equals, weight = text.rpartition("=")
        try:
            found[name] = float(weight if equals else "")
        except ValueError as error:
            raise ConfigError(f"{text!r} is not NAME=WEIGHT", field=flag) from error
    return found


def _seconds(milliseconds: float | None) -> float:
    return inf if milliseconds is None else milliseconds / 1000


def _model_targets(texts: Iterable[str]) -> dict[str, Targets]:
    """Return targets by model."""
    found = {}
    for text in texts:
        model, _, targets = text.rpartition("=")
        try:
            ttft, itl = (float(part) if part else None for part in targets.split(":"))
            found[model] = Targets(_seconds(ttft), _seconds(itl)).validate()
        except ValueError as error:
            raise ConfigError(f"{text!r} is not MODEL=TTFT_MS:ITL_MS", field="model_target") from error
        except InvalidArgument as error:
            raise ConfigError(f"{text!r}: {error.message}", field="model_target") from error
        if not model:
            raise ConfigError(f"{text!r} names no model", field="model_target")
    return found


def _replica_id(values: Mapping[str, Any]) -> str:
    """Return the name among the replicas; "" = there are none."""
    if not values["router_replica_sync"]:
        return ""
    if not any(values["nats_server"]):
        raise ConfigError("needs --nats-server", field="router_replica_sync")
    # Without a port of its own the process distinguishes it from others on this host.
    return str(values["replica_id"] or f"{socket.gethostname()}:{values['port'] or f'pid-{os.getpid()}'}")
