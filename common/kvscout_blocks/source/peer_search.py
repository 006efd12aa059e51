"""Search for a rank's state at peers, which load a new reader faster than its source can.

A state that is found is the first part of the first replay: live batches wait for it as for any replay, what came since
is requested from the source itself, and half a state is never loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from kvscout_blocks.source.feed import SourceState
from kvscout_common.worker import WorkerRank, WorkerSpec

log = logging.getLogger("kvscout.events")

CONNECT_SECONDS: Final = 1.0
"""Longest wait for the live channel before peers are requested: what comes after their cut must not be lost."""

PeerLookup = Callable[[WorkerSpec, WorkerRank], Awaitable[SourceState | None]]
"""Requests a rank's state from peers; None = none has it. Raises nothing, and ends in bounded time."""


class PeerSearch:
    """Search for one rank's state; runs at most once."""

    def __init__(self) -> None:
        self.connected = asyncio.Event()
        """Set once the live channel is there."""
        self.over = asyncio.Event()
        """Set once no state is requested, and one that was found is loaded."""
        self._task: asyncio.Task[SourceState | None] | None = None

    @property
    def running(self) -> bool:
        """Return whether a state is requested."""
        return self._task is not None

    def start(self, lookup: PeerLookup, spec: WorkerSpec, rank: WorkerRank) -> None:
        """Request the state of a worker's rank, once the live channel is there."""
        name = f"state {rank.worker_id}/{rank.dp_rank}"
        self._task = asyncio.get_running_loop().create_task(self._run(lookup, spec, rank), name=name)

    async def result(self) -> SourceState | None:
        """Return the state, if the search runs and finds one. Cancelling the caller does not end the search."""
        if self._task is None:
            return None
        state = await asyncio.shield(self._task)
        self._task = None
        return state

    def end(self) -> asyncio.Task[SourceState | None] | None:
        """End the search; return the task to wait for."""
        task, self._task = self._task, None
        self.over.set()
        if task is not None:
            task.cancel()
        return task

    async def _run(self, lookup: PeerLookup, spec: WorkerSpec, rank: WorkerRank) -> SourceState | None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self.connected.wait()
        except TimeoutError:
            log.info("worker %s/%d is not reachable yet; requesting its state from peers", *rank)
        return await lookup(spec, rank)
