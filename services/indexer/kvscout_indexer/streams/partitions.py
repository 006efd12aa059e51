"""The sources of one stream, each in its lane: taken by a worker's feed, or parked until somebody registers it.

::

    message ──▶ lane ── taken, live ─────────────────────▶ feed ──▶ source ──▶ index
                  └──── nobody registered it, or just now ──▶ parked: its state, then what came after it

What is parked is bounded: in bytes for each lane and for all, and in time. A lane that exceeds it is forgotten, and its
source is then verified with its publisher, or shown as incomplete, once it is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from kvscout_blocks.source.feed import Cursor
from kvscout_common.worker import WorkerRank

PARKED_BYTES: Final = 512 * 1024 * 1024
"""Of all lanes of a stream together: the state of 30 million blocks."""
PARKED_LANE_BYTES: Final = 128 * 1024 * 1024
"""Of one lane."""
MAX_LANES: Final = 65_536
"""Worker ranks of one model and tenant; messages of further ones are ignored until others are gone."""


class Taker(Protocol):
    """What a lane is delivered to: the feed of a registered worker rank."""

    @property
    def settled(self) -> bool:
        """Whether everything that was delivered is in its index, and nothing waits."""

    @property
    def cursor(self) -> Cursor:
        """How far its source is."""

    def deliver(self, data: bytes) -> None:
        """Takes the next message; what cannot be read costs itself."""

    async def caught_up(self) -> None:
        """Waits until nothing of what was delivered waits for work on the whole rank."""

    def verify(self) -> None:
        """Events may have been missed: asks the publisher."""

    async def dump(self) -> list[bytes]:
        """The state of its source as messages; batches of its source must not be delivered meanwhile.

        Raises:
            NotFound: The worker was removed.
        """


class Lane:
    """One source of a stream."""

    __slots__ = (
        "contained", "covered", "doubtful", "live", "parked", "parked_bytes", "subject", "taker", "unregistered_since",
        "unverified", "worker",
    )  # fmt: skip

    def __init__(self, subject: str, worker: WorkerRank, now: float) -> None:
        self.subject = subject
        self.worker = worker
        self.taker: Taker | None = None
        self.live = False
        """Messages go to the taker; else they are parked, since there is none or it has not had what is parked."""
        self.parked: list[bytes] = []
        self.parked_bytes = 0
        self.covered = 0
        """Messages up to this sequence are in the state that was loaded."""
        self.contained = 0
        """Messages up to this sequence are in the index, or parked; while the taker is not settled."""
        self.doubtful = False
        """Not settled since parked messages were delivered: some of them may be in neither place."""
        self.unverified = False
        """Events may have been missed, and the publisher was not asked yet."""
        self.unregistered_since = now
        """Seconds since the Unix epoch; 0 = it has a taker."""

    def position(self, stream_position: int) -> int:
        """The sequence up to which a cut of this lane contains its messages."""
        settled = self.taker is None or not self.live or self.taker.settled
        if settled:
            self.doubtful = False
        return max(stream_position if settled else self.contained, self.covered)

    def park(self, data: bytes) -> None:
        """Keeps a message."""
        self.parked.append(data)
        self.parked_bytes += len(data)

    def unpark(self) -> None:
        """Drops what is parked."""
        self.parked, self.parked_bytes = [], 0

    def replace(self, messages: Iterable[bytes]) -> None:
        """Parks a whole state in place of what is parked."""
        self.parked = list(messages)
        self.parked_bytes = sum(map(len, self.parked))


class Lanes:
    """Every source of a stream that belongs to this replica's shard.

    Args:
        now: Seconds since the Unix epoch.
        max_lane_bytes: Parked for one lane.
        max_bytes: Parked for all.
    """

    def __init__(
        self,
        now: Callable[[], float],
        *,
        max_lane_bytes: int = PARKED_LANE_BYTES,
        max_bytes: int = PARKED_BYTES,
    ) -> None:
        self._now = now
        self._max_lane_bytes = max_lane_bytes
        self._max_bytes = max_bytes
        self._lanes: dict[str, Lane] = {}
        self.parked_bytes = 0
        """Kept of all lanes that are not live."""
        self.forgotten = 0
        """Lanes whose parked messages were dropped."""

    def __iter__(self) -> Iterator[Lane]:
        return iter([self._lanes[subject] for subject in sorted(self._lanes)])

    def get(self, subject: str) -> Lane | None:
        """The lane of a subject; None if nothing came there yet."""
        return self._lanes.get(subject)

    @property
    def full(self) -> bool:
        """Whether there are as many as there may be."""
        return len(self._lanes) >= MAX_LANES

    def of(self, subject: str, worker: WorkerRank) -> Lane:
        """The lane of a subject, made if need be, also if it is one too many."""
        lane = self._lanes.get(subject)
        if lane is None:
            lane = self._lanes[subject] = Lane(subject, worker, self._now())
        return lane

    def park(self, lane: Lane, data: bytes) -> None:
        """Keeps a message until the lane is live, within the bounds."""
        lane.park(data)
        self.parked_bytes += len(data)
        self._bound(lane)

    def load(self, lane: Lane, messages: Iterable[bytes]) -> None:
        """Parks a state in place of what is parked, within the bounds."""
        self.parked_bytes -= lane.parked_bytes
        lane.replace(messages)
        self.parked_bytes += lane.parked_bytes
        self._bound(lane)

    def unpark(self, lane: Lane) -> list[bytes]:
        """Takes what is parked."""
        parked = lane.parked
        self.parked_bytes -= lane.parked_bytes
        lane.unpark()
        return parked

    def expire(self, max_age_seconds: float) -> None:
        """Forgets lanes that nobody registered for as long as the stream keeps messages: their workers are gone."""
        oldest = self._now() - max_age_seconds
        for lane in list(self._lanes.values()):
            if lane.taker is None and lane.unregistered_since < oldest:
                self.unpark(lane)
                del self._lanes[lane.subject]

    def _bound(self, lane: Lane) -> None:
        if lane.parked_bytes > self._max_lane_bytes:
            self._forget(lane)
        while self.parked_bytes > self._max_bytes:
            self._forget(max(self._lanes.values(), key=lambda each: each.parked_bytes))

    def _forget(self, lane: Lane) -> None:
        self.unpark(lane)
        lane.unverified = True
        self.forgotten += 1
