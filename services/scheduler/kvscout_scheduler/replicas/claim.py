"""A claim: what a replica says of a request that it owns. Pure values and their protobuf form.

Of several claims to a name, those that are *over* cancel the active ones of a lower term, and those of the same attempt
at the same term; of the active ones left the highest (term, replica id, epoch) holds.
"""

from __future__ import annotations

import math
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple, Protocol

from kvscout.v1 import replication_pb2, scheduler_pb2
from kvscout_common.errors import InvalidArgument
from kvscout_common.registry.worker_proto import rank_from_proto, rank_to_proto
from kvscout_common.worker import ALL_TENANTS
from kvscout_scheduler.messages.translate import key_from_proto, key_to_proto
from kvscout_scheduler.replicas.blocks import FindBlocks, KnownBlocks, known_blocks
from kvscout_scheduler.values.reservation import HASH_BYTES, NOWHERE, Choice, OwnerName, RequestKey, Reservation


class Incarnation(NamedTuple):
    """One life of a replica."""

    replica_id: str
    epoch: int
    """Its start, microseconds since the Unix epoch."""


class ClaimState(IntEnum):
    """State of a claimed request; the numbers of the protocol."""

    PREFILL = replication_pb2.CLAIM_STATE_PREFILL
    DECODE = replication_pb2.CLAIM_STATE_DECODE
    FREED = replication_pb2.CLAIM_STATE_FREED
    """By its caller: this attempt is never booked again."""
    ENDED = replication_pb2.CLAIM_STATE_ENDED


_STATES = frozenset(state.value for state in ClaimState)

NONE_LEFT_OUT = KnownBlocks(0, 0)
NOBODY = OwnerName("", "")
"""The owner, in a digest, of what has none."""


class Claim(NamedTuple):
    """One replica's claim to a request; never changed, only replaced."""

    reservation: Reservation
    term: int
    state: ClaimState
    output_blocks: int = 0
    owner: OwnerName | None = None
    lease_seconds: float = 0.0
    owner_since: int = 0
    """Time when the owner opened its stream to the replica, microseconds since the Unix epoch."""

    @property
    def key(self) -> RequestKey:
        """Return the name of the request."""
        return self.reservation.key

    @property
    def attempt_id(self) -> int:
        """Return the attempt of the request."""
        return self.reservation.attempt_id

    @property
    def active(self) -> bool:
        """Return whether it occupies a worker."""
        return self.state <= ClaimState.DECODE

    def cancels(self, other: Claim) -> bool:
        """Return whether this claim, which is over, cancels an active one."""
        return self.term > other.term or (self.term == other.term and self.attempt_id == other.attempt_id)

    def mark(self) -> int:
        """Return its part in its replica's digest: 64 bits over all that can change, and its name."""
        (key, attempt_id, rank, *_), owner = self.reservation, self.owner or NOBODY
        text = (
            f"{key.tenant}\0{key.model}\0{key.role}\0{key.request_id}\0{attempt_id}\0{self.term}\0{self.state:d}\0"
            f"{rank.worker_id}\0{rank.dp_rank}\0{self.output_blocks}\0{owner.owner_id}\0{float(self.lease_seconds)!r}"
        )
        if owner.tenant not in ("", ALL_TENANTS):
            text += f"\0{owner.tenant}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")

    def size(self, *, known: bool = False) -> int:
        """Return about its bytes in a message; known = without its hashes."""
        return (
            (0 if known else len(self.reservation.block_hashes))
            + len(self.key.request_id)
            + len(self.key.model)
            + sum(map(len, self.owner or ()))
            + 128
        )


def shared(reservation: Reservation) -> Reservation:
    """Return the facts that all replicas share of a booking: not since when one of them has had it."""
    return (
        reservation._replace(running=False, prefilled=False)
        if reservation.running or reservation.prefilled
        else reservation
    )


class ClaimSet(dict[RequestKey, Claim]):
    """Claims by name, with their digest: the exclusive or of their marks. It follows `put` and `drop`, nothing else."""

    __slots__ = ("_marks", "digest", "sent_sequence")

    def __init__(self) -> None:
        super().__init__()
        self.digest = 0
        self.sent_sequence: dict[RequestKey, int] = {}
        """Sequence of the event that carried the hashes of each."""
        self._marks: dict[RequestKey, int] = {}

    def put(self, claim: Claim, sent_sequence: int | None = None) -> None:
        """Add or replaces a claim.

        Args:
            claim: With its hashes.
            sent_sequence: Sequence of the event that carried these; None = that of the claim before.
        """
        if sent_sequence is not None:
            self.sent_sequence[claim.key] = sent_sequence
        mark = claim.mark()
        self.digest ^= self._marks.get(claim.key, 0) ^ mark
        self._marks[claim.key] = mark
        self[claim.key] = claim

    def drop(self, key: RequestKey) -> Claim:
        """Take a claim out."""
        self.digest ^= self._marks.pop(key)
        del self.sent_sequence[key]
        return self.pop(key)


class _Owned(Protocol):
    """Message with an owner."""

    owner_id: str
    owner_tenant: str


def owner_to_proto(owner: OwnerName | None) -> dict[str, str]:
    """Return the fields of a message for an owner."""
    if owner is None:
        return {}
    return {"owner_id": owner.owner_id, "owner_tenant": "" if owner.tenant == ALL_TENANTS else owner.tenant}


def owner_from_proto(message: _Owned) -> OwnerName | None:
    """Return the owner in a message."""
    return OwnerName(message.owner_tenant or ALL_TENANTS, message.owner_id) if message.owner_id else None


def name_to_proto(claim: Claim) -> scheduler_pb2.RequestRef:
    """Return the request and attempt of a claim."""
    return key_to_proto(claim.key, claim.attempt_id)


def claim_to_proto(claim: Claim, *, known: bool = False) -> replication_pb2.Claim:
    """Return a claim, for others; known = without its hashes, which they have."""
    reservation = claim.reservation
    choice, block_hashes = reservation.choice, reservation.block_hashes
    left_out = known_blocks(block_hashes) if known else NONE_LEFT_OUT
    return replication_pb2.Claim(
        request=name_to_proto(claim),
        term=claim.term,
        state=claim.state.value,
        worker=rank_to_proto(reservation.rank) if claim.active else None,
        block_hashes=b"" if known else block_hashes,
        known_blocks=left_out.blocks,
        known_blocks_crc=left_out.crc,
        isl_tokens=reservation.isl_tokens,
        uncached_tokens=reservation.uncached_tokens,
        expected_output_tokens=reservation.expected_output_tokens,
        output_blocks=claim.output_blocks,
        **owner_to_proto(claim.owner),
        lease_seconds=claim.lease_seconds,
        choice=replication_pb2.ClaimChoice(**choice._asdict()) if choice is not None else None,
        owner_since=claim.owner_since,
        max_output_tokens=reservation.max_output_tokens,
        output_class=reservation.output_class,
        lineage=reservation.lineage,
        estimate_prefill_complete=reservation.estimates_prefill,
        session=reservation.session,
    )


def claim_from_proto(message: replication_pb2.Claim, find: FindBlocks) -> Claim:
    """Return a claim of another replica.

    Args:
        message: What it says.
        find: Finds hashes that are left out.

    Raises:
        InvalidArgument: It is none; the field is named.
        UnknownBlocks: Its hashes are left out, and not here.
    """
    if message.state not in _STATES:
        raise InvalidArgument(f"{message.state} is none", field="claim.state")
    if not message.term:
        raise InvalidArgument("must be at least 1", field="claim.term")
    if len(message.block_hashes) % HASH_BYTES:
        raise InvalidArgument("packed hashes must be whole u64s", field="claim.block_hashes")
    lease = message.lease_seconds
    if not (math.isfinite(lease) and lease >= 0):
        # No bound: that of callers is not that of a replica's own settings, which may be another release's.
        raise InvalidArgument("must be a finite number of at least 0", field="claim.lease_seconds")
    choice, key, attempt_id = message.choice, key_from_proto(message.request), message.request.attempt_id
    block_hashes = message.block_hashes
    if message.known_blocks:
        if block_hashes:
            raise InvalidArgument("must be empty if known_blocks is set", field="claim.block_hashes")
        block_hashes = find(key, attempt_id, KnownBlocks(message.known_blocks, message.known_blocks_crc))
    reservation = Reservation(
        key=key,
        attempt_id=attempt_id,
        rank=rank_from_proto(message.worker) if message.HasField("worker") else NOWHERE,
        isl_tokens=message.isl_tokens,
        uncached_tokens=message.uncached_tokens,
        expected_output_tokens=message.expected_output_tokens,
        block_hashes=block_hashes,
        choice=Choice(choice.policy, choice.overlap_blocks, choice.effective_overlap_blocks, choice.cost)
        if message.HasField("choice")
        else None,
        max_output_tokens=message.max_output_tokens,
        output_class=message.output_class,
        lineage=message.lineage,
        estimates_prefill=message.estimate_prefill_complete,
        session=message.session,
    )
    return Claim(
        reservation,
        term=message.term,
        state=ClaimState(message.state),
        output_blocks=message.output_blocks,
        owner=owner_from_proto(message),
        lease_seconds=lease,
        owner_since=message.owner_since,
    )
