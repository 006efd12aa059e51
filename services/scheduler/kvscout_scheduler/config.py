"""Configuration of a scheduler process."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvscout_common.nats.config import NatsConfig
from kvscout_common.settings.config import ServerConfig
from kvscout_scheduler.values.settings import SchedulerSettings


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
