"""The cluster: workers and their speeds, gateways, replicas of the scheduler, latencies, and faults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from kvscout_common.errors import ConfigError
from kvscout_lab.simulation.worker import EngineSettings


@dataclass(frozen=True, slots=True)
class Latencies:
    """In milliseconds."""

    route_ms: float = 2.0
    """From a request's arrival at its gateway until the worker has it."""
    report_ms: float = 1.0
    """From a token at the worker until the scheduler has its report."""
    event_ms: float = 10.0
    """From a step's plan until the index knows what it stored and removed."""
    sync_ms: float = 20.0
    """From a change at one replica of the scheduler until the others know of it."""
    transfer_ms: float = 2.0
    """Base time of each transfer of blocks from a prefill to a decode worker."""
    transfer_us_per_token: float = 5.0
    """Time that each token of a transfer adds."""


@dataclass(frozen=True, slots=True)
class Faults:
    """At which share of the time in which flows come; None = not at all."""

    restart_scheduler: float | None = None
    """Every replica of the scheduler loses all that it knows. Requests that come meanwhile wait; when it is back,
    gateways book there what runs, as they do."""
    scheduler_down_seconds: float = 1.0
    restart_gateway: float | None = None
    """The first gateway. Its bookings end by themselves, without a Free; its clients retry."""
    abort_seconds: float = 0.5
    """Delay after which engines abort requests that have no reader."""
    retry_seconds: float = 1.0
    """Delay after which clients retry."""
    recover_worker: float | None = None
    """Share at which the first worker gets its full speed."""
    slow_speed: float = 0.2
    """Speed of that worker until then."""

    def validate(self) -> Faults:
        """Itself, if every setting is in range.

        Raises:
            ConfigError: Naming the first that is not.
        """
        for name in ("restart_scheduler", "restart_gateway", "recover_worker"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise ConfigError("must be between 0 and 1", field=name)
        for name in ("scheduler_down_seconds", "abort_seconds", "retry_seconds"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError("must be a finite number of at least 0", field=name)
        if not 0 < self.slow_speed < math.inf:
            raise ConfigError("must be a positive number", field="slow_speed")
        return self


NO_FAULTS = Faults()


class Picture(StrEnum):
    """What gateways believe of the workers' caches."""

    EXACT = "exact"
    """What the engines' events say."""
    LRU = "lru"
    """The last blocks that the gateway itself routed there, as many as fit into the cache."""
    TREE = "tree"
    """All that it ever routed there."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Settings of a cluster."""

    workers: int = 16
    """Those that decode."""
    prefill_workers: int = 0
    """Those that only compute prompts; 0 = every worker does both."""
    engine: EngineSettings = EngineSettings()
    speeds: tuple[float, ...] = ()
    """Speeds of the first workers, in multiples of the others' speed."""
    prefill_speeds: tuple[float, ...] = ()
    """In computing prompts, beside `speeds`."""
    decode_speeds: tuple[float, ...] = ()
    """In all else, beside `speeds`."""
    adapters: int = 0
    """LoRA adapters; each is loaded on every other worker. 0 = none."""
    gateways: int = 1
    replicas: int = 1
    """Replicas of the scheduler; gateways are spread over them."""
    latencies: Latencies = Latencies()
    tells_output: bool = False
    """Gateways report the length of each output in advance."""
    expects_max_tokens: bool = False
    """Gateways take a client's `max_tokens` for the expected length, instead of for a limit."""
    lost_events: float = 0.0
    """Share of the batches of KV events that the index never sees."""
    picture: Picture = Picture.EXACT
    sessions_hashed: bool = False
    """Each session has one gateway; else each request goes to the next one."""
    bypass: float = 0.0
    """Share of the sessions that another balancer sends to the workers in turn, past all gateways."""
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
        for name in ("lost_events", "bypass"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError("must be between 0 and 1", field=name)
        self.faults.validate()
        if self.prefill_workers:
            self._require_no_pools()
        self.engine.validate()
        return self

    def _require_no_pools(self) -> None:
        usual = {
            "restart_gateway": self.faults.restart_gateway is None,
            "bypass": not self.bypass,
            "picture": self.picture is Picture.EXACT,
        }
        for name in (name for name, is_usual in usual.items() if not is_usual):
            raise ConfigError("is simulated with workers that do both only", field=name)

    def speeds_of(self, number: int) -> tuple[float, float]:
        """Return the speeds of a worker, in computing prompts and in all else."""
        both, prefill, decode = (
            each[number] if number < len(each) else 1.0
            for each in (self.speeds, self.prefill_speeds, self.decode_speeds)
        )
        return both * prefill, both * decode
