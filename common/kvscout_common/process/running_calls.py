"""The calls that a server has taken and not yet answered, so that it can stop when there are none.

Some last as long as their caller likes: watches, logs, and streams between services. A server that stops ends them;
every other call is work that somebody waits for, and comes to its end by itself.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Protocol

from kvscout_common.errors import Draining

log = logging.getLogger("kvscout.serving")

ENDLESS = frozenset(
    {
        "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/kvscout.v1.Gateway/RecordRequests",
        "/kvscout.v1.Indexer/PublishEvents",
        "/kvscout.v1.Indexer/StreamFindMatches",
        "/kvscout.v1.Scheduler/Lifecycle",
        "/kvscout.v1.Scheduler/WatchDecisions",
        "/kvscout.v1.Scheduler/WatchLoads",
    }
)
"""Full names of the rpcs that have no end of their own."""

HEADERS_SECONDS = 0.1
"""Time of the last calls that came to send their headers: one that is ended meanwhile can send no status any more."""
CANCEL_AGAIN_SECONDS = 0.5
"""After that, an endless call that still runs is ended again: what it waits for may have swallowed the first time."""
MAX_CANCELS = 20
"""So often, while nothing else runs; a call that has not ended then is left."""


class RunningCall(Protocol):
    """The task of a call, or what there is in its place."""

    def cancel(self) -> object:
        """End it."""


class RunningCalls:
    """Those of one server."""

    def __init__(self) -> None:
        self._running: dict[RunningCall, str] = {}
        """The method of each."""
        self._none = asyncio.Event()
        """Set by the last one that ends."""
        self._finishing = False

    def begin(self, call: RunningCall, method: str) -> None:
        """Record the begin of a call.

        Raises:
            Draining: It is endless, and the server stops.
        """
        if self.ends(method):
            raise draining()
        self._running[call] = method

    def end(self, call: RunningCall) -> None:
        """Record the end of a call."""
        del self._running[call]
        if not self._running:
            self._none.set()

    def ends(self, method: str) -> bool:
        """Return whether calls of a method are ended, as the server stops."""
        return self._finishing and method in ENDLESS

    async def finish(self) -> None:
        """End the endless calls with `Draining`, so that their callers turn to another server, and wait for all
        others.

        From here on no endless call begins. `stopping` waits until the last answers are read.
        """
        self._finishing = True
        await asyncio.sleep(HEADERS_SECONDS)
        cancels = 0
        while self._running and cancels < MAX_CANCELS:
            endless = [call for call, method in self._running.items() if method in ENDLESS]
            for call in endless:
                call.cancel()
            cancels = cancels + 1 if len(endless) == len(self._running) else 0
            self._none.clear()
            if not self._running:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_AGAIN_SECONDS):
                    await self._none.wait()
        if self._running:
            log.error("abandoned calls that do not end: %s", ", ".join(sorted(set(self._running.values()))))


def draining() -> Draining:
    """Return the error for callers of endless calls."""
    return Draining("the service is draining")
