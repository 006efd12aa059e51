"""The calls that a server has taken and not yet answered, so that it can stop when there are none.

Some last as long as their caller likes: watches, and streams between services. A server that stops ends them; every
other call is work that somebody waits for, and comes to its end by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import grpc

from kvscout_common.errors import Draining
from kvscout_common.handlers import Context, Continuation, Handler, wrap

log = logging.getLogger("kvscout.serving")

ENDLESS = frozenset(
    {
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
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
TELL_AGAIN_SECONDS = 0.5
"""After that, an endless call that still runs is ended again: what it waits for may have swallowed the first time."""
TIMES_TOLD = 20
"""So often, while nothing else runs; a call that has not ended then is left."""


class RunningCalls(grpc.aio.ServerInterceptor):
    """The interceptor that knows them."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], str] = {}
        """The method of each call, by its task."""
        self._none = asyncio.Event()
        """Set by the last one that ends."""
        self._finishing = False

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        return wrap(handler, _Call(self, handler_call_details.method))

    async def finish(self) -> None:
        """Ends the endless calls with `Draining`, so that their callers go elsewhere, and waits for all others.

        From here on no endless call begins. That the last answers are read is waited for elsewhere.
        """
        self._finishing = True
        await asyncio.sleep(HEADERS_SECONDS)
        told = 0
        while self._running and told < TIMES_TOLD:
            endless = [task for task, method in self._running.items() if method in ENDLESS]
            for task in endless:
                task.cancel()
            told = told + 1 if len(endless) == len(self._running) else 0
            self._none.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(TELL_AGAIN_SECONDS):
                    await self._none.wait()
        if self._running:
            log.error("calls that do not end are left: %s", ", ".join(sorted(set(self._running.values()))))

    @asynccontextmanager
    async def running(self, method: str) -> AsyncIterator[None]:
        """Surrounds a call in its own task.

        Raises:
            Draining: It is endless, and the server stops.
        """
        endless = method in ENDLESS
        if endless and self._finishing:
            raise _draining()
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = method
        try:
            yield
        except asyncio.CancelledError:
            # A caller that goes away meanwhile has cancelled it as well, and is told nothing.
            if not (endless and self._finishing):
                raise
            while task.cancelling():
                task.uncancel()
            raise _draining() from None
        finally:
            del self._running[task]
            if not self._running:
                self._none.set()


def _draining() -> Draining:
    return Draining("the service is draining")


class _Call:
    def __init__(self, calls: RunningCalls, method: str) -> None:
        self._calls = calls
        self._method = method

    def check(self, request: Any) -> None:
        """Nothing to check: this interceptor looks at when calls end only."""

    def around(self, context: Context) -> AbstractAsyncContextManager[None]:
        return self._calls.running(self._method)
