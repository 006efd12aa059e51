"""History of one rank at its publisher, from which readers recover: its last batches, and its state.

::

    request for from..to, of what was published up to `last`:
      from unset ─────────────▶ the state
      from older than the ring ▶ the state           the state's event id is the reader's new cursor
      to < from ──────────────▶ invalid range
      from > last ────────────▶ too new: there is nothing yet
      else ───────────────────▶ exactly the batches from..to
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from kvscout.v1 import bridge_pb2
from kvscout_blocks.bytes.messages import parse_batch
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source.feed import SourceState
from kvscout_common.errors import NotFound, Unavailable
from kvscout_common.worker import PoolKey, WorkerRank

RING_BATCHES: Final = 1024
RING_BYTES: Final = 64 * 1024 * 1024
"""Published batches kept; the oldest go first, and readers that need them get the state."""
DEMOTED_SECONDS: Final = 120.0
"""Seconds for which blocks whose history was lost can still be named as parents."""

Outcome = bridge_pb2.RecoverOutcome


class Recovered(NamedTuple):
    """Answer to a recovery request."""

    outcome: bridge_pb2.RecoverOutcome.ValueType
    messages: Sequence[bytes]
    """Serialised `KvEventBatch`es."""
    last_event_id: int | None


class PublishedHistory:
    """State and last published batches of one rank.

    Args:
        rank: Whose.
        pool: Its index's key.
        index: Has applied what was published, and knows the rank.
        history_incomplete: Whether events before what the index has may be missing.
        max_batches: Size of the ring.
        max_bytes: Size of the ring.
    """

    def __init__(
        self,
        rank: WorkerRank,
        pool: PoolKey,
        index: BlockIndex,
        *,
        history_incomplete: Callable[[], bool],
        max_batches: int = RING_BATCHES,
        max_bytes: int = RING_BYTES,
    ) -> None:
        self.epoch = 0
        """Incarnation of the engine; 0 = not known yet."""
        self.last_event_id: int | None = None
        self._rank = rank
        self._pool = pool
        self._index = index
        self._history_incomplete = history_incomplete
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._ring: deque[bytes] = deque()
        """Messages of consecutive batches, the last one that of `last_event_id`."""
        self._ring_bytes = 0

    def restart(self, epoch: int, last_event_id: int | None = None) -> None:
        """Begin an incarnation: nothing of before is valid, and the index has nothing of it.

        Args:
            epoch: Of the incarnation.
            last_event_id: Last batch of it that the index has.
        """
        self.epoch, self.last_event_id = epoch, last_event_id
        self._clear()

    def add(self, event_id: int, message: bytes | None) -> None:
        """Add the message of a batch that was applied; None = it cannot be sent as one message, only in the state."""
        if message is None or event_id != self.next_event_id:
            self._clear()
        self.last_event_id = event_id
        if message is None:
            return
        self._ring.append(message)
        self._ring_bytes += len(message)
        while len(self._ring) > self._max_batches or self._ring_bytes > self._max_bytes:
            self._ring_bytes -= len(self._ring.popleft())

    @property
    def next_event_id(self) -> int:
        """Return the number that continues the last batch."""
        return 0 if self.last_event_id is None else self.last_event_id + 1

    @property
    def oldest_event_id(self) -> int | None:
        """Return the number of the oldest batch in the ring; None = it is empty."""
        return self.next_event_id - len(self._ring) if self._ring else None

    def batches(self, first_id: int, *, max_bytes: int) -> list[bytes]:
        """Return messages of consecutive batches from one in the ring on: as many as fit, at least one."""
        oldest = self.oldest_event_id
        if oldest is None or not oldest <= first_id < self.next_event_id:
            raise ValueError(f"batch {first_id} is not in the ring")
        newest_first = list(islice(reversed(self._ring), self.next_event_id - first_id))
        taken, size_bytes = [newest_first.pop()], 0
        while newest_first and (size_bytes := size_bytes + len(taken[-1])) + len(newest_first[-1]) <= max_bytes:
            taken.append(newest_first.pop())
        return taken

    def bytes_from(self, first_id: int) -> int:
        """Return the size of the ring's messages from a batch on."""
        return sum(map(len, islice(reversed(self._ring), max(0, self.next_event_id - first_id))))

    async def state(self) -> SourceState:
        """Return one consistent cut, as of the call; batches may be added meanwhile.

        Raises:
            Unavailable: The epoch is not known yet, or another one began meanwhile.
            NotFound: The index does not know the rank.
        """
        epoch, last_event_id, incomplete = self.epoch, self.last_event_id, self._history_incomplete()
        if not epoch:
            raise Unavailable("the engine's incarnation is not known yet: NATS was not reached")
        cut = self._index.cut(self._rank)
        if cut is None:
            raise NotFound(f"worker {self._rank.worker_id} rank {self._rank.dp_rank} is not known")
        messages = await cut.encode(self._pool, history_incomplete=incomplete, epoch=epoch)
        if messages is None:
            raise Unavailable("the rank began anew while its state was taken")
        return SourceState(epoch, last_event_id, messages, history_incomplete=incomplete)

    async def recover(self, first_id: int | None, last_id: int | None) -> Recovered:
        """Answer a request for the events `first_id`..`last_id`, both inclusive; see the module.

        Args:
            first_id: None = the state.
            last_id: None = up to now.

        Raises:
            Unavailable, NotFound: As `state`.
        """
        last = self.last_event_id
        if first_id is not None and last_id is not None and last_id < first_id:
            return Recovered(Outcome.RECOVER_OUTCOME_INVALID_RANGE, [], last)
        if first_id is not None and first_id >= self.next_event_id:
            return Recovered(Outcome.RECOVER_OUTCOME_TOO_NEW, [], last)
        oldest = self.oldest_event_id
        if first_id is None or oldest is None or first_id < oldest:
            state = await self.state()
            return Recovered(Outcome.RECOVER_OUTCOME_DUMP, state.messages, state.last_event_id)
        end = self.next_event_id if last_id is None else last_id + 1
        # Not by index: a deque is a list of blocks, and the slice is most often at its end.
        wanted = [message for number, message in enumerate(self._ring, oldest) if first_id <= number < end]
        return Recovered(Outcome.RECOVER_OUTCOME_EVENTS, wanted, last)

    async def answer(self, request: bridge_pb2.RecoverRequest) -> Iterator[bridge_pb2.RecoverResponse]:
        """Return the parts of the answer to a request.

        Raises:
            Unavailable, NotFound: As `state`.
        """
        recovered = await self.recover(
            request.from_event_id if request.HasField("from_event_id") else None,
            request.to_event_id if request.HasField("to_event_id") else None,
        )
        return _parts(recovered)

    def _clear(self) -> None:
        self._ring.clear()
        self._ring_bytes = 0


def _parts(recovered: Recovered) -> Iterator[bridge_pb2.RecoverResponse]:
    outcome, messages, last_event_id = recovered
    if not messages:
        yield bridge_pb2.RecoverResponse(outcome=outcome, last_event_id=last_event_id, last=True)
    for part, message in enumerate(messages):
        yield bridge_pb2.RecoverResponse(
            outcome=outcome,
            batch=parse_batch(message),
            last_event_id=last_event_id,
            part=part,
            last=part == len(messages) - 1,
        )
