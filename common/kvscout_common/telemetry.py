"""Logs and metrics of a process."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

SCRAPE_SECONDS = 10.0
"""Longest wait of a scrape for the event loop: Prometheus' own default timeout."""


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure_logging(level: str, log_format: str) -> None:
    """Sends log lines to stderr; stdout is kept for what a command prints.

    Args:
        level: "debug", "info", "warning" or "error".
        log_format: "text" or "json" (one object a line).
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonFormatter()
        if log_format == "json"
        else logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    )
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

    def warning(self, key: Hashable, message: str, *args: object) -> None:
        """Logs a warning, unless one of the same key was logged within the period."""
        now = self._clock()
        last = self._last.get(key)
        if last is not None and now - last[0] < self._period:
            self._last[key] = (last[0], last[1] + 1)
            return
        if last is None and len(self._last) >= self._max_keys:
            self._last.pop(next(iter(self._last)))
        self._last[key] = (now, 0)
        suffix = f" ({last[1]} more since)" if last is not None and last[1] else ""
        self._log.warning(message + "%s", *args, suffix)


class _OnLoop(Collector):
    """Has a collector read on the event loop that owns what it reads; scrapes come from threads of their own."""

    def __init__(self, collector: Collector, loop: asyncio.AbstractEventLoop) -> None:
        self._collector = collector
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are checked by nobody, and reading them here would wait for the loop that registers."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Samples of now, once the loop gets to it."""

        async def read() -> list[Metric]:
            return list(self._collector.collect())

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(SCRAPE_SECONDS)


def registry_of(collector: Collector) -> CollectorRegistry:
    """A Prometheus registry with one collector, which reads a service's state, on the running loop, when scraped."""
    registry = CollectorRegistry()
    registry.register(_OnLoop(collector, asyncio.get_running_loop()))
    return registry


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> tuple[int, Callable[[], None]]:
    """Serves /metrics from a thread of its own.

    Args:
        registry: What to expose.
        host: Address to bind.
        port: 0 = any free port.

    Returns:
        The port, and a function that stops serving.

    Raises:
        OSError: If the port is taken.
    """
    server, thread = start_http_server(port, addr=host, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
