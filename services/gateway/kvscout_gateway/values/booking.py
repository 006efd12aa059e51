"""A booking, and everything that it takes to book it anew."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, replace

from kvscout.v1 import scheduler_pb2
from kvscout_common.registry.worker_proto import rank_to_proto, role_to_proto
from kvscout_common.worker import Role, WorkerRank
from kvscout_gateway.values.output import UNKNOWN, Output

UNBOOKED_ATTEMPT = 128
"""Added to the attempt id of what runs without having been booked: the attempt itself may have been freed, in case a
scheduler had booked it after all, and cannot be booked again."""
MAX_TRIES = 256
"""Attempt ids leave eight bits for the number of the try, the highest of which is `UNBOOKED_ATTEMPT`."""
UNPLACED = WorkerRank("", 0)


def draw_attempt() -> int:
    """Draw an attempt id, of `MAX_TRIES`s, that no other booking call has."""
    return (int.from_bytes(os.urandom(7), "little") >> 1 or 1) * MAX_TRIES


@dataclass(slots=True, eq=False)
class Booking:
    """A reservation that somebody owes a Free, and the scheduler that has it. Two are never equal."""

    tenant: str
    model: str
    role: Role
    request_id: str
    attempt_id: int
    scheduler: object | None = None
    """The scheduler that has it, as `upstreams` knows it; None = none has it (yet)."""
    worker: WorkerRank = UNPLACED
    """Worker rank that runs it; with the next fields, all that booking it anew takes."""
    block_hashes: bytes = b""
    """u64 as `array("Q")` packs them, eight bytes a block."""
    isl_tokens: int = 0
    cached_tokens: int = 0
    output: Output = UNKNOWN
    session_id: int = 0
    """Named or found by lineage; 0 = unknown."""
    prefilled: bool = False
    """Its first token is out."""
    output_tokens: int = 0
    """Tokens generated until it was freed; 0 = unknown."""

    @property
    def ref(self) -> scheduler_pb2.RequestRef:
        """Return its name in messages."""
        return scheduler_pb2.RequestRef(
            model=self.model,
            tenant=self.tenant,
            role=role_to_proto(self.role),
            request_id=self.request_id,
            attempt_id=self.attempt_id,
        )

    def again(self) -> Booking:
        """Return the same, prefilled and without a scheduler: it will be booked as what runs."""
        attempt_id = self.attempt_id | UNBOOKED_ATTEMPT
        return replace(self, attempt_id=attempt_id, scheduler=None, prefilled=True)

    def reserve_request(self) -> scheduler_pb2.ReserveRequest:
        """Return what books it anew, where it runs: the scheduler learns nothing from how long it takes from now on."""
        return scheduler_pb2.ReserveRequest(
            model=self.model,
            tenant=self.tenant,
            role=role_to_proto(self.role),
            request_id=self.request_id,
            attempt_id=self.attempt_id,
            worker=rank_to_proto(self.worker),
            block_hashes=array("Q", self.block_hashes),
            isl_tokens=self.isl_tokens,
            cached_tokens=self.cached_tokens,
            expected_output_tokens=self.output.expected_tokens,
            max_output_tokens=self.output.max_tokens,
            output_class=self.output.output_class,
            estimate_prefill_complete=self.output.unseen,
            running=True,
            prefill_complete=self.prefilled,
            session=self.session_id,
        )
