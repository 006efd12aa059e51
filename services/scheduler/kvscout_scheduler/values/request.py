"""Selection request: plain values, checked once where they come in."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from kvscout_common.errors import InvalidArgument
from kvscout_common.worker import DEFAULT_TENANT, Role
from kvscout_scheduler.values.overlaps import NO_OVERLAPS, AnyOverlaps
from kvscout_scheduler.values.reservation import HASH_BYTES, PoolId, RequestKey, check_output_class, lineage_of
from kvscout_scheduler.values.targets import NO_TARGETS, Targets

MAX_NAME: Final = 256
"""Characters of a caller or a fairness id."""


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Return local hashes as little-endian u64s, eight bytes a block: their form in every request.

    Raises:
        InvalidArgument: If a hash does not fit in 64 bits.
    """
    try:
        packed = array("Q", hashes)
    except OverflowError as error:
        raise InvalidArgument("a hash is not in 0 .. 2^64-1", field="block_hashes") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@dataclass(frozen=True, slots=True)
class ConfigOverride:
    """Settings changed for one request; None keeps the scheduler's."""

    overlap_score_weight: float | None = None
    router_temperature: float | None = None
    policy: str | None = None
    seed: int | None = None

    def validate(self) -> None:
        """Check the ranges.

        Raises:
            InvalidArgument: Naming the field.
        """
        for name in ("overlap_score_weight", "router_temperature"):
            value: float | None = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InvalidArgument(f"must be a finite number of at least 0, not {value}", field=name)


NO_OVERRIDE = ConfigOverride()


# What each request makes is not frozen, which would make it three times as dear; it is not changed all the same.
@dataclass(slots=True, unsafe_hash=True)
class Prompt:
    """One prompt hashed for the workers of one block size, and where it is cached."""

    block_hashes: bytes = b""
    """Packed local hashes of the leading complete blocks; fewer than the prompt has (or none) is allowed, the rest
    of the prompt is then shared with no other request."""
    block_size: int = 0
    """Tokens a block; 0 = that of the pool's workers."""
    eagle: bool | None = None
    """Hashed over EAGLE windows; None = as the pool's workers want it."""
    overlaps: AnyOverlaps = NO_OVERLAPS
    _lineage: int = field(default=-1, init=False, repr=False, compare=False)

    def lineage(self, block_size: int) -> int:
        """Return the lineage of the prompt, which is computed once.

        Args:
            block_size: Tokens a block of the workers it is for.
        """
        if self._lineage < 0:
            self._lineage = lineage_of(self.block_hashes, block_size)
        return self._lineage

    @property
    def blocks(self) -> int:
        """Return hashed blocks."""
        return len(self.block_hashes) // HASH_BYTES

    def validate(self, isl_tokens: int, block_size: int) -> None:
        """Check hashes and overlaps against the prompt's length.

        Args:
            isl_tokens: Prompt length in tokens.
            block_size: Tokens a block of the workers it is for.

        Raises:
            InvalidArgument: Naming the field.
        """
        complete = isl_tokens // block_size
        if len(self.block_hashes) % HASH_BYTES:
            raise InvalidArgument("packed hashes must be whole u64s", field="block_hashes")
        if self.blocks > complete:
            raise InvalidArgument(
                f"{self.blocks} hashes, but {isl_tokens} tokens are {complete} complete blocks of {block_size}",
                field="block_hashes",
            )
        if self.overlaps is not NO_OVERLAPS:
            self.overlaps.validate(complete)


EMPTY_PROMPT = Prompt()


class WorkerConstraints(NamedTuple):
    """Constraints of a request on the workers of its pool; requests of equal ones can go to the same workers."""

    pinned_worker_id: str = ""
    """"" = free choice."""
    pinned_dp_rank: int | None = None
    allowed_worker_ids: frozenset[str] = frozenset()
    """Empty = all."""
    excluded_worker_ids: frozenset[str] = frozenset()
    required_labels: frozenset[tuple[str, str]] = frozenset()
    lora_name: str = ""

    def validate(self) -> None:
        """Check that it does not contradict itself.

        Raises:
            InvalidArgument: Naming the field.
        """
        pin = self.pinned_worker_id
        if self.pinned_dp_rank is not None and not pin:
            raise InvalidArgument("needs pinned_worker_id", field="pinned_dp_rank")
        if pin and self.allowed_worker_ids and pin not in self.allowed_worker_ids:
            raise InvalidArgument(f"{pin!r} is not one of allowed_worker_ids", field="pinned_worker_id")
        if pin and pin in self.excluded_worker_ids:
            raise InvalidArgument(f"{pin!r} is excluded as well", field="pinned_worker_id")


UNCONSTRAINED = WorkerConstraints()


@dataclass(slots=True)
class SelectionRequest:
    """A request that wants a worker."""

    model: str
    isl_tokens: int
    """Prompt length in tokens."""
    prompt: Prompt = EMPTY_PROMPT
    other_prompts: tuple[Prompt, ...] = ()
    """The same prompt for workers of other block sizes."""
    tenant: str = DEFAULT_TENANT
    role: Role = Role.AGGREGATED
    request_id: str = ""
    """Names the booking; a query needs none."""
    attempt_id: int = 0
    """0 = the caller does not distinguish attempts."""
    constraints: WorkerConstraints = UNCONSTRAINED
    override: ConfigOverride = NO_OVERRIDE
    priority: int = 0
    """Higher ones go first; below 0, a request may be shed where a target is missed."""
    caller: str = ""
    """Name of the token by which it came, or the tenant: has a fair share of its own; "" = the tenant."""
    fairness_id: str = ""
    """Has a share of the caller's."""
    deadline_seconds: float = inf
    """Seconds from now until nobody wants its output any more."""
    targets: Targets = NO_TARGETS
    """Its own; the others are the scheduler's."""
    waited_seconds: float = 0.0
    """Time for which it waited in the queue."""
    expected_output_tokens: int = 0
    """As its caller expects; 0 = unknown."""
    max_output_tokens: int = 0
    """At which its output ends, whatever it is; 0 = no such bound is known."""
    output_class: str = ""
    """Requests of one class are expected to have outputs of similar lengths; "" = nothing is known."""
    estimates_prefill: bool = False
    """Its caller cannot report that the prefill is complete: its engine answers as a whole."""
    charge_prefill: bool = True
    """False: another worker computes the prompt (decode attempts), no prefill tokens are charged."""
    explain: bool = False
    session: int = 0
    """Conversation that it belongs to, as its caller says; 0 = unknown."""
    by_lineage: bool = True
    """Else the session is not looked for where its caller says none."""
    overlaps_unknown: bool = False
    """Nobody could be asked where the prompt is cached."""
    parent_session: int = 0
    """Session of the agent whose subagent its session is; 0 = none."""

    @property
    def pool(self) -> PoolId:
        """Return the pool it selects from."""
        return PoolId(self.tenant, self.model, self.role)

    @property
    def key(self) -> RequestKey:
        """Return the name of its booking."""
        return RequestKey(self.tenant, self.model, self.role, self.request_id)

    def validate(self) -> None:
        """Check what needs no knowledge of the workers.

        Raises:
            InvalidArgument: Naming the field.
        """
        if not self.model:
            raise InvalidArgument("must not be empty", field="model")
        if self.isl_tokens < 1:
            raise InvalidArgument("must be at least 1", field="isl_tokens")
        check_output_class(self.output_class)
        if len(self.caller) > MAX_NAME or len(self.fairness_id) > MAX_NAME:
            longer = "caller" if len(self.caller) > MAX_NAME else "fairness_id"
            raise InvalidArgument(f"must have at most {MAX_NAME} characters", field=longer)
        if self.targets is not NO_TARGETS:
            self.targets.validate()
        if self.constraints is not UNCONSTRAINED:
            self.constraints.validate()
        if self.override is not NO_OVERRIDE:
            self.override.validate()
