"""What serves a workload: workers and how fast they are, gateways, replicas of the scheduler, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass

from kvscout_common.errors import ConfigError
from kvscout_lab.faults import NO_FAULTS, Faults
from kvscout_lab.latencies import Latencies
from kvscout_lab.worker import EngineSettings


@dataclass(frozen=True, slots=True)
class Cluster:
    """What serves a workload."""

    workers: int = 16
    """Those that decode."""
    prefill_workers: int = 0
    """Those that only compute prompts; 0 = every worker does both."""
    engine: EngineSettings = EngineSettings()
    speeds: tuple[float, ...] = ()
    """Of the first workers, in those of the others."""
    prefill_speeds: tuple[float, ...] = ()
    """In computing prompts, beside `speeds`."""
    decode_speeds: tuple[float, ...] = ()
    """In all else, beside `speeds`."""
    adapters: int = 0
    """LoRA adapters; each is loaded on every other worker. 0 = none."""
    gateways: int = 1
    replicas: int = 1
    """Of the scheduler; gateways are spread over them."""
    latencies: Latencies = Latencies()
    tells_output: bool = False
    """Whether gateways say how long the output is going to be."""
    expects_max_tokens: bool = False
    """Whether gateways take a client's `max_tokens` for what it expects, instead of for a bound."""
    lost_events: float = 0.0
    """Share of the batches of KV events that the index never sees."""
    faults: Faults = NO_FAULTS
    seed: int = 0

    def validate(self) -> Cluster:
        """Itself, if every setting is in range.

        Raises:
            ConfigError: Naming the first that is not.
        """
        for name in ("workers", "gateways", "replicas"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", field=name)
        if self.prefill_workers < 0:
            raise ConfigError("must not be negative", field="prefill_workers")
        total = self.workers + self.prefill_workers
        for name in ("speeds", "prefill_speeds", "decode_speeds"):
            speeds = getattr(self, name)
            if len(speeds) > total:
                raise ConfigError(f"there are {total} workers", field=name)
            if not all(0 < speed < float("inf") for speed in speeds):
                raise ConfigError("must be positive numbers", field=name)
        if self.adapters < 0:
            raise ConfigError("must not be negative", field="adapters")
        if self.adapters and total < 2:
            raise ConfigError("each is on every other worker: there must be two", field="adapters")
        if not 0 <= self.lost_events <= 1:
            raise ConfigError("must be between 0 and 1", field="lost_events")
        self.faults.validate()
        if self.faults.restart_gateway is not None and self.prefill_workers:
            raise ConfigError("is simulated with workers that do both only", field="restart_gateway")
        self.engine.validate()
        return self

    def speeds_of(self, number: int) -> tuple[float, float]:
        """Of a worker, in computing prompts and in all else."""
        both, prefill, decode = (
            each[number] if number < len(each) else 1.0
            for each in (self.speeds, self.prefill_speeds, self.decode_speeds)
        )
        return both * prefill, both * decode
