"""Position of a replica in a stream, and what follows from it; pure.

A replica's position is the last stream sequence that its state contains. It belongs to that state: it is lost with the
process, and found again in the snapshot that is loaded, whatever the server remembers of the replica. Each source has a
position of its own, P, until it is read at the end of the stream.

::

    first                    P (snapshot)                      last
    ├─── purged before ───────┼─── past of one source ──────────┼─── tail of all ───▶
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

SNAPSHOTS_KEPT: Final = 2
"""The older one serves a replica that was reading it when the newer one came."""
SNAPSHOTS_PER_AGE: Final = 4
"""A message is in a snapshot once it is older than the stream's maximum age divided by this, well before it goes."""


class StreamState(NamedTuple):
    """State of a stream as the server reports it."""

    incarnation: int
    """Time of its creation, microseconds since the Unix epoch: a stream that is made again counts from 1 again."""
    first: int
    """Sequence of its first message; the next one's, if it is empty. 0 = it never had one."""
    last: int
    """Sequence of its last message, there or not; 0 = it never had one."""
    deleted: int = 0
    """Messages removed between the first and the last."""


class SnapshotId(NamedTuple):
    """Key of a snapshot within its stream and shard. Ordered from old to new, within an incarnation."""

    incarnation: int
    """Incarnation of its stream."""
    sequence: int
    """S: last stream sequence contained."""


def follows(stream: StreamState, incarnation: int, position: int) -> bool:
    """Return whether a replica at `position` of an incarnation can go on where it is."""
    return stream.incarnation == incarnation and position <= stream.last and position + 1 >= stream.first


def fits(snapshot: SnapshotId, stream: StreamState) -> bool:
    """Return whether the messages after a snapshot are those of the stream."""
    return snapshot.incarnation == stream.incarnation and snapshot.sequence <= stream.last


def to_load(stream: StreamState, snapshots: Iterable[SnapshotId]) -> list[SnapshotId]:
    """Return the snapshots in which the state of a source is looked for, best first.

    Those of the stream; without any, the newest of a stream that is gone: old, but its cursors show what is new, and
    publishers what was missed.

    Args:
        stream: The stream now.
        snapshots: Complete ones.
    """
    ordered = sorted(snapshots, reverse=True)
    return [each for each in ordered if fits(each, stream)] or ordered[:1]


class Retention(NamedTuple):
    """Snapshots and stream messages that are no longer needed."""

    drop: tuple[SnapshotId, ...]
    purge_through: int
    """Every stream sequence up to here is in all snapshots that are kept; 0 = purge nothing."""


def retention(snapshots: Iterable[SnapshotId], incarnation: int) -> Retention:
    """Return the snapshots of one shard to delete, and how far the retained ones reach.

    Args:
        snapshots: Complete ones.
        incarnation: Of the stream.
    """
    ordered = sorted(snapshots, key=lambda s: (s.incarnation == incarnation, s), reverse=True)
    kept = ordered[:SNAPSHOTS_KEPT]
    covered = [s.sequence for s in kept if s.incarnation == incarnation]
    return Retention(tuple(ordered[SNAPSHOTS_KEPT:]), min(covered) if len(covered) == SNAPSHOTS_KEPT else 0)


def superseded(snapshots: Iterable[SnapshotId], incarnation: int, purge_through: int) -> tuple[SnapshotId, ...]:
    """Return the snapshots to delete of a shard that no longer exists, since the number of shards changed.

    Args:
        snapshots: Complete ones of that shard.
        incarnation: Of the stream.
        purge_through: What all shards of now have in the snapshots that they keep; 0 = not all keep two yet.
    """
    return tuple(
        s for s in snapshots if purge_through and (s.incarnation != incarnation or s.sequence <= purge_through)
    )


class SnapshotSchedule:
    """Schedule of snapshots: after a number of messages, or before the oldest message in no snapshot is old.

    Args:
        threshold: Messages since the last one.
        max_age_seconds: Of the stream's messages.
    """

    def __init__(self, threshold: int, max_age_seconds: float) -> None:
        self.max_age_seconds = max_age_seconds
        self._threshold = threshold
        self.covered = 0
        """Sequence of the newest snapshot known."""
        self._uncovered_since: float | None = None
        """No message in no snapshot is older, seconds since the Unix epoch; None = every message read is in one."""

    def restart(self, covered: int) -> None:
        """Continue from another place: the newest snapshot, or nothing."""
        self.covered, self._uncovered_since = covered, None

    def on_message(self, sequence: int, sent_at: float) -> None:
        """Note that a message was applied.

        Args:
            sequence: Its stream sequence.
            sent_at: When the server took it, seconds since the Unix epoch.
        """
        if self._uncovered_since is None and sequence > self.covered:
            self._uncovered_since = sent_at

    def on_snapshot(self, sequence: int, cut_at: float, position: int) -> None:
        """Note a snapshot of any replica.

        Args:
            sequence: Its S.
            cut_at: When it was taken, seconds since the Unix epoch.
            position: Where this replica is now.
        """
        if sequence <= self.covered:
            return
        self.covered = sequence
        self._uncovered_since = cut_at if position > sequence else None

    def due(self, position: int, now: float) -> bool:
        """Return whether a snapshot should be taken.

        Args:
            position: Where this replica is.
            now: Seconds since the Unix epoch.
        """
        if self._uncovered_since is None or position <= self.covered:
            return False
        max_wait = self.max_age_seconds / SNAPSHOTS_PER_AGE
        return position - self.covered >= self._threshold or now - self._uncovered_since >= max_wait
