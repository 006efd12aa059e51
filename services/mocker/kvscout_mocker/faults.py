"""Faults on demand: events that never arrive or arrive twice, an engine that hangs, crashes, fails or says nothing.

They make the mocker what engines are on a bad day, so that whatever follows its events can be tested against the truth
(`GET /mock/kv_blocks`). Draws come from a seed that the ready line names.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NoReturn

from kvscout_common.errors import ConfigError, InvalidArgument

log = logging.getLogger(__name__)

BOUND_VARIABLE = "MOCKER_BOUND_PORTS"
"""Environment of a restarted mocker: the ports that it had."""
MAX_STALL_SECONDS = 600.0
FAIL_WITHIN_TOKENS = 4
"""A request that fails has fewer tokens than this."""

SHARES = ("drop_events", "duplicate_events", "mute_requests", "fail_requests")
"""Faults that hit a share of batches or requests, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """Faults from the start of a process."""

    seed: int = 0
    drop_events: float = 0.0
    """Share of batches that are not sent live; the replay socket has them."""
    duplicate_events: float = 0.0
    """Share of batches that are sent twice."""
    mute_requests: float = 0.0
    """Share of streamed requests that get pings and never a token, while others are served."""
    fail_requests: float = 0.0
    """Share of requests that fail in the engine, before a token or after a few: a stream says so within its 200."""
    crash_after: int = 0
    """The process dies, as by SIGKILL, once rank 0 has published this number of batches; 0 = never."""
    stall_after: int = 0
    """The process hangs once rank 0 has published this number of batches; 0 = never."""
    stall_seconds: float = 0.0
    no_replay: bool = False
    """There is no replay socket."""


class Faults:
    """Draws the faults of batches and requests; one for all ranks of a process.

    Args:
        config: Faults from the start.
    """

    def __init__(self, config: FaultConfig) -> None:
        self.config = config
        self.dropped = 0
        self.duplicated = 0
        self._shares: dict[str, float] = {name: getattr(config, name) for name in SHARES}
        self._rng = Random(config.seed)
        # Of their own, so that events meet the same fate whatever becomes of requests.
        self._requests_rng = Random(f"{config.seed} requests")

    def set_shares(self, **shares: float) -> None:
        """Change some of the `SHARES` from now on.

        Raises:
            InvalidArgument: A share is not between 0 and 1.
        """
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise InvalidArgument("must be between 0 and 1", field=name)
        self._shares |= shares

    def mutes(self) -> bool:
        """Draw if the next streamed request gets no token."""
        return self._requests_rng.random() < self._shares["mute_requests"]

    def fails_after(self) -> int | None:
        """Draw the tokens that the next request gets before it fails; None: it does not fail."""
        if not self._shares["fail_requests"] or self._requests_rng.random() >= self._shares["fail_requests"]:
            return None
        return self._requests_rng.randrange(FAIL_WITHIN_TOKENS)

    def deliveries(self) -> int:
        """Draw the copies of the next batch that are sent live."""
        if self._shares["drop_events"] and self._rng.random() < self._shares["drop_events"]:
            self.dropped += 1
            return 0
        if self._shares["duplicate_events"] and self._rng.random() < self._shares["duplicate_events"]:
            self.duplicated += 1
            return 2
        return 1

    def published(self, batches: int) -> None:
        """Take note of the batches published by rank 0; may hang or end the process."""
        if batches == self.config.stall_after:
            stall(self.config.stall_seconds)
        if batches == self.config.crash_after:
            crash()


def stall(seconds: float) -> None:
    """Hang the process: no step, no answer, no replay; sockets stay open.

    Raises:
        InvalidArgument: `seconds` is out of range.
    """
    if not 0 <= seconds <= MAX_STALL_SECONDS:
        raise InvalidArgument(f"must be between 0 and {MAX_STALL_SECONDS:g}", field="stall_seconds")
    log.warning("hanging for %g s", seconds)
    time.sleep(seconds)


def crash() -> NoReturn:
    """End the process as SIGKILL does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL returns to nobody")


@dataclass(frozen=True, slots=True)
class BoundPorts:
    """Ports of a mocker before its restart, one event and replay port a rank (0: it had no replay socket)."""

    port: int
    bootstrap: int
    """0: it had no bootstrap server."""
    events: tuple[int, ...]
    replay: tuple[int, ...]
    grpc: int
    """0: it had no gRPC server."""

    @classmethod
    def from_environment(cls) -> BoundPorts | None:
        """Return the ports that `restart` left behind; None in a process that was not restarted.

        Raises:
            ConfigError: The variable holds something else.
        """
        value = os.environ.pop(BOUND_VARIABLE, "")
        if not value:
            return None
        try:
            port, bootstrap, events, replay, grpc = json.loads(value)
            return cls(int(port), int(bootstrap), tuple(map(int, events)), tuple(map(int, replay)), int(grpc))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{value!r} are not ports", field=BOUND_VARIABLE) from error


def restart(bound: BoundPorts, extra_flags: Sequence[str]) -> NoReturn:
    """Replace the process by a new one on the same ports: caches, sequence numbers and hash seeds start anew.

    Args:
        bound: The ports.
        extra_flags: Added to the command line of this process.
    """
    os.environ[BOUND_VARIABLE] = json.dumps([bound.port, bound.bootstrap, bound.events, bound.replay, bound.grpc])
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *extra_flags])
