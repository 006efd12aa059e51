"""Stop of a server: nothing new comes, what runs has its time, and a second signal ends the wait."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable

import grpc

from kvscout_common.errors import KvscoutError
from kvscout_common.process.running_calls import RunningCalls

log = logging.getLogger("kvscout.serving")

LEAVE_SECONDS = 10.0
"""Time that clients have to read the last answers, and to close their connections: one that hangs never does."""


class Signals:
    """Requests to stop by the signals of the process, on the running loop."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        """SIGTERM or SIGINT came."""
        self.immediate = asyncio.Event()
        """It came again: nothing is waited for any more."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ask)
        # Daemons read their files again at it; ours follow them, and have no terminal to lose.
        loop.add_signal_handler(signal.SIGHUP, log.info, "SIGHUP: files are followed without it")

    def _ask(self) -> None:
        if self.stop.is_set():
            self.immediate.set()
        self.stop.set()


async def stop_serving(
    server: grpc.aio.Server,
    calls: RunningCalls,
    drain: Callable[[], Awaitable[None]] | None,
    *,
    grace_seconds: float,
    immediate: asyncio.Event,
) -> None:
    """Stop a server: clients are sent away immediately, running calls end by themselves or when the time is over.

    Args:
        server: From here on it accepts no connection, and GOAWAY is on its way over each that there is.
        calls: What runs on it.
        drain: Returns when the service has nothing left to wait for; None = it never has.
        grace_seconds: Longest wait for both.
        immediate: Ends the wait.
    """
    # Done when every client has closed its connection.
    left = asyncio.ensure_future(server.stop(grace_seconds))
    finished = asyncio.ensure_future(_finished(calls, drain))
    hurry = asyncio.ensure_future(immediate.wait())
    try:
        await asyncio.wait({finished, hurry}, timeout=grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        if finished.done():
            await asyncio.wait({left, hurry}, timeout=LEAVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            finished.result()
        else:
            why = "a signal came again" if immediate.is_set() else f"{grace_seconds:g} s"
            log.warning("aborting calls that are still running: %s", why)
    finally:
        for waiting in (finished, hurry):
            waiting.cancel()
        await server.stop(0)
        await asyncio.wait({left, finished, hurry})


async def _finished(calls: RunningCalls, drain: Callable[[], Awaitable[None]] | None) -> None:
    if drain is not None:
        try:
            await drain()
        except KvscoutError as error:
            log.warning("could not drain: %s", error)
    await calls.finish()
