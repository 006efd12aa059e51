"""FindMatches of one indexer over an open stream, called like the unary rpc: half the CPU for the indexer.

A stream is renewed after a second or two and not kept open while nothing is requested, so that an indexer that drains
does not wait for its gateways. Where one ends under a request, that is sent once more over a new one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc

from kvscout.v1 import indexer_pb2
from kvscout_common.errors import KvscoutError, Unavailable
from kvscout_common.transport.statuses import from_status
from kvscout_gateway.upstreams.coalesced_stream import CoalescedStream

RENEW_SECONDS = 1.0
CLOSE_SECONDS = 1.0
"""Longest wait for the last answers of a stream."""
MAX_STREAMS = 2
"""Over which a request is sent, if they end under it."""

SERVICE = indexer_pb2.DESCRIPTOR.services_by_name["Indexer"].full_name
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class MatchStream:
    """The streams of one indexer, one after the other.

    Args:
        channel: To the indexer.
        clock: Monotonic seconds.
    """

    def __init__(self, channel: grpc.aio.Channel, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._open: Any = channel.stream_stream(f"/{SERVICE}/StreamFindMatches")
        self._clock = clock
        self._current: _Matches | None = None
        self._streams: set[_Matches] = set()
        """The current one, and those that wait for their last answers."""
        self._closing: set[asyncio.Task[None]] = set()
        self._renewal: asyncio.TimerHandle | None = None

    async def __call__(self, request: bytes, *, timeout: float) -> indexer_pb2.FindMatchesResponse:
        """Send a serialised `FindMatchesRequest`; return its answer.

        Args:
            request: The request.
            timeout: Longest wait in seconds.

        Raises:
            KvscoutError: As the indexer answers, or DeadlineExceeded, or the stream's own error.
        """
        deadline = self._clock() + timeout
        error: KvscoutError = Unavailable("no stream")
        for _ in range(MAX_STREAMS):
            stream = self._stream()
            result = await stream.ask(request, max(0.0, deadline - self._clock()))
            if result is not None:
                if result.code:
                    raise _error(result)
                return result.response
            error = stream.error
        raise error

    async def close(self) -> None:
        """End every stream; what waits is broken off."""
        self._leave()
        for stream in self._streams:
            stream.break_off(Unavailable("this gateway is stopping"))
        await asyncio.gather(*self._closing)

    def _stream(self) -> _Matches:
        stream = self._current
        if stream is None:
            stream = self._current = _Matches(self._open, self._ended)
            self._streams.add(stream)
            self._renewal = asyncio.get_running_loop().call_later(RENEW_SECONDS, self._leave)
        return stream

    def _leave(self) -> None:
        """Have the next request open another stream."""
        if self._renewal is not None:
            self._renewal.cancel()
        stream, self._current = self._current, None
        if stream is not None:
            task = asyncio.get_running_loop().create_task(stream.close(CLOSE_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _ended(self, stream: _Matches) -> None:
        self._streams.discard(stream)
        if stream is self._current:
            self._leave()


class _Matches(CoalescedStream[indexer_pb2.FindMatchesResult]):
    """One stream."""

    def __init__(self, open_stream: Callable[[], Any], ended: Callable[[_Matches], None]) -> None:
        super().__init__(
            open_stream,
            "find matches",
            field=indexer_pb2.StreamFindMatchesRequest.REQUESTS_FIELD_NUMBER,
            id_field=indexer_pb2.FindMatchesRequest.ID_FIELD_NUMBER,
            on_end=lambda: ended(self),
        )

    def _take(self, message: bytes) -> None:
        for result in indexer_pb2.StreamFindMatchesResponse.FromString(message).results:
            self._answered(result.id, result)


def _error(result: indexer_pb2.FindMatchesResult) -> KvscoutError:
    error = from_status(_CODES.get(result.code, grpc.StatusCode.INTERNAL), result.message)
    error.answered = True
    return error
