"""What goes wrong in a run, and when: as shares of the time in which flows come, so that it does at every rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvscout_common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Faults:
    """At which share of the time in which flows come; None = not at all."""

    restart_scheduler: float | None = None
    """Every replica of the scheduler loses all that it knows. Requests that come meanwhile wait; when it is back,
    gateways book there what runs, as they do."""
    scheduler_down_seconds: float = 1.0
    restart_gateway: float | None = None
    """The first gateway. Its bookings end by themselves, without a Free; its clients ask again."""
    abort_seconds: float = 0.5
    """After which engines stop what nobody reads any more."""
    retry_seconds: float = 1.0
    """After which clients ask again."""
    recover_worker: float | None = None
    """When the first worker becomes as fast as it should be."""
    slow_speed: float = 0.2
    """Of that worker until then."""

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
