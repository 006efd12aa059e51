"""FindMatches of one indexer over an open stream, called like the unary rpc: half the CPU for the indexer.

What comes while a message is under way goes in the next one; each request keeps its own deadline. A stream is renewed
after a second or two and not kept open while nothing is asked, so that an indexer that drains does not wait for its
gateways.
Where the stream breaks, what waits on it is asked by the unary rpc, within what is left of its time.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc
from kvscout_common.errors import DeadlineExceeded, KvscoutError, from_status

RENEW_SECONDS = 1.0
UNARY_SECONDS = 1.0
"""After a stream broke, or could not be opened: an indexer that has none is asked by the unary rpc meanwhile."""
STUCK_SECONDS = 1.0
"""A message that cannot be sent, or an answer that does not come, for so long breaks the stream."""
MESSAGE_REQUESTS = 256
MESSAGE_BLOCKS = 65_536
"""In one message, unless one request has more: half a MiB."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class MatchStream:
    """The streams of one indexer, one after the other."""

    def __init__(self, stub: indexer_pb2_grpc.IndexerAsyncStub, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._unary: Callable[..., Awaitable[indexer_pb2.FindMatchesResponse]] = stub.FindMatches
        self._open: Callable[[], Any] = stub.StreamFindMatches
        self._clock = clock
        self._current: _Session | None = None
        self._sessions: set[_Session] = set()
        """The current one, and those that still wait for their last answers."""
        self._unary_until = 0.0

    async def __call__(
        self, request: indexer_pb2.FindMatchesRequest, *, timeout: float
    ) -> indexer_pb2.FindMatchesResponse:
        """Asks, within so many seconds.

        Raises:
            KvscoutError: What the indexer answered, or DeadlineExceeded.
            AioRpcError: The same from the unary rpc.
        """
        now = self._clock()
        deadline = now + timeout
        if now >= self._unary_until:
            result = await self._session(now).ask(request, timeout)
            if result is not None:
                if result.code:
                    raise _error(result)
                return result.response
        return await self._unary(request, timeout=max(0.0, deadline - self._clock()))

    async def close(self) -> None:
        """Ends every stream; what waits is broken off."""
        for session in list(self._sessions):
            session.task.cancel()
        await asyncio.gather(*(session.task for session in self._sessions), return_exceptions=True)

    def _session(self, now: float) -> _Session:
        current = self._current
        if current is None or now >= current.ends_at:
            current = self._current = _Session(self._open, now + RENEW_SECONDS, self._clock, self._ended)
            self._sessions.add(current)
        return current

    def _ended(self, session: _Session, broke: bool) -> None:
        self._sessions.discard(session)
        if session is self._current:
            self._current = None
        if broke:
            self._unary_until = self._clock() + UNARY_SECONDS


class _Session:
    """One stream, from its first request to its last answer."""

    def __init__(
        self,
        open_stream: Callable[[], Any],
        ends_at: float,
        clock: Callable[[], float],
        ended: Callable[[_Session, bool], None],
    ) -> None:
        self.ends_at = ends_at
        """Takes no request from then on."""
        self._clock = clock
        self._ended = ended
        self._ids = itertools.count(1)
        self._unsent: dict[int, indexer_pb2.FindMatchesRequest] = {}
        self._sent: set[int] = set()
        """Of the message that is under way; empty once all are answered or given up."""
        self._asked: dict[int, asyncio.Future[indexer_pb2.FindMatchesResult | None]] = {}
        self._wake = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run(open_stream), name="find matches")

    async def ask(
        self, request: indexer_pb2.FindMatchesRequest, timeout_seconds: float
    ) -> indexer_pb2.FindMatchesResult | None:
        """The answer; None if the stream broke.

        Raises:
            DeadlineExceeded: It did not come in time.
        """
        number = next(self._ids)
        answer: asyncio.Future[indexer_pb2.FindMatchesResult | None] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._unsent[number] = request
        if not self._sent:
            self._wake.set()
        try:
            async with asyncio.timeout(timeout_seconds):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded("no answer on the stream") from None
        finally:
            self._asked.pop(number, None)
            self._unsent.pop(number, None)
            self._over(number)

    async def _run(self, open_stream: Callable[[], Any]) -> None:
        stream = open_stream()
        reading = asyncio.get_running_loop().create_task(self._read(stream))
        broke = True
        try:
            await self._write(stream, reading)
            async with asyncio.timeout(STUCK_SECONDS):
                await stream.done_writing()
                await reading
            broke = False
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError):
            pass  # those that wait ask otherwise, and find out why
        finally:
            # Before anything else: who waits must not wait for this to end.
            self.ends_at = 0.0
            self._ended(self, broke)
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_result(None)
            stream.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _write(self, stream: Any, reading: asyncio.Task[None]) -> None:
        while not reading.done():
            self._wake.clear()
            if self._unsent and not self._sent:
                async with asyncio.timeout(STUCK_SECONDS):
                    await stream.write(self._message())
            left = max(0.0, self.ends_at - self._clock())
            try:
                # While a message is under way nothing else can be done, also past the end.
                async with asyncio.timeout(max(left, STUCK_SECONDS) if self._sent else left):
                    await self._wake.wait()
            except TimeoutError:
                if self._unsent and self._sent:
                    raise  # no answer
                if not self._unsent:  # else it came in the last moment
                    break

    def _over(self, number: int) -> None:
        """A request is answered or given up."""
        self._sent.discard(number)
        if not self._sent and self._unsent:
            self._wake.set()

    def _message(self) -> indexer_pb2.StreamFindMatchesRequest:
        message = indexer_pb2.StreamFindMatchesRequest()
        blocks = 0
        while self._unsent and len(message.requests) < MESSAGE_REQUESTS:
            number, request = next(iter(self._unsent.items()))
            if blocks and blocks + len(request.block_hashes) > MESSAGE_BLOCKS:
                break
            del self._unsent[number]
            self._sent.add(number)
            blocks += len(request.block_hashes)
            asked = message.requests.add()
            asked.CopyFrom(request)
            asked.id = number
        return message

    async def _read(self, stream: Any) -> None:
        try:
            async for message in stream:
                for result in message.results:
                    answer = self._asked.get(result.id)
                    if answer is not None and not answer.done():
                        answer.set_result(result)
                    self._over(result.id)
        finally:
            self._wake.set()


def _error(result: indexer_pb2.FindMatchesResult) -> KvscoutError:
    error = from_status(_CODES.get(result.code, grpc.StatusCode.INTERNAL), result.message)
    error.answered = True
    return error
