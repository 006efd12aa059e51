"""What a source needs of whatever brings its batches: live delivery, and the past where it can be asked for.

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
from kvscout_blocks.source.sequence import SequencedBatch


class HistoryBroken(Exception):
    """History ended before its end: the one asked fell silent, or said something that cannot be read."""


class NoHistory(HistoryBroken):
    """The one asked keeps none: asking again is of no use."""


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
    """Of batch `last_event_id`, in a state that is not the source's own; None = not known."""

    @property
    def size_bytes(self) -> int:
        """Of its messages."""
        return sum(map(len, self.messages))


class SourceCut(NamedTuple):
    """A cut of a rank's content, and what its source knew when it was begun."""

    cut: Cut
    epoch: int
    history_incomplete: bool
    last_digest: int | None
    """Of the last batch contained; None: not known."""


class Cursor(NamedTuple):
    """How far a source was applied."""

    epoch: int
    last_event_id: int | None
    """None = nothing was applied, or what was had no sequence."""


class Progress(NamedTuple):
    """What a bypass did with a position that was lent to it."""

    last_id: int
    """Last batch applied."""
    digests: Sequence[tuple[int, int]]
    """(id, digest) of the last batches applied, oldest first."""
    applied: int
    """Batches applied since it was lent."""
    age_seconds: float | None
    """Since the last of them; None = there was none."""
    over_capacity: bool
    """What the index said of the last one, see `index.Applied`."""
    incompatible: str


class Bypass(Protocol):
    """Applies batches off the event loop, as long as each is the next one and there is nothing to decide.

    The sequence stays the one who decides: it lends its position, and takes it back before it does anything. A bypass
    stops by itself at the first batch that is not the usual case; that one and all after it come to the source as ever.
    """

    def lend(self, last_id: int, digests: Sequence[tuple[int, int]], stopped: Callable[[], None]) -> bool:
        """Lets the bypass go on from a position; False: not now.

        Args:
            last_id: Last batch applied.
            digests: (id, digest) of the last batches applied, oldest first.
            stopped: Called on the event loop if the bypass stops because of what the index said, not of what came.
        """

    def take(self) -> Progress | None:
        """The position back; None: it was not lent. From now on the bypass does nothing."""


class SourceInput(Protocol):
    """What a feed tells its source, and may ask it; every call is on the event loop."""

    @property
    def cursor(self) -> Cursor:
        """How far it is."""

    @property
    def replaying(self) -> bool:
        """Whether live batches wait for a history."""

    @property
    def incomplete(self) -> bool:
        """Whether something is missing that cannot be had."""

    def on_batch(self, batch: SequencedBatch[DecodedBatch]) -> None:
        """A batch came live."""

    def on_state(self, state: SourceState) -> None:
        """A state came live: the publisher says that it replaces what was known."""

    def on_reconnect(self, *, new_publisher: bool = False) -> None:
        """The live channel was (re)connected: batches may have been lost.

        Args:
            new_publisher: For some seconds before, nobody was there who could have published.
        """

    def on_malformed(self, reason: str) -> None:
        """Something came that has no place in the sequence."""

    async def caught_up(self) -> None:
        """Waits until nothing of what came waits for work on the whole rank."""

    async def cut(self) -> SourceCut | None:
        """One consistent cut of the rank; None: it is not known. What comes waits while it is copied."""

    def heal(self) -> None:
        """The feed may have a whole state again: asks for it, if history is incomplete."""


class Feed(Protocol):
    """What brings the batches of one worker rank.

    A feed is opened once and closed once, and calls its source between the two only.
    """

    @property
    def address(self) -> Hashable:
        """What it reads from; a registration that changes it makes a new source."""

    @property
    def can_replay(self) -> bool:
        """Return whether `history` can be requested."""

    @property
    def rewinds(self) -> bool:
        """Return whether `history` comes live, and live batches continue from it."""

    @property
    def broken(self) -> str:
        """Why nothing can be read, in one sentence; "" = it can."""

    @property
    def outage(self) -> str:
        """Why nothing can come at this moment, in one sentence, though all is configured well; "" = it can."""

    def open(self, source: SourceInput) -> Bypass | None:
        """Begins to deliver; what cannot be opened is shown in `broken` and tried again in `tick`, not raised.

        Returns:
            What can apply batches in the source's place; None = nothing.
        """

    def close(self) -> None:
        """Ends delivery."""

    def tick(self, now: float) -> None:
        """Time passed: does what is due."""

    def history(self, first_id: int) -> AsyncGenerator[SequencedBatch[DecodedBatch] | SourceState, None]:
        """Everything from `first_id` on, in order, as far as it is still there; ends with the newest.

        A state stands for everything up to its last event.

        Raises:
            HistoryBroken: It cannot be had now; asking again may help.
            NoHistory: It can never be had.
        """
        ...
