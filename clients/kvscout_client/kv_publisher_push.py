"""A publisher's way over gRPC: a stream to each indexer, each of which is somewhere else.

::

    ring ── batches from its next one on ──▶ indexer a    acks: last event id; resend_from: go back
         └─ state, then batches ───────────▶ indexer b    has nothing, or what it needs is no longer in the ring
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import grpc

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc
from kvscout_blocks.bytes.events import DecodedBatch
from kvscout_blocks.bytes.messages import MAX_CHUNK_BYTES
from kvscout_blocks.index.backend import encode_batch
from kvscout_blocks.publish.publication import BURST_BYTES
from kvscout_blocks.source.decisions import SequencedBatch
from kvscout_client.kv_publisher_rank import PublishedRank
from kvscout_client.kv_publisher_registration import RpcRegistration
from kvscout_common.errors import FailedPrecondition, KvscoutError, NotFound, Unavailable
from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.rpc.channel import open_channel
from kvscout_common.rpc.first_status import FirstStatus

log = logging.getLogger("kvscout.publisher")

FIRST_RETRY_SECONDS: Final = 0.1
MAX_RETRY_SECONDS: Final = 1.0
OUTDATED_SECONDS: Final = 10.0
"""Pause before the next try at an indexer that knows a newer incarnation."""


class PushPosition:
    """Position of one indexer, and the messages to send it next. Pure.

    Args:
        rank: The rank that is published.
    """

    def __init__(self, rank: PublishedRank) -> None:
        self.dropped = 0
        """Batches that left the ring before they were sent."""
        self.states = 0
        """States sent."""
        self.outdated = False
        """True if it knows a newer incarnation, and takes nothing of ours."""
        self.malformed = 0
        """Batches of this stream that it could not read."""
        self._rank = rank
        self._local = rank.local
        self._acked: tuple[int, int | None] | None = None
        """Epoch and last event id as of its last answer; None = it has not answered on this stream."""
        self._epoch: int | None = None
        """Incarnation that `_next` counts in."""
        self._next: int | None = None
        """Event that is sent next; None = the state comes first."""
        self._resend: tuple[int, int] | None = None
        """First event that it requests again, and the number of that request."""

    def begin(self) -> None:
        """Begin a stream; the indexer's position is unknown before it answers."""
        self._acked = self._resend = None
        self.outdated = False

    def on_answer(self, answer: indexer_pb2.PublishEventsResponse) -> None:
        """Take an answer: the indexer's position, and its request for lost events."""
        last = answer.last_event_id if answer.HasField("last_event_id") else None
        if self._acked is None:
            self._epoch = self._rank.epoch
            self._next = last + 1 if last is not None and answer.epoch == self._epoch else None
        self._acked = (answer.epoch, last)
        if answer.HasField("resend_from"):
            self._resend = answer.resend_from, answer.resend_id
        self.outdated = answer.epoch > self._rank.epoch
        self.malformed = answer.malformed

    async def take(self) -> Sequence[bytes]:
        """Return the messages to send next; none: it has been sent everything, or has not answered yet."""
        if self._acked is None:
            return ()
        if self._epoch != self._rank.epoch:
            self._epoch, self._next, self._resend = self._rank.epoch, None, None
        if self._resend is not None:
            (first_id, resend_id), self._resend = self._resend, None
            return await self._again(first_id, resend_id)
        if self._next is None:
            if self._rank.is_known:
                return await self._state()
            self._next = 0
        return await self._batches(self._next)

    @property
    def problem(self) -> str:
        """Return why it does not take everything; "" = it does, as far as is known."""
        if self.outdated:
            return f"it knows an incarnation of the engine that is newer than ours, {self._rank.epoch}"
        return f"it could not read {self.malformed} batches" if self.malformed else ""

    @property
    def caught_up(self) -> bool:
        """Return whether it has everything."""
        return self._acked == (self._rank.epoch, self._rank.last_event_id)

    @property
    def missing_from(self) -> int:
        """Return the first event that it may not have."""
        if self._acked is None or self._acked[0] != self._rank.epoch or self._acked[1] is None:
            return 0
        return self._acked[1] + 1

    async def _again(self, first_id: int, resend_id: int) -> Sequence[bytes]:
        last, oldest = self._local.last_event_id, self._local.oldest_event_id
        if last is not None and first_id > last:
            return (self._rank.greeting(resend_id),)
        # From the beginning on: the state is shorter than all that led to it, and makes what is incomplete whole.
        if self._rank.is_known and (first_id == 0 or oldest is None or first_id < oldest):
            return await self._state()
        if oldest is None or first_id < oldest:
            return (self._rank.greeting(resend_id),)
        return await self._batches(first_id)

    async def _batches(self, first_id: int) -> Sequence[bytes]:
        end, oldest = self._local.next_event_id, self._local.oldest_event_id
        if first_id >= end:
            return ()
        available = oldest if oldest is not None else end
        if first_id < available:
            self.dropped += available - first_id
            if self._rank.has_state:
                return await self._state()
            self._next = first_id = available
            if first_id == end:
                return ()
        messages = self._local.batches(first_id, max_bytes=BURST_BYTES)
        self._next = first_id + len(messages)
        return messages

    async def _state(self) -> Sequence[bytes]:
        self.states += 1
        state = await self._local.state()
        self._next = 0 if state.last_event_id is None else state.last_event_id + 1
        return state.messages


class PushTarget:
    """Connection to one indexer, made again until it ends, that brings it up to date.

    Args:
        address: host:port.
        rank: The rank that is published.
        security: TLS and token.
        lease_seconds: Lease of the registration there; None = another process registers the worker.
    """

    def __init__(
        self, address: str, rank: PublishedRank, *, security: ClientSecurity, lease_seconds: int | None
    ) -> None:
        self.address = address
        self.position = PushPosition(rank)
        self.connected = False
        """True if it answers on its stream."""
        self.moved: Callable[[], None] = lambda: None
        """Called when it has more than before."""
        self._rank = rank
        self._problem = "not connected yet"
        self._channel = open_channel(address, security)
        self._publish: Any = self._channel.stream_stream(
            "/kvscout.v1.Indexer/PublishEvents",
            request_serializer=None,
            response_deserializer=indexer_pb2.PublishEventsResponse.FromString,
        )
        self.registration: RpcRegistration | None = None
        if lease_seconds is not None:
            stub = indexer_pb2_grpc.IndexerStub(self._channel)
            self.registration = RpcRegistration(stub, address, rank.spec, lease_seconds=lease_seconds)
        self._work = asyncio.Event()
        self._delay = FIRST_RETRY_SECONDS
        self._warnings = RateLimitedLog(log)

    @property
    def problem(self) -> str:
        """Return why it gets nothing now; "" = it does."""
        registration = self.registration.problem if self.registration is not None else ""
        return (registration and f"not registered: {registration}") or self._problem or self.position.problem

    @property
    def up_to_date(self) -> bool:
        """Return whether it has everything, of a worker that it knows."""
        # An indexer that is not connected may have lost the worker, and the events that it acknowledged.
        return self.connected and self.position.caught_up

    def wake(self) -> None:
        """Wake the sender."""
        self._work.set()

    async def run(self) -> None:
        """Keep it up to date until cancelled."""
        registered = 0
        while True:
            if self.registration is not None:
                await self.registration.registered.wait()
                if self.registration.times > registered:
                    registered, self._delay = self.registration.times, FIRST_RETRY_SECONDS
            try:
                await self._session()
            except NotFound as error:
                self._problem = str(error)
                if self.registration is not None:
                    self.registration.lost()
            except KvscoutError as error:
                self._problem = str(error)
            self._warnings.warning(
                "stream", "events do not reach the indexer at %s: %s; trying again", self.address, self._problem
            )
            if self.position.outdated:
                # Each try ends the stream of the newer incarnation.
                self._delay = OUTDATED_SECONDS
            await asyncio.sleep(self._delay * random.uniform(0.5, 1.0))
            self._delay = min(2 * self._delay, MAX_RETRY_SECONDS)

    async def close(self, *, deregister: bool) -> None:
        """Close the connection, after `run` has ended."""
        if self.registration is not None and deregister:
            await self.registration.remove()
        await self._channel.close()

    async def _session(self) -> None:
        """Serve one stream to its end.

        Raises:
            KvscoutError: Why it ended.
        """
        self.position.begin()
        call = self._publish()
        reading = self._read(call, FirstStatus(call))
        answers = asyncio.get_running_loop().create_task(reading, name=f"acks of {self.address}")
        try:
            await self._write(call, answers, [self._rank.greeting()])
            while not answers.done():
                if self.position.outdated:
                    raise FailedPrecondition(self.position.problem)
                while messages := await self.position.take():
                    await self._write(call, answers, messages)
                await self._work.wait()
                self._work.clear()
            await answers
            raise Unavailable("the indexer ended the stream")
        finally:
            self.connected = False
            answers.cancel()
            call.cancel()
            await asyncio.gather(answers, return_exceptions=True)

    async def _read(self, call: Any, status: FirstStatus) -> None:
        """Take the answers until there are no more."""
        try:
            async for answer in call:
                self.position.on_answer(answer)
                self.connected, self._problem, self._delay = True, "", FIRST_RETRY_SECONDS
                self._work.set()
                self.moved()
        except grpc.aio.AioRpcError as error:
            raise status.of(error) from error
        finally:
            self._work.set()

    @staticmethod
    async def _write(call: Any, answers: asyncio.Task[None], messages: Sequence[bytes]) -> None:
        try:
            for message in messages:
                await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The stream is over; its answers have the reason.
            await answers
            raise Unavailable("the indexer ended the stream") from error


class PushOutlet:
    """`Outlet` over gRPC.

    Args:
        rank: The rank that is published.
        indexers: Their addresses, host:port.
        security: TLS and token.
        lease_seconds: Lease of the registrations there; None = another process registers the worker.
    """

    def __init__(
        self,
        rank: PublishedRank,
        indexers: Sequence[str],
        *,
        lease_seconds: int | None,
        security: ClientSecurity = PLAINTEXT,
    ) -> None:
        self._rank = rank
        self._moved = asyncio.Event()
        self._oversized = 0
        self.targets = [
            PushTarget(address, rank, security=security, lease_seconds=lease_seconds) for address in indexers
        ]
        for target in self.targets:
            target.moved = self._moved.set

    def applied(self, batch: SequencedBatch[DecodedBatch]) -> None:
        """See `Outlet.applied`."""
        rank = self._rank
        encoded = encode_batch(rank.rank, rank.spec.pool, {}, batch.content, epoch=rank.epoch, event_id=batch.event_id)
        message = encoded if len(encoded) <= MAX_CHUNK_BYTES else None
        self._oversized += message is None
        rank.local.add(batch.event_id, message)
        self._wake()

    def began(self, epoch: int) -> None:
        """See `Outlet.began`."""
        self._rank.local.restart(epoch)
        self._wake()

    def tasks(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return what runs while it is open, by name."""
        tasks: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        for target in self.targets:
            tasks[f"push to {target.address}"] = target.run
            if target.registration is not None:
                tasks[f"lease at {target.address}"] = target.registration.run
        return tasks

    @property
    def connected(self) -> bool:
        """Return whether every indexer answers."""
        return all(target.connected for target in self.targets)

    @property
    def problem(self) -> str:
        """Return what an operator should know; "" = nothing."""
        return "; ".join(f"indexer {target.address}: {target.problem}" for target in self.targets if target.problem)

    @property
    def buffered(self) -> tuple[int, int]:
        """Return the batches and bytes in the ring that not every indexer has acknowledged."""
        local = self._rank.local
        oldest = local.oldest_event_id
        if oldest is None:
            return 0, 0
        first_id = max(oldest, min(target.position.missing_from for target in self.targets))
        return max(0, local.next_event_id - first_id), local.bytes_from(first_id)

    @property
    def dropped(self) -> int:
        """Return the number of batches not sent as batches to some indexer: they left the ring, or were too large."""
        return self._oversized + sum(target.position.dropped for target in self.targets)

    @property
    def states(self) -> int:
        """Return the number of states sent."""
        return sum(target.position.states for target in self.targets)

    async def drained(self) -> None:
        """Return when every indexer has everything."""
        while not all(target.up_to_date for target in self.targets):
            self._moved.clear()
            await self._moved.wait()

    async def close(self, *, deregister: bool) -> None:
        """End it, after its tasks have ended."""
        await asyncio.gather(*(target.close(deregister=deregister) for target in self.targets))

    def _wake(self) -> None:
        for target in self.targets:
            target.wake()
