"""One data-parallel rank: the loop that steps its engine in real time, and the streams of its requests."""

from __future__ import annotations

import asyncio

from kvscout_common.errors import Unavailable
from kvscout_mocker.engine import Engine, Request
from kvscout_mocker.publisher import EventPublisher

MAX_LAG_SECONDS = 0.05
"""How far a step may end late before the loop gives up catching up: short enough that a machine without CPU
to spare slows the engine down instead of making it burst afterwards."""


class TokenStream:
    """The generated tokens of one request, coalesced while the reader is busy; at most its `max_tokens`."""

    __slots__ = ("_changed", "_closed", "_pending", "finished", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.finished = False
        self._pending: list[int] = []
        self._closed = False
        self._changed = asyncio.Event()

    def push(self, token: int, finished: bool) -> None:
        """Add a token; `finished` marks the last."""
        self._pending.append(token)
        self.finished = finished
        self._changed.set()

    def close(self) -> None:
        """End the stream before its last token: the engine is stopping."""
        self._closed = True
        self._changed.set()

    async def read(self) -> list[int]:
        """The tokens since the last read, at least one.

        Raises:
            Unavailable: The engine stopped before the request was done.
        """
        await self._changed.wait()
        if not self._closed:
            self._changed.clear()
        elif not self._pending:
            raise Unavailable("the engine is shutting down")
        tokens, self._pending = self._pending, []
        return tokens


class Rank:
    """An engine, its publisher and its request streams. Used from one event loop only."""

    def __init__(self, dp_rank: int, engine: Engine, publisher: EventPublisher, *, hash_seed: int) -> None:
        self.dp_rank = dp_rank
        self.hash_seed = hash_seed
        self.engine = engine
        self.publisher = publisher
        self._streams: dict[Request, TokenStream] = {}
        self._wake = asyncio.Event()

    @property
    def load(self) -> int:
        """Requests running and waiting."""
        return self.engine.num_running + self.engine.num_waiting

    def submit(self, request: Request) -> TokenStream:
        """Queue a request; it is scheduled in the next step.

        Raises:
            ResourceExhausted: The waiting queue is full.
        """
        self.engine.submit(request)
        stream = self._streams[request] = TokenStream(request)
        self._wake.set()
        return stream

    def abort(self, request: Request) -> None:
        """Drop a request whose reader is gone and free its blocks; no-op when it has finished."""
        self.engine.abort(request)
        self._streams.pop(request, None)

    def stop(self) -> None:
        """End every stream with an error; their readers abort the requests."""
        for stream in self._streams.values():
            stream.close()

    async def run(self) -> None:
        """Step the engine until cancelled; sleeps while it is idle and while a step would compute.

        As in vLLM, the events of a step go out when it has been computed, before its tokens are handed on.
        """
        loop = asyncio.get_running_loop()
        step_end = loop.time()
        while True:
            step = self.engine.begin_step()
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                step_end = loop.time()
                continue
            step_end = max(step_end, loop.time() - MAX_LAG_SECONDS) + step.duration_seconds
            await asyncio.sleep(max(0.0, step_end - loop.time()))
            outputs = self.engine.finish_step(step)
            self.publisher.publish(self.engine.take_events())
            for request, token, finished in outputs:
                self._streams[request].push(token, finished)
                if finished:
                    del self._streams[request]
