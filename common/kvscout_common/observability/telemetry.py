"""Logs of a process."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Hashable

from kvscout_common.observability.log_lines import BoundedFormatter, GoneClientFilter, JsonFormatter, RateFilter


def configure_logging(level: str, log_format: str) -> None:
    """Send log lines to stderr; stdout is kept for what a command prints.

    Args:
        level: "debug", "info", "warning" or "error".
        log_format: "text" or "json" (one object a line).
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter()
        if log_format == "json"
        else BoundedFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    handler.addFilter(GoneClientFilter())
    handler.addFilter(RateFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class RateLimitedLog:
    """Logs at most one message a key and period, and says how many it left out. Bounded."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        period_seconds: float = 60.0,
        max_keys: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._period = period_seconds
        self._max_keys = max_keys
        self._clock = clock
        self._last: dict[Hashable, tuple[float, int]] = {}

    def warning(self, key: Hashable, message: str, *args: object, error: BaseException | None = None) -> None:
        """Log a warning, with the traceback of an error if one is given, unless one of the same key was logged within
        the period."""
        now = self._clock()
        last = self._last.get(key)
        if last is not None and now - last[0] < self._period:
            self._last[key] = (last[0], last[1] + 1)
            return
        if last is None and len(self._last) >= self._max_keys:
            self._last.pop(next(iter(self._last)))
        self._last[key] = (now, 0)
        suffix = f" ({last[1]} more since)" if last is not None and last[1] else ""
        # The place in the code that logs is the caller's.
        self._log.warning(message + "%s", *args, suffix, exc_info=error, stacklevel=2)
