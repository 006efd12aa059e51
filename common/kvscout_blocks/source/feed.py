"""Interfaces between a source and its event feed: live delivery, and replay where there is one.

::

    ZmqFeed · NATS core · JetStream · gRPC push ──batches, states──▶ Source ──▶ index
                    ▲                                                  │
                    └───────────── history(first id) ──────────────────┘
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvscout_blocks.bytes.events import DecodedBatch
from kvscout_blocks.index.block_index import Cut
from kvscout_blocks.source.decisions import SequencedBatch


class HistoryBroken(Exception):
    """History ended before its end: the source fell silent, or sent something that cannot be read."""


class NoHistory(HistoryBroken):
    """The source keeps none: another request is of no use."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """One consistent cut of a source's state, as the messages that carry it."""

    epoch: int
    last_event_id: int | None
    """Last event contained; None: the cut has no cursor."""
    messages: Sequence[bytes]
    """Serialised `KvEventBatch`es of state chunks, complete and in order."""
    history_incomplete: bool = False
    """Events before the cut may be missing."""
    last_digest: int | None = None
    """Digest of batch `last_event_id`, in a state that is not the source's own; None = not known."""

    @property
    def size_bytes(self) -> int:
        """Return the size of its messages."""
        return sum(map(len, self.messages))


class SourceCut(NamedTuple):
    """A cut of a rank's content, and what its source knew when it was begun."""

    cut: Cut
    epoch: int
    history_incomplete: bool
    last_digest: int | None
    """Digest of the last batch contained; None = not known."""


class Cursor(NamedTuple):
    """Last event of a source that was applied."""

    epoch: int
    last_event_id: int | None
    """None = nothing was applied, or what was had no sequence."""


class Progress(NamedTuple):
    """Batches that a bypass applied since a position was lent to it."""

    last_id: int
    """Last batch applied."""
    digests: bytes
    """Digests of the last batches applied, up to `last_id`, 8 bytes each in the machine's order; of a replay only those
    since it was lent."""
    applied: int
    """Batches applied since it was lent."""
    age_seconds: float | None
    """Since the last of them; None = there was none."""
    over_capacity: bool
    """Result of the last batch, see `index.Applied`."""
    incompatible: str


class Lent(NamedTuple):
    """Progress of a bypass with the position that it was lent."""

    last_id: int
    """Last batch applied."""
    applied: int
    """Batches applied since it was lent."""
    age_seconds: float | None
    """Since the last of them; None = there was none."""


class Bypass(Protocol):
    """Applies batches off the event loop, as long as each is the next one and there is nothing to decide.

    The sequence stays the one who decides: it lends its position, and takes it back before it does anything. A bypass
    stops by itself at the first batch that is not the usual case; that one and all after it come to the source as ever.
    """

    def lend(self, last_id: int, digests: bytes, stopped: Callable[[], None]) -> bool:
        """Let the bypass go on from a position; False: not now.

        Args:
            last_id: Last batch applied.
            digests: Those of the last batches applied, up to `last_id`, as in `Progress`.
            stopped: Called on the event loop if the bypass stops because of what the index said, not of what came.
        """

    def lend_replay(self, last_id: int, before: int | None, stopped: Callable[[], None]) -> bool:
        """Let the bypass go on with the replies of the replay that is being read; False: not now.

        Args:
            last_id: Last batch applied.
            before: Replies from this one on are not for the bypass; None: all are.
            stopped: See `lend`.
        """

    def pause(self, *, paused: bool) -> None:
        """Leave what comes live where it is, in sockets, or read it again. Connections are made either way."""

    def take(self) -> Progress | None:
        """Return the position back; None: it was not lent. From now on the bypass does nothing."""

    def peek(self) -> Lent | None:
        """Return how far it is, and let it go on; None: no position was lent."""


class SourceInput(Protocol):
    """Interface of a source to its feed; every call is on the event loop."""

    @property
    def cursor(self) -> Cursor:
        """Return how far it is."""

    @property
    def replaying(self) -> bool:
        """Return whether live batches wait for a history."""

    @property
    def incomplete(self) -> bool:
        """Return whether something is missing that cannot be had."""

    def on_batch(self, batch: SequencedBatch[DecodedBatch]) -> None:
        """Take a live batch."""

    def on_state(self, state: SourceState) -> None:
        """Take a live state, which replaces what was known."""

    def on_reconnect(self, *, new_publisher: bool = False) -> None:
        """Note that the live channel was (re)connected: batches may have been lost.

        Args:
            new_publisher: For some seconds before, nobody was there who could have published.
        """

    def on_malformed(self, reason: str) -> None:
        """Note a message that has no place in the sequence."""

    async def caught_up(self) -> None:
        """Wait until nothing of what came waits for work on the whole rank."""

    async def cut(self) -> SourceCut | None:
        """Return one consistent cut of the rank; None = it is not known. What arrives waits while it is copied."""

    def heal(self) -> None:
        """Request the whole state again if history is incomplete."""


class Feed(Protocol):
    """Feed of one worker rank's batches.

    A feed is opened once and closed once, and calls its source between the two only.
    """

    @property
    def address(self) -> Hashable:
        """Return what it reads from; a registration that changes it makes a new source."""

    @property
    def can_replay(self) -> bool:
        """Return whether `history` can be requested."""

    @property
    def rewinds(self) -> bool:
        """Return whether `history` comes live, and live batches continue from it."""

    @property
    def broken(self) -> str:
        """Return why nothing can be read, in one sentence; "" = it can."""

    @property
    def outage(self) -> str:
        """Return why nothing can come at this moment, in one sentence, though all is configured well; "" = it can."""

    def open(self, source: SourceInput) -> Bypass | None:
        """Begin to deliver; what cannot be opened is shown in `broken` and tried again in `tick`, not raised.

        Returns:
            What can apply batches in the source's place; None = nothing.
        """

    def close(self) -> None:
        """End delivery."""

    def tick(self, now: float) -> None:
        """Do what is due at a time."""

    def history(self, first_id: int) -> AsyncGenerator[SequencedBatch[DecodedBatch] | SourceState, None]:
        """Return everything from `first_id` on, in order, as far as it is still there; ends with the newest.

        A state stands for everything up to its last event.

        Raises:
            HistoryBroken: It cannot be had now; another request may help.
            NoHistory: It can never be had.
        """
        ...
