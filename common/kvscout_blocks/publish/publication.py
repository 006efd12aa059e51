"""Send queues of a publisher's ranks: their batches, or their state where batches do not follow one another.

::

    engine batch ─▶ Publication ──message──▶ queue ─┐                    ┌── confirmed: gone
                        │                           ├─ Outbox ─▶ in flight
                    local index ──cut──▶ state due ─┘     ▲              └── failed: before the queue again
                                                          └ full: the oldest rank's queue goes, its state is due

A state replaces what readers know. It is due where batches do not follow one another, where one is too large for a
message, and where the queue was dropped; it is cut when it is sent, so that what waits for NATS is bounded and a
state is never older than the batches that come after it. Who keeps no state has a gap in its batches instead, which
readers see. Pure: no socket, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from kvscout_blocks.bytes.events import DecodedBatch
from kvscout_blocks.bytes.messages import MAX_CHUNK_BYTES
from kvscout_blocks.index.backend import encode_batch
from kvscout_blocks.publish.history import PublishedHistory
from kvscout_blocks.source.decisions import SequencedBatch
from kvscout_common.errors import Unavailable
from kvscout_common.worker import PoolKey, WorkerRank

MAX_BUFFERED_BYTES: Final = 64 * 1024 * 1024
"""Default of --max-buffered-bytes."""
BURST_BYTES: Final = 2 * 1024 * 1024
"""Batches of one rank taken at once: what is under way until NATS has confirmed it."""
MESSAGE_OVERHEAD_BYTES: Final = 256
"""Memory of a waiting message beside its bytes."""


class Outgoing(NamedTuple):
    """One message on its way."""

    epoch: int
    event_id: int | None
    message: bytes
    digest: int | None
    """Digest of the engine's payload; None = not known."""
    chunk: int | None = None
    """Number of the state chunk; None: it is a batch of events."""


class Confirmed(NamedTuple):
    """The last batch that readers can have."""

    event_id: int
    digest: int


class Outbox:
    """Bounds what all ranks of a process have waiting, and lists those with something to send.

    Args:
        max_bytes: Of waiting batches, of all ranks together.
        ready: Called when a rank has something to send.
    """

    def __init__(self, max_bytes: int, ready: Callable[[], None]) -> None:
        self.buffered_bytes = 0
        self._max_bytes = max_bytes
        self._ready = ready
        self._publications: list[Publication] = []
        self._next_number = 0

    def add(self, publication: Publication) -> None:
        """Make a rank known."""
        self._publications.append(publication)

    def remove(self, publication: Publication) -> None:
        """Forget a rank and what it has waiting."""
        self._publications.remove(publication)
        publication.discard()

    @property
    def due(self) -> list[Publication]:
        """Return the ranks that have something to send and nothing under way."""
        return [publication for publication in self._publications if publication.due]

    @property
    def empty(self) -> bool:
        """Return whether all was sent and confirmed."""
        return not any(p.waiting or p.under_way or p.due for p in self._publications)

    def number(self) -> int:
        """Number what waits, by age."""
        self._next_number += 1
        return self._next_number

    def account(self, size_bytes: int) -> None:
        """Account for bytes that began or ceased to wait; drop the oldest queue if there are too many."""
        self.buffered_bytes += size_bytes
        while self.buffered_bytes > self._max_bytes:
            waiting = [p for p in self._publications if p.oldest is not None]
            if not waiting:
                return
            min(waiting, key=lambda p: p.oldest or 0).overflow()

    def report_ready(self) -> None:
        """Report that a rank has something to send."""
        self._ready()


class _Waiting(NamedTuple):
    number: int
    outgoing: Outgoing

    @property
    def size_bytes(self) -> int:
        return len(self.outgoing.message) + MESSAGE_OVERHEAD_BYTES


class Publication:
    """Send queue of one rank.

    Args:
        rank: Whose.
        pool: Its index's key.
        adapters: LoRA number → adapter name, as registered.
        local: Its local index; batches are published after they were applied to it.
        outbox: Bounds what waits.
        max_message_bytes: A batch above this is not sent; the state is.
        has_state: Whether batches are applied to the local index; if not, only the empty state of an incarnation that
            has just begun can be sent.
    """

    def __init__(
        self,
        rank: WorkerRank,
        pool: PoolKey,
        adapters: Mapping[int, str],
        local: PublishedHistory,
        outbox: Outbox,
        *,
        max_message_bytes: int = MAX_CHUNK_BYTES,
        has_state: bool = True,
    ) -> None:
        self.rank = rank
        self.pool = pool
        self.local = local
        self.dropped = 0
        """Batches that were not sent because too many waited."""
        self.oversized = 0
        """Batches too large for a message."""
        self.states = 0
        """States sent or begun."""
        self.published = 0
        """Batches that NATS has confirmed."""
        self.confirmed: Confirmed | None = None
        self.held_back = False
        """Nothing may be sent yet."""
        self.in_flight: list[_Waiting] = []
        self.adapters = adapters
        self._outbox = outbox
        self._max_message_bytes = max_message_bytes
        self._has_state = has_state
        self._queue: deque[_Waiting] = deque()
        self._state_due = False
        self._state_begun = False
        """A state is being taken."""
        self._last_digest: int | None = None
        outbox.add(self)

    @property
    def due(self) -> bool:
        """Return whether there is something to send, which may be sent, and nothing under way."""
        return not self.held_back and not self.under_way and (self._state_due or bool(self._queue))

    @property
    def under_way(self) -> bool:
        """Return whether something is being sent, or made ready for it."""
        return self._state_begun or bool(self.in_flight)

    @property
    def waiting(self) -> int:
        """Return the number of batches that are not confirmed yet."""
        return len(self._queue) + sum(w.outgoing.chunk is None for w in self.in_flight)

    @property
    def oldest(self) -> int | None:
        """Return the number of the oldest waiting batch; None = none waits."""
        return self._queue[0].number if self._queue else None

    def begin(self, epoch: int, last: Confirmed | None) -> None:
        """Begin an incarnation: its state is due, and nothing of before is sent.

        Args:
            epoch: Of the incarnation.
            last: The last batch that the local index has of it; None: it has none.
        """
        self.local.restart(epoch, last.event_id if last is not None else None)
        self._last_digest = last.digest if last is not None else None
        self.confirmed = None
        self.lose()

    def resume(self, epoch: int, published: Confirmed) -> None:
        """Resume an incarnation whose batches up to one were published already; all that is known of it follows."""
        self.local.restart(epoch)
        self._drop_queue()
        self._state_due = False
        self.confirmed = published
        self._last_digest = None

    def applied(self, batch: SequencedBatch[DecodedBatch]) -> None:
        """Queue a batch that the local index has applied."""
        local = self.local
        encoded = encode_batch(
            self.rank, self.pool, self.adapters, batch.content, epoch=local.epoch, event_id=batch.event_id
        )
        message = encoded if len(encoded) <= self._max_message_bytes else None
        self.oversized += message is None
        follows = batch.event_id == local.next_event_id or batch.cleared
        local.add(batch.event_id, message)
        self._last_digest = batch.digest
        if self.confirmed is not None and batch.event_id <= self.confirmed.event_id:
            return
        if self._has_state:
            if self._state_due:
                return
            if message is None or not follows:
                self.lose()
                return
        # An incarnation shows by its first batch as well.
        self._state_due = False
        if message is None:
            return
        waiting = _Waiting(self._outbox.number(), Outgoing(local.epoch, batch.event_id, message, digest=batch.digest))
        self._queue.append(waiting)
        self._outbox.account(waiting.size_bytes)
        self._outbox.report_ready()

    def lose(self) -> None:
        """Drop the queue: batches do not follow one another, and the state that is due contains them."""
        self._drop_queue()
        self._state_due = self._has_state or self.local.last_event_id is None
        self._outbox.report_ready()

    def overflow(self) -> None:
        """Drop the queue: too many bytes wait."""
        self.dropped += len(self._queue)
        self.lose()

    def discard(self) -> None:
        """Drop everything; nothing of this rank is sent any more."""
        self.held_back = True
        self._state_due = False
        self._drop_queue()

    async def take(self, max_bytes: int = BURST_BYTES) -> list[Outgoing]:
        """Return what is to be sent next, in order; it is under way until `confirm` or `fail`.

        A state is as of the call; the batches that come while it is taken are to be sent after it.
        """
        assert not self.under_way
        if self._state_due:
            self.in_flight = [_Waiting(0, outgoing) for outgoing in await self._take_state()]
        else:
            taken = 0
            while self._queue and (not self.in_flight or taken + self._queue[0].size_bytes <= max_bytes):
                taken += self._queue[0].size_bytes
                self.in_flight.append(self._queue.popleft())
        return [waiting.outgoing for waiting in self.in_flight]

    async def _take_state(self) -> list[Outgoing]:
        self._state_due = False
        self._state_begun = True
        self.states += 1
        digest = self._last_digest
        try:
            state = await self.local.state()
        except Unavailable:
            # The rank began anew; what it is now will do.
            self._state_due = True
            return []
        finally:
            self._state_begun = False
        return [
            Outgoing(state.epoch, state.last_event_id, message, digest, number)
            for number, message in enumerate(state.messages)
        ]

    def confirm(self) -> None:
        """Note that all that was taken has arrived."""
        for waiting in self.in_flight:
            outgoing = waiting.outgoing
            if outgoing.chunk is None:
                self.published += 1
                self._outbox.account(-waiting.size_bytes)
            if outgoing.epoch == self.local.epoch and outgoing.event_id is not None and outgoing.digest is not None:
                self.confirmed = Confirmed(outgoing.event_id, outgoing.digest)
        self.in_flight = []
        if self.due:
            self._outbox.report_ready()

    def fail(self, *, out_of_order: bool = False) -> None:
        """Queue again what was taken and may not have arrived, where that still makes sense.

        Args:
            out_of_order: Later messages may have arrived without the ones before them.
        """
        taken, self.in_flight = self.in_flight, []
        batches = [waiting for waiting in taken if waiting.outgoing.chunk is None]
        stale = any(waiting.outgoing.epoch != self.local.epoch for waiting in taken)
        if not self._has_state:
            again = [waiting for waiting in batches if waiting.outgoing.epoch == self.local.epoch]
            self._outbox.account(sum(w.size_bytes for w in again) - sum(w.size_bytes for w in batches))
            self._queue.extendleft(reversed(again))
            self._state_due = self.local.last_event_id is None
        elif len(batches) < len(taken) or out_of_order or stale or self._state_due:
            self._outbox.account(-sum(waiting.size_bytes for waiting in batches))
            self.lose()
        else:
            self._queue.extendleft(reversed(batches))

    def _drop_queue(self) -> None:
        size_bytes = sum(waiting.size_bytes for waiting in self._queue)
        self._queue.clear()
        self._outbox.account(-size_bytes)
