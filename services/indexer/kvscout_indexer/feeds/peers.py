"""Peers: other indexers that have followed the same workers, which have a worker's state before its source is read.

A state is requested for a worker at a time, when its events begin to be read, so that a worker that is registered late,
or anew after a restart, is found like any other. Of many that begin at once all are requested, in turns. The first peer
that has a complete state wins. None may be there, lag or be as new as we are: the source then does without, as it would
have without peers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

import grpc

from kvscout.v1 import events_pb2, indexer_pb2, indexer_pb2_grpc
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source.feed import SourceState
from kvscout_blocks.source.published import PublishedReader
from kvscout_common.errors import KvscoutError, NotFound
from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.rpc.channel import open_channel, stream
from kvscout_common.worker import WorkerRank, WorkerSpec

log = logging.getLogger("kvscout.events")

MAX_DUMPS = 8
"""Requested at once: each may be 200 MB."""
ANSWER_SECONDS = 2.0
"""Longest wait for a peer's first message, and for each further one."""
SEARCH_SECONDS = 10.0
"""Longest search for one worker's state, from its turn on."""
AVOID_SECONDS = 5.0
"""Seconds without a request to a peer that could not be reached, or fell silent."""
PATIENCE_SECONDS = 15.0
"""From its first silence on, a peer is waited for so long: it may be busy, and all in the queue need it."""


class Peer:
    """Another indexer.

    Args:
        address: host:port.
        security: How it is called.
    """

    def __init__(self, address: str, security: ClientSecurity) -> None:
        self.address = address
        self.problem = ""
        """Reason for which its last request failed; "" = it did not."""
        self.avoid_until = float("-inf")
        self.silent_since: float | None = None
        """Since when it has answered nothing; None = it has, or cannot be reached at all."""
        self._security = security
        self._channel: grpc.aio.Channel | None = None

    async def dump(self, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex) -> SourceState | None:
        """Return what it knows of a rank; None = nothing.

        Raises:
            KvscoutError: It cannot be reached, or what it says cannot be read.
            TimeoutError: It fell silent.
        """
        if self._channel is None:
            self._channel = open_channel(self.address, self._security)
        stub = indexer_pb2_grpc.IndexerStub(self._channel)
        request = indexer_pb2.DumpRequest(
            tenant=spec.tenant, model=spec.model, worker_id=rank.worker_id, dp_rank=rank.dp_rank
        )
        reader = PublishedReader(index, rank, spec.pool)
        try:
            async with aclosing(stream(stub.Dump, request, timeout=SEARCH_SECONDS)) as messages:
                while True:
                    async with asyncio.timeout(ANSWER_SECONDS):
                        message: events_pb2.KvEventBatch | None = await anext(messages, None)
                    if message is None:
                        return None
                    item = reader.read(message.SerializeToString())
                    if isinstance(item, SourceState):
                        return item if item.last_event_id is not None else None
        except NotFound:
            return None

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()


class Peers:
    """Looks for states among peers.

    Args:
        addresses: host:port of each, in the order of requests.
        security: How they are called.
        warnings: Where those that have no answer are logged; None = a log of their own.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        security: ClientSecurity = PLAINTEXT,
        warnings: RateLimitedLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.found = 0
        """States that a peer had."""
        self.not_found = 0
        """Searches without a result."""
        self._peers = [Peer(address, security) for address in addresses]
        self._clock = clock
        self._log = warnings or RateLimitedLog(log)
        self._limit = asyncio.Semaphore(MAX_DUMPS)

    def warnings(self) -> list[str]:
        """Return what an operator should know: that a worker began without any peer."""
        problems = [f"{peer.address}: {peer.problem}" for peer in self._peers if peer.problem]
        if len(problems) < len(self._peers) or not problems:
            return []
        return [f"no peer can be reached, workers begin without their state ({'; '.join(problems)})"]

    async def state_of(self, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex) -> SourceState | None:
        """Return the state of a rank that a peer has; None = none does. Ends within `SEARCH_SECONDS` of its turn.

        Args:
            spec: The worker.
            rank: Which of its ranks.
            index: Where it is to be loaded.
        """
        state = None
        try:
            async with self._limit, asyncio.timeout(SEARCH_SECONDS):
                state = await self._search(spec, rank, index)
        except TimeoutError:
            self._log.warning("peers took too long", "peers took too long to answer for worker %s/%d", *rank)
        self.found += state is not None
        self.not_found += state is None
        return state

    async def _search(self, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex) -> SourceState | None:
        best: SourceState | None = None
        for peer in self._peers:
            rest = peer.avoid_until - self._clock()
            if rest > 0:
                if peer.silent_since is None or self._clock() - peer.silent_since > PATIENCE_SECONDS:
                    continue
                await asyncio.sleep(rest)
            began = self._clock()
            try:
                state = await peer.dump(spec, rank, index)
            except (KvscoutError, TimeoutError) as error:
                peer.problem = str(error) or f"silent for {ANSWER_SECONDS:g} s"
                peer.avoid_until = self._clock() + AVOID_SECONDS
                is_silent = isinstance(error, TimeoutError)
                peer.silent_since = (began if peer.silent_since is None else peer.silent_since) if is_silent else None
                self._log.warning(
                    ("peer", peer.address),
                    "peer %s has no answer for worker %s/%d: %s", peer.address, *rank, peer.problem,
                )  # fmt: skip
                continue
            peer.problem, peer.silent_since = "", None
            if state is not None and not state.history_incomplete:
                return state
            best = best or state
        return best

    async def close(self) -> None:
        """Close every connection."""
        for peer in self._peers:
            await peer.close()
