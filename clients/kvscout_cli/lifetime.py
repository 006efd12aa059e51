"""Lifetime of a command: until it is done, or until a signal cancels it and it has cleaned up."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(work: Coroutine[Any, Any, T], *, until_signalled: bool = False) -> T:
    """Run a coroutine on the main thread. Ctrl-C, SIGTERM and a closed terminal cancel it; its `finally` blocks run.

    A second signal cancels again, which cuts short graceful stops.

    Args:
        work: Coroutine to run.
        until_signalled: A signal is how this command normally ends.

    Exits:
        128 + n after signal n, or 0 if that is how the command ends.
    """
    received: list[signal.Signals] = []

    async def supervised() -> T:
        loop = asyncio.get_running_loop()
        task = cast(asyncio.Task[T], asyncio.current_task())

        def on_signal(number: signal.Signals) -> None:
            received.append(number)
            task.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
        return await work

    try:
        return asyncio.run(supervised())
    except asyncio.CancelledError:
        if not received:
            raise
        raise SystemExit(0 if until_signalled else 128 + received[0]) from None
