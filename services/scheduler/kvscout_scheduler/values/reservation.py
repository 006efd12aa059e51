"""A reservation: its names, the facts of it that do not change, how it ends; and observers of all that."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple, Protocol
from zlib import crc32

from kvscout_common.errors import InvalidArgument
from kvscout_common.worker import ALL_TENANTS, Role, WorkerRank

HASH_BYTES = 8
MICROSECONDS = 1_000_000
"""A second's; times between processes are microseconds since the Unix epoch."""
MAX_LEASE_SECONDS = 86_400
MAX_OUTPUT_CLASS = 64
"""Characters."""

LINEAGE_TOKENS: Final = 256
"""Tokens at the beginning of a prompt that determine its lineage: instructions differ there, questions do not yet."""


class PoolId(NamedTuple):
    """Workers that can take each other's requests: the unit of load and of selection."""

    tenant: str
    model: str
    role: Role


class RequestKey(NamedTuple):
    """Name of a booking; an attempt id beside it distinguishes repeated calls from new attempts."""

    tenant: str
    model: str
    role: Role
    request_id: str

    @property
    def pool(self) -> PoolId:
        """Return the pool it is booked in."""
        return PoolId(self.tenant, self.model, self.role)


class OwnerName(NamedTuple):
    """Name of an owner of bookings, in its tenant."""

    tenant: str
    """To which the owner's token is bound; "*" = to none."""
    owner_id: str

    def __str__(self) -> str:
        return self.owner_id if self.tenant == ALL_TENANTS else f"{self.owner_id} of tenant {self.tenant}"


def check_output_class(name: str) -> None:
    """Check the length of an output class.

    Raises:
        InvalidArgument: It is too long.
    """
    if len(name) > MAX_OUTPUT_CLASS:
        raise InvalidArgument(f"must not be longer than {MAX_OUTPUT_CLASS} characters", field="output_class")


class Phase(StrEnum):
    """Phase of an active request."""

    QUEUED = "queued"
    """No worker yet."""
    PREFILL = "prefill"
    """No token yet."""
    DECODE = "decode"


class FreeOutcome(StrEnum):
    """Outcome of a Free."""

    FREED = "freed"
    UNKNOWN = "unknown"
    """Nothing was active under this id and attempt."""
    ALREADY_FREED = "already_freed"
    DEQUEUED = "dequeued"
    """It waited, and waits no more."""


class EndReason(StrEnum):
    """Reason of an end without a Free."""

    LEASE = "lease"
    OWNER_GONE = "owner_gone"
    """The owner's stream was away for too long."""
    OWNER_FORGOT = "owner_forgot"
    """The owner came back and did not list it."""
    WORKER_REMOVED = "worker_removed"
    """Somebody took the worker out."""
    WORKER_GONE = "worker_gone"
    """The worker's registration ended, and it did not come back in time."""
    UNDELIVERED = "undelivered"
    """Nobody got the answer."""
    SUPERSEDED = "superseded"
    """Another replica of the scheduler ended it, or booked the request on another worker."""


class Choice(NamedTuple):
    """Figures of the decision, for the answer to a repeated call."""

    policy: str
    overlap_blocks: int
    """Leading blocks of the prompt on its device, confirmed or predicted."""
    effective_overlap_blocks: float
    """Slower tiers weighted; 0 where prefix caches are ignored."""
    cost: float
    """In blocks for `kv`, else in the policy's own unit."""


NOWHERE: Final = WorkerRank("", 0)
"""The worker of what has none: it waits, or is over."""


class Reservation(NamedTuple):
    """Facts of a booking that do not change, but for `running`."""

    key: RequestKey
    attempt_id: int
    rank: WorkerRank = NOWHERE
    isl_tokens: int = 0
    """Prompt length in tokens."""
    uncached_tokens: int = 0
    """Prompt tokens charged as prefill."""
    expected_output_tokens: int = 0
    """As its caller expects; 0 = unknown."""
    block_hashes: bytes = b""
    """Packed hashes of the blocks that it shares; of a booking that is there kept for other replicas only."""
    choice: Choice | None = None
    """None for a plain reservation."""
    max_output_tokens: int = 0
    """At which its output ends, whatever it is; 0 = no such bound is known."""
    output_class: str = ""
    """Requests of one class are expected to have outputs of similar lengths."""
    lineage: int = 0
    """Equal for prompts that begin alike (`LINEAGE_TOKENS`); 0 = unknown."""
    estimates_prefill: bool = False
    """Its caller cannot report that the prefill is complete."""
    running: bool = False
    """It ran before it was booked here, or what its caller said of it came late: how long it takes from then on says
    nothing of its worker. It may become so while it is booked, as each call of an observer shows."""
    prefilled: bool = False
    """Its first token was out when it was booked here."""
    session: int = 0
    """Conversation that it belongs to; 0 = unknown."""

    def validate(self) -> None:
        """Check what needs no knowledge of the workers, of one that is to be booked where it says.

        Raises:
            InvalidArgument: Naming the field.
        """
        for name, given in (("model", self.key.model), ("worker", self.rank.worker_id)):
            if not given:
                raise InvalidArgument("must not be empty", field=name)
        if self.isl_tokens < 1:
            raise InvalidArgument("must be at least 1", field="isl_tokens")
        check_output_class(self.output_class)
        if not 0 <= self.uncached_tokens <= self.isl_tokens:
            raise InvalidArgument(f"must be between 0 and isl_tokens ({self.isl_tokens})", field="cached_tokens")


def lineage_of(block_hashes: bytes, block_size: int) -> int:
    """Return the lineage of a prompt.

    Args:
        block_hashes: Packed local hashes of its leading complete blocks.
        block_size: Tokens a block.
    """
    first = block_hashes[: HASH_BYTES * max(1, LINEAGE_TOKENS // block_size)]
    return crc32(first) if first else 0


class End(NamedTuple):
    """End of a booking."""

    freed: bool
    """True: its caller freed it; else lease, owner, worker or another replica ended it."""
    output_tokens: int = 0
    """0 = unknown."""
    decode_seconds: float = 0.0
    """Since its first token; 0 = there was none, as far as was reported."""

    @property
    def itl_seconds(self) -> float | None:
        """Return the mean time between two of its tokens; None = unknown."""
        gaps = self.output_tokens - 1
        return self.decode_seconds / gaps if gaps > 0 and self.decode_seconds > 0 else None


class Observer(Protocol):
    """Observer of every booking of a pool, those of other replicas included, in order."""

    def booked(self, reservation: Reservation, now: float) -> None:
        """Note that a request is on a worker, whoever chose it."""

    def prefill_completed(self, reservation: Reservation, ttft_seconds: float, now: float) -> None:
        """Note that its first token is out, `ttft_seconds` after it was booked."""

    def ended(self, reservation: Reservation, end: End, now: float) -> None:
        """Note its end."""
