"""The event transports: which feed brings the batches of a worker rank."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source.feed import Feed
from kvscout_blocks.source.subscribed_feed import EngineStream, stream_address
from kvscout_blocks.source.zmq_feed import ZmqFeed
from kvscout_blocks.source.zmq_reader import ZmqReader
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.process.endings import Closing
from kvscout_common.worker import WorkerRank, WorkerSpec


class EventTransport(Protocol):
    """One way in which events reach the indexer."""

    def feed(self, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex) -> Feed | None:
        """Return what brings a rank's batches; None = the registration lacks what it takes."""

    def tasks(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return what runs beside the server, by name."""
        ...

    async def close(self) -> None:
        """Close what it holds; every feed is closed."""


class ZmqDirect:
    """The engines' own sockets.

    Args:
        threads: Native threads that read them.
        warnings: Where what is wrong with an engine is logged.
        failed: Called with a defect of this program.
    """

    def __init__(self, *, threads: int, warnings: RateLimitedLog, failed: Callable[[BaseException], None]) -> None:
        self._warnings = warnings
        self._failed = failed
        self._reader = ZmqReader(threads=threads, failed=failed)

    def feed(self, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex) -> Feed | None:
        """See `EventTransport.feed`."""
        endpoint = spec.event_endpoint(rank.dp_rank)
        if endpoint is None:
            return None
        return ZmqFeed(
            rank,
            endpoint,
            index,
            reader=self._reader,
            clock=time.monotonic,
            warnings=self._warnings,
            failed=self._failed,
        )

    def tasks(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return no tasks."""
        return {}

    async def close(self) -> None:
        """Close every socket."""
        self._reader.close()


class EngineStreams:
    """The streams of engines that are served over gRPC, one an engine.

    Args:
        security: TLS files for those with TLS.
        warnings: Where what is wrong with an engine is logged.
        failed: Called with a defect of this program.
    """

    def __init__(
        self, *, security: ClientSecurity, warnings: RateLimitedLog, failed: Callable[[BaseException], None]
    ) -> None:
        self._security = security
        self._warnings = warnings
        self._failed = failed
        self._large = asyncio.Semaphore(1)
        self._streams: dict[tuple[str, str], EngineStream] = {}
        self._closing = Closing()

    def feed(self, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex) -> Feed | None:
        """See `EventTransport.feed`."""
        key = (spec.tenant, spec.worker_id)
        stream = self._streams.get(key)
        if stream is None or stream.address != stream_address(spec):
            stream = self._streams[key] = EngineStream(
                spec,
                security=self._security,
                large=self._large,
                warnings=self._warnings,
                failed=self._failed,
                ended=lambda ended: self._forget(key, ended),
            )
        return stream.feed(rank, index)

    def _forget(self, key: tuple[str, str], ended: EngineStream) -> None:
        self._closing.add(ended.task)
        if self._streams.get(key) is ended:
            del self._streams[key]

    def tasks(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return no tasks."""
        return {}

    async def close(self) -> None:
        """Wait for the ends of all streams."""
        await self._closing.wait()
