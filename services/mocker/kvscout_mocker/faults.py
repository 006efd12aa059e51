"""Faults on demand: events that never arrive or arrive twice, an engine that hangs, crashes, fails or says nothing.

They make the mocker what engines are on a bad day, so that whatever follows its events can be tested against the truth
(`GET /mock/kv_blocks`). Draws come from a seed that the ready line tells.
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


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """What goes wrong."""

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
    """The process dies, as by SIGKILL, once rank 0 has published so many batches; 0 = never."""
    stall_after: int = 0
    """The process hangs once rank 0 has published so many batches; 0 = never."""
    stall_seconds: float = 0.0
    no_replay: bool = False
    """There is no replay socket."""


class Faults:
    """Decides what becomes of each batch; one for all ranks of a process.

    Args:
        config: What goes wrong from the start.
    """

    def __init__(self, config: FaultConfig) -> None:
        self.config = config
        self.dropped = 0
        self.duplicated = 0
        self._drop_events = config.drop_events
        self._duplicate_events = config.duplicate_events
        self._mute_requests = config.mute_requests
        self._fail_requests = config.fail_requests
        self._rng = Random(config.seed)
        # Of their own, so that events meet the same fate whatever becomes of requests.
        self._requests_rng = Random(f"{config.seed} requests")

    def set_shares(
        self,
        *,
        drop_events: float | None = None,
        duplicate_events: float | None = None,
        mute_requests: float | None = None,
        fail_requests: float | None = None,
    ) -> None:
        """Changes shares from now on; None leaves one as it is.

        Raises:
            InvalidArgument: A share is not between 0 and 1.
        """
        given = {
            "drop_events": drop_events,
            "duplicate_events": duplicate_events,
            "mute_requests": mute_requests,
            "fail_requests": fail_requests,
        }
        for name, share in given.items():
            if share is not None and not 0 <= share <= 1:
                raise InvalidArgument("must be between 0 and 1", field=name)
        if drop_events is not None:
            self._drop_events = drop_events
        if duplicate_events is not None:
            self._duplicate_events = duplicate_events
        if mute_requests is not None:
            self._mute_requests = mute_requests
        if fail_requests is not None:
            self._fail_requests = fail_requests

    def mutes(self) -> bool:
        """Whether the next streamed request gets no token."""
        return self._requests_rng.random() < self._mute_requests

    def fails_after(self) -> int | None:
        """Tokens that the next request gets before it fails; None: it does not fail."""
        if not self._fail_requests or self._requests_rng.random() >= self._fail_requests:
            return None
        return self._requests_rng.randrange(FAIL_WITHIN_TOKENS)

    def deliveries(self) -> int:
        """How often the next batch is sent live."""
        if self._drop_events and self._rng.random() < self._drop_events:
            self.dropped += 1
            return 0
        if self._duplicate_events and self._rng.random() < self._duplicate_events:
            self.duplicated += 1
            return 2
        return 1

    def published(self, batches: int) -> None:
        """So many batches were published by rank 0; may hang or end the process."""
        if batches == self.config.stall_after:
            stall(self.config.stall_seconds)
        if batches == self.config.crash_after:
            crash()


def stall(seconds: float) -> None:
    """Hangs the process: no step, no answer, no replay; sockets stay open.

    Raises:
        InvalidArgument: `seconds` is out of range.
    """
    if not 0 <= seconds <= MAX_STALL_SECONDS:
        raise InvalidArgument(f"must be between 0 and {MAX_STALL_SECONDS:g}", field="stall_seconds")
    log.warning("hanging for %g s", seconds)
    time.sleep(seconds)


def crash() -> NoReturn:
    """Ends the process as SIGKILL does."""
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

    @classmethod
    def from_environment(cls) -> BoundPorts | None:
        """What `restart` left behind; None in a first life.

        Raises:
            ConfigError: The variable holds something else.
        """
        value = os.environ.pop(BOUND_VARIABLE, "")
        if not value:
            return None
        try:
            port, bootstrap, events, replay = json.loads(value)
            return cls(int(port), int(bootstrap), tuple(map(int, events)), tuple(map(int, replay)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{value!r} are no ports", field=BOUND_VARIABLE) from error


def restart(bound: BoundPorts, extra_flags: Sequence[str]) -> NoReturn:
    """Replaces the process by a new one on the same ports: caches, sequence numbers and hash seeds start anew.

    Args:
        bound: The ports.
        extra_flags: Added to the command line of this process.
    """
    os.environ[BOUND_VARIABLE] = json.dumps([bound.port, bound.bootstrap, bound.events, bound.replay])
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *extra_flags])
