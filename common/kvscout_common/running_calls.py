"""The calls that a server has taken and not yet answered, so that it can stop when there are none.

Some last as long as their caller likes: watches, and streams between services. A server that stops ends them; every
other call is work that somebody waits for, and comes to its end by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc

from kvscout_common.errors import Draining
from kvscout_common.handlers import Context, Continuation, Handler, wrap

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


class RunningCalls(grpc.aio.ServerInterceptor):
    """The interceptor that knows them."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], bool] = {}
        """Each call's task, and whether it is endless."""
        self._ended: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        return wrap(handler, _Call(self, endless=handler_call_details.method in ENDLESS))

    async def finish(self) -> None:
        """Ends the endless calls with `Draining`, so that their callers go elsewhere, and waits for all others."""
        await asyncio.sleep(HEADERS_SECONDS)
        for task, endless in self._running.items():
            if endless:
                self._ended.add(task)
                task.cancel()
        while self._running:
            await asyncio.wait(list(self._running))

    @asynccontextmanager
    async def running(self, *, endless: bool) -> AsyncIterator[None]:
        """Surrounds a call in its own task."""
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = endless
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise Draining("the service is draining") from None
        finally:
            del self._running[task]
            self._ended.discard(task)


class _Call:
    def __init__(self, calls: RunningCalls, *, endless: bool) -> None:
        self._calls = calls
        self._endless = endless

    def check(self, request: Any) -> None:
        """Nothing to check: this interceptor looks at when calls end only."""

    def around(self, context: Context) -> AbstractAsyncContextManager[None]:
        return self._calls.running(endless=self._endless)
