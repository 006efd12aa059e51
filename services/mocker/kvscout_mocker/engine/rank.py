"""One data-parallel rank: the loop that steps its engine in real time, and the streams of its requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from kvscout_common.errors import InternalError, ResourceExhausted, Unavailable
from kvscout_mocker.engine.engine import Engine, Pull
from kvscout_mocker.engine.kv_transfer import KvSource, TransferFailed
from kvscout_mocker.engine.publisher import EventPublisher
from kvscout_mocker.engine.request import ChoiceDelta, Finish, Output, Request

_log = logging.getLogger(__name__)

MAX_LAG_SECONDS = 0.05
"""Lateness of a step up to which the loop catches up: short enough that a machine without CPU
to spare slows the engine down instead of making it burst afterwards."""


class TokenStream:
    """The generated tokens of one request's choices, coalesced while the reader is busy."""

    __slots__ = ("_changed", "_closed", "_failed", "_pending", "_unfinished", "began_unix", "requests")

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        """One a choice."""
        self.began_unix = 0.0
        """Time of the first token, seconds since the Unix epoch; 0 = there is none yet."""
        self._unfinished = len(requests)
        self._pending: dict[int, ChoiceDelta] = {}
        self._closed = False
        self._failed = False
        self._changed = asyncio.Event()

    @property
    def drained(self) -> bool:
        """Return whether every choice has its last token and all were read."""
        return self._unfinished == 0 and not self._pending and not self._failed

    def push(self, index: int, output: Output) -> None:
        """Add what one choice got."""
        self.began_unix = self.began_unix or time.time()
        if output.token is None:
            self._failed = True
        elif (pending := self._pending.get(index)) is None:
            self._pending[index] = ChoiceDelta(index, [output.token], output.request.output_tokens - 1, output.finish)
        else:
            pending.tokens.append(output.token)
            self._pending[index] = pending._replace(finish_reason=output.finish)
        if output.finish is not None:
            self._unfinished -= 1
        self._changed.set()

    def close(self) -> None:
        """End the stream before its last token: the engine is stopping."""
        self._closed = True
        self._changed.set()

    async def read(self) -> list[ChoiceDelta]:
        """Return the tokens that choices got since the last read, at least one.

        Raises:
            Unavailable: The engine stopped before the request was done.
            InternalError: It failed in the engine, and what it got before was read.
        """
        await self._changed.wait()
        if not self._pending:
            if self._failed:
                raise InternalError("Internal server error")
            raise Unavailable("the engine is shutting down")
        if not self._closed and not self._failed:
            self._changed.clear()
        deltas = list(self._pending.values())
        self._pending.clear()
        return deltas


class Rank:
    """An engine, its publisher and its request streams. Used from one event loop only."""

    def __init__(self, dp_rank: int, engine: Engine, publisher: EventPublisher, *, hash_seed: int) -> None:
        self.dp_rank = dp_rank
        self.hash_seed = hash_seed
        self.engine = engine
        self.publisher = publisher
        self.slowdown = 1.0
        """Fault: steps take as many times as long."""
        self._streams: dict[Request, tuple[TokenStream, int]] = {}
        self._sources: dict[Request, KvSource] = {}
        self._fetching: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()

    @property
    def load(self) -> int:
        """Return requests running and waiting."""
        return self.engine.num_running + self.engine.num_waiting

    def submit(self, requests: Sequence[Request], source: KvSource | None = None) -> TokenStream:
        """Queue the choices of one request; they are scheduled in the next step.

        Args:
            requests: One a choice.
            source: Sender of the blocks of their prompt, for requests that receive.

        Raises:
            ResourceExhausted: The waiting queue is full.
        """
        stream = TokenStream(requests)
        try:
            for index, request in enumerate(requests):
                self.engine.submit(request)
                self._streams[request] = stream, index
                if source is not None and request.receives:
                    self._sources[request] = source
        except ResourceExhausted:
            self.abort(stream)
            raise
        self._wake.set()
        return stream

    def abort(self, stream: TokenStream) -> None:
        """Drop a request whose reader is gone and free its blocks; no-op when it has finished."""
        for request in stream.requests:
            if self._streams.pop(request, None) is not None:
                self.engine.abort(request)
                if request not in self.engine.receiving:
                    self._sources.pop(request, None)

    def release(self, request: Request, *, expired: bool = False) -> None:
        """Free the blocks that a finished request held for another engine."""
        self.engine.release(request, expired=expired)
        self._wake.set()

    def stop(self) -> None:
        """End every stream with an error; their readers abort the requests. Transfers end, too."""
        for task in self._fetching:
            task.cancel()
        for stream, _ in self._streams.values():
            stream.close()

    async def run(self) -> None:
        """Step the engine until cancelled; sleeps while it is idle and while a step would compute.

        As in vLLM, the events of a step go out when it has been computed, before its tokens are handed on.
        """
        loop = asyncio.get_running_loop()
        step_end = loop.time()
        while True:
            step = self.engine.begin_step()
            for pull in self.engine.take_pulls():
                task = loop.create_task(self._fetch(pull), name=f"fetch-{self.dp_rank}")
                self._fetching.add(task)
                task.add_done_callback(self._fetching.discard)
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                step_end = loop.time()
                continue
            step_end = max(step_end, loop.time() - MAX_LAG_SECONDS) + self.slowdown * step.duration_seconds
            await asyncio.sleep(max(0.0, step_end - loop.time()))
            outputs = self.engine.finish_step(step)
            self.publisher.publish(self.engine.take_events())
            for output in outputs:
                stream, index = self._streams[output.request]
                stream.push(index, output)
                if output.finish is not None:
                    del self._streams[output.request]

    async def _fetch(self, pull: Pull) -> None:
        request = pull.request
        source = self._sources.pop(request)
        try:
            await source.fetch(request, pull.tokens)
        except TransferFailed as error:
            consequence = "it computes its prompt here" if source.recomputes else "it fails"
            _log.warning("%s: the blocks did not arrive: %s; %s", request.request_id, error, consequence)
            if self.engine.lost(pull, recompute=source.recomputes):
                stream, index = self._streams.pop(request)
                stream.push(index, Output(request, None, Finish.ERROR))
        else:
            self.engine.received(pull)
        self._wake.set()
