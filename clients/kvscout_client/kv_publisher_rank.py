"""State of a publisher's rank: event numbers, blocks, and its last messages.

::

    engine ── stored_events, removed_events ──▶ PublishedRank ──SequencedBatch──▶ Outlet: NATS or gRPC
              tokens become local hashes          │ event id, epoch
                                                  └▶ index ─▶ PublishedHistory: state and ring, which the outlet fills

Pure: no socket, and clocks are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvscout.v1 import events_pb2
from kvscout_blocks.bytes.events import MEDIA, DecodedBatch, Event, EventBatch, Removed, Stored, Tier
from kvscout_blocks.bytes.messages import VERSION
from kvscout_blocks.index.backend import make_index
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.publish.history import DEMOTED_SECONDS, RING_BATCHES, RING_BYTES, PublishedHistory
from kvscout_blocks.publish.incarnation import next_epoch
from kvscout_blocks.source.decisions import SequencedBatch
from kvscout_client.zmq_publisher import full_blocks, u64
from kvscout_common.hashing import MmItem, block_hashes
from kvscout_common.worker import WorkerRank, WorkerSpec

MAX_EVENT_BLOCKS: Final = 16_384
"""Blocks of one event: 256 KiB of hashes, half of what a message may have. More blocks become several events."""


def tier_of(medium: str | None) -> Tier:
    """Return the tier that an engine's name of a medium means; None = the device.

    Raises:
        ValueError: Nothing is known of that name.
    """
    if medium is None:
        return Tier.DEVICE
    tier = MEDIA.get(medium.upper())
    if tier is None:
        raise ValueError(f"medium {medium!r} is unknown, there are {', '.join(sorted(MEDIA))}")
    return tier


def stored_events(
    token_ids: Sequence[int],
    num_block_tokens: Sequence[int],
    hashes: Sequence[int],
    parent_hash: int | None,
    *,
    block_size: int,
    lora_name: str | None,
    medium: str | None,
    cache_salt: str | None,
    mm_items: Sequence[Sequence[str]],
) -> list[Event]:
    """Return the events of stored blocks; none where no block is full. See `KvEventPublisher.publish_stored`.

    Raises:
        ValueError: The arguments contradict each other.
    """
    tier = tier_of(medium)
    if mm_items and len(mm_items) != len(hashes):
        raise ValueError(f"mm_items of {len(mm_items)} blocks for {len(hashes)} block_hashes")
    parent = None if parent_hash is None else u64(parent_hash)
    if len(token_ids) == 0 and len(num_block_tokens) == 0:
        names = tuple(map(u64, hashes))
        return [Stored(part, tier=tier, block_size=block_size) for part in _parts(names)]
    blocks = full_blocks(token_ids, num_block_tokens, hashes, block_size)
    local_hashes = tuple(
        block_hashes(
            blocks.token_ids,
            block_size,
            lora_name=lora_name or "",
            # Block 0 of a prompt alone has the salt; those that follow have it through their parents.
            cache_salt=(cache_salt or "") if parent is None else "",
            mm_items=[
                MmItem(item, number * block_size, 1)
                for number, items in enumerate(mm_items[: len(blocks.block_hashes)])
                for item in items
            ],
        )
    )
    events: list[Event] = []
    for number, part in enumerate(_parts(blocks.block_hashes)):
        first = number * MAX_EVENT_BLOCKS
        events.append(
            Stored(
                part,
                parent=parent,
                block_size=block_size,
                tier=tier,
                local_hashes=local_hashes[first : first + len(part)],
            )
        )
        parent = part[-1]
    return events


def removed_events(hashes: Sequence[int], *, medium: str | None) -> list[Event]:
    """Return the events of removed blocks.

    Raises:
        ValueError: A hash has more than 64 bits, or the medium is unknown.
    """
    tier = tier_of(medium)
    return [Removed(part, tier) for part in _parts(tuple(map(u64, hashes)))]


def _parts(hashes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [hashes[first : first + MAX_EVENT_BLOCKS] for first in range(0, len(hashes), MAX_EVENT_BLOCKS)]


class Outlet(Protocol):
    """Transport of batches to readers. Nothing of it waits for a network."""

    def applied(self, batch: SequencedBatch[DecodedBatch]) -> None:
        """Take a batch that was applied to the index, and give its message to the local index as well."""

    def began(self, epoch: int) -> None:
        """Begin an incarnation: nothing of before is valid, for the local index too."""


class PublishedRank:
    """One rank: numbers its events, and keeps what readers recover from.

    Args:
        spec: The worker.
        rank: Its rank.
        has_state: A state is retained beside the ring.
        epoch: First incarnation; None = from the clock.
        ring_batches: Messages retained.
        ring_bytes: Size of the messages retained.
        clock: Monotonic seconds.
        wall_clock: Seconds since the Unix epoch.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rank: WorkerRank,
        *,
        has_state: bool,
        epoch: int | None = None,
        ring_batches: int = RING_BATCHES,
        ring_bytes: int = RING_BYTES,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.has_state = has_state
        self.history_incomplete = False
        """The engine's numbers had a gap."""
        self.epoch = epoch if epoch is not None else next_epoch(0, wall_clock())
        self._clock = clock
        self._wall_clock = wall_clock
        self._index = make_index(spec.block_size)
        self._index.add_worker(rank, WorkerOptions.of(spec))
        self.local = PublishedHistory(
            rank,
            spec.pool,
            self._index,
            history_incomplete=lambda: self.history_incomplete,
            max_batches=ring_batches,
            max_bytes=ring_bytes,
        )
        self.local.restart(self.epoch)

    @property
    def last_event_id(self) -> int | None:
        """Return the number of the last batch; None = there was none in this incarnation."""
        return self.local.last_event_id

    @property
    def is_known(self) -> bool:
        """Return whether the state is known: from the local index or, without one, while nothing has happened."""
        return self.has_state or self.last_event_id is None

    def publish(self, outlet: Outlet, events: Sequence[Event], event_id: int | None) -> int | None:
        """Number events, apply and publish them.

        Args:
            outlet: Outlet that takes them.
            events: Each becomes a batch.
            event_id: The engine's number of the only event, which is used even if none of its events is sent; None =
                the next ones.

        Returns:
            Number of the last one; None = there is none.

        Raises:
            ValueError: The number was published already, or is too large, or there are several events for it.
        """
        if event_id is not None:
            self._check(event_id, events)
            self._publish(outlet, tuple(events), event_id)
            return event_id
        for event in events:
            self._publish(outlet, (event,), self.local.next_event_id)
        return self.last_event_id if events else None

    def restart(self, outlet: Outlet, epoch: int | None) -> None:
        """Begin the next incarnation, which knows nothing and counts from 0.

        Raises:
            ValueError: Its epoch is not above the one before.
        """
        if epoch is not None and not self.epoch < epoch < 2**64:
            raise ValueError(f"epoch {epoch} must be above {self.epoch}, the one before, and below 2**64")
        self.epoch = epoch if epoch is not None else next_epoch(self.epoch, self._wall_clock())
        self.history_incomplete = False
        self._index.reset(self.rank)
        outlet.began(self.epoch)

    def greeting(self, resend_id: int = 0) -> bytes:
        """Return a message that names the source alone, and the request to which it is the last answer."""
        pool = self.spec.pool
        return events_pb2.KvEventBatch(
            version=VERSION,
            worker_id=self.rank.worker_id,
            dp_rank=self.rank.dp_rank,
            model=pool.model,
            tenant=pool.tenant,
            block_size=pool.block_size,
            epoch=self.epoch,
            resend_id=resend_id,
        ).SerializeToString()

    def _check(self, event_id: int, events: Sequence[Event]) -> None:
        if not self.local.next_event_id <= event_id < 2**64:
            raise ValueError(
                f"event_id {event_id} must be at least {self.local.next_event_id}: what was published before is "
                "repeated only in a new incarnation, see restart()"
            )
        if len(events) > 1:
            raise ValueError(f"event_id {event_id} is one event, which has at most {MAX_EVENT_BLOCKS} blocks")

    def _publish(self, outlet: Outlet, events: tuple[Event, ...], event_id: int) -> None:
        batch = EventBatch(events, self._wall_clock(), self.rank.dp_rank)
        gap = event_id > self.local.next_event_id
        now = self._clock()
        if gap and not batch.cleared and self.has_state:
            # What was missed may have removed anything.
            self._index.demote(self.rank, ttl_seconds=DEMOTED_SECONDS, now=now)
        self.history_incomplete = (self.history_incomplete or gap) and not batch.cleared
        if self.history_incomplete:
            self._index.maintain(now=now)
        if self.has_state:
            self._index.apply(self.rank, batch, epoch=self.epoch, event_id=event_id)
        outlet.applied(SequencedBatch(event_id, 0, batch, epoch=self.epoch, cleared=batch.cleared))
