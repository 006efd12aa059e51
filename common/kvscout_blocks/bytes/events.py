"""KV cache events as plain values.

::

    EventBatch ── events: Stored | Removed | Cleared, in the order in which they happened
               └─ faults: what could not be read, one entry an event

`wire` makes them from an engine's bytes, `index` applies them. Engine hashes are opaque u64 identifiers
that only link events to blocks; the content of a block is its tokens, or the local hashes of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple, Protocol

FAULT_LIMIT: Final = 1024
"""Events of one batch that may be unreadable; with more of them it is no batch."""


STATE_WINDOW: Final = 1
"""Window of a group of states, in tokens: it needs the state at the end of a prefix, and no other."""


class Tier(IntEnum):
    """Storage tier of a block, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    EXTERNAL = 3


MEDIA: Final[Mapping[str, Tier]] = {
    **dict.fromkeys(("GPU", "DEVICE"), Tier.DEVICE),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), Tier.HOST),
    **dict.fromkeys(("CPU_TIER2", "STORAGE", "DISK", "NVME", "FS"), Tier.DISK),
    **dict.fromkeys(("EXTERNAL", "OBJ", "REMOTE", "NETWORK", "SHARED", "SHARED_STORAGE"), Tier.EXTERNAL),
}
"""Names of tiers in engines' events, in upper case."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks were stored on one tier, each the child of the one before it, one physical copy of each.

    Their content is `tokens`, or `local_hashes` where a bridge has hashed them already. Neither: the
    blocks are known by their engine hashes and are now on this tier too.
    """

    engine_hashes: tuple[int, ...]
    """u64, one a block."""
    parent: int | None = None
    """Engine hash of the block before the first one; None: the first one begins a prompt."""
    tokens: tuple[int, ...] = ()
    """u32 token ids as sent; their number may differ from blocks x block size."""
    block_size: int = 0
    """Tokens a block, as the engine says."""
    tier: Tier = Tier.DEVICE
    group: int = 0
    """KV cache group; 0 where the engine does not say."""
    full_attention: bool = True
    """True if a prefix hit needs all of the group's blocks; see `wire.is_full_attention`."""
    window: int = 0
    """Tokens that a token sees, in a group with a sliding window; 0: it has none. `STATE_WINDOW`: a group of states."""
    lora_id: int = 0
    """The engine's number of the LoRA adapter; 0: none."""
    lora_name: str = ""
    cache_salt: str = ""
    """Salt of the prompt; it enters block 0 only."""
    mm_items: tuple[tuple[str, ...], ...] = ()
    """Ids of the multimodal items in each block; empty: no block has any."""
    pairs: bool = False
    """`tokens` came as EAGLE token pairs: one token more than the blocks' own."""
    lookahead: int | None = None
    """The token after the last block, which ends that block's EAGLE window."""
    local_hashes: tuple[int, ...] = ()
    """Local hashes, one a block; then `tokens` is empty."""
    foreign: bool = False
    """A publisher found full blocks of `block_size` tokens, which is not the registered size; it sent no content."""


@dataclass(frozen=True, slots=True)
class Removed:
    """One physical copy of each named block is gone from one tier."""

    engine_hashes: tuple[int, ...]
    tier: Tier = Tier.DEVICE
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """The rank dropped its whole cache: all tiers, all groups."""


Event = Stored | Removed | Cleared


class FaultKind(StrEnum):
    """Kind of an event that was not read."""

    UNKNOWN_TAG = "unknown_tag"
    BAD_EVENT = "bad_event"


class Fault(NamedTuple):
    """One event that could not be read; the rest of its batch was."""

    kind: FaultKind
    reason: str


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one message of an engine."""

    events: tuple[Event, ...]
    timestamp: float = 0.0
    """Seconds since the Unix epoch, by the engine's clock; 0: not known."""
    dp_rank: int | None = None
    """Data-parallel rank that the engine says it is; None: not known."""
    faults: tuple[Fault, ...] = ()

    @property
    def cleared(self) -> bool:
        """Return whether it contains a Cleared, which makes all batches before it irrelevant."""
        return any(isinstance(event, Cleared) for event in self.events)


class DecodedBatch(Protocol):
    """A decoded message, as `EventBatch` or in a form that only a native index reads."""

    @property
    def dp_rank(self) -> int | None:
        """Return it as `EventBatch` does."""

    @property
    def cleared(self) -> bool:
        """Return it as `EventBatch` does."""

    @property
    def faults(self) -> Sequence[tuple[str, str]]:
        """(kind, reason) of each event that could not be read."""
