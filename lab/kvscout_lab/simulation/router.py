"""Gateways and replicas of the scheduler in simulated time: its own code decides, books, queues and forgets.

Nothing here decides anything. A gateway queries the index for a prompt's overlaps, and its replica for a worker. A
replica is the core of a scheduler process, `kvscout_scheduler.scheduler`, and where there are several, also what keeps
them together, `kvscout_scheduler.replicas.replication`, whose messages are carried some time later.
What a process adds to that (sockets, streams, processes) takes the time of `Latencies` and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random

from kvscout_common.errors import KvscoutError, NotFound
from kvscout_common.worker import Role, WorkerRank, WorkerSpec
from kvscout_lab.simulation.timing import PICOSECONDS
from kvscout_scheduler.load.active_load import MakeLoad
from kvscout_scheduler.policies import PolicyRegistry
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.overlaps import NO_OVERLAPS, Overlaps
from kvscout_scheduler.values.request import UNCONSTRAINED, Prompt, SelectionRequest, WorkerConstraints
from kvscout_scheduler.values.reservation import MAX_LEASE_SECONDS, OwnerName, RequestKey, Reservation
from kvscout_scheduler.values.settings import SchedulerSettings

MODEL = "model"
EPOCH = 1_700_000_000.0
"""Wall time at the start of a simulation."""

Placed = Callable[[Decision | KvscoutError], None]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A request that wants a worker."""

    request_id: str
    role: Role
    prompt_tokens: int
    hashes: bytes
    """Nodes of the complete blocks of its prompt, as packed u64s."""
    expected_output_tokens: int = 0
    priority: int = 0
    charge_prefill: bool = True
    max_output_tokens: int = 0
    output_class: str = ""
    estimates_prefill: bool = False
    """Nobody is going to see its first token."""
    lora_name: str = ""


@dataclass(slots=True)
class GatewayBooking:
    """Booking in a gateway, with which it is booked again where it is not known."""

    placement: PlacementRequest
    decision: Decision
    prefilled: bool
    """Its first token is out."""


class Replica:
    """One replica of the scheduler.

    Args:
        number: Which one.
        specs: The workers.
        settings: Settings of the scheduler.
        policies: That it knows.
        now: The simulation's clock.
        seed: Seed of its draws.
        replicated: There are other replicas.
        make_load: Makes the load of a pool; None = native where it is built.
        starts: Earlier starts.
    """

    def __init__(
        self,
        number: int,
        specs: Sequence[WorkerSpec],
        *,
        settings: SchedulerSettings,
        policies: PolicyRegistry,
        now: Callable[[], int],
        seed: int,
        replicated: bool,
        make_load: MakeLoad | None,
        starts: int = 0,
    ) -> None:
        def clock() -> float:
            return now() / PICOSECONDS

        def wall_clock() -> float:
            return EPOCH + number * 1e-6 + now() / PICOSECONDS

        self.core = Scheduler(
            replace(settings, lease_seconds=MAX_LEASE_SECONDS),
            clock=clock,
            rng=Random(seed * 1_000 + number + 1_000_003 * starts),
            policies=policies,
            wall_clock=wall_clock,
            make_load=make_load,
        )
        self.number = number
        self.replication = None
        if replicated:
            from kvscout_scheduler.replicas.replication import Replication

            self.replication = Replication(self.core, f"replica-{number}")
        for spec in specs:
            self.core.workers.worker_added(spec)
            if self.replication is not None:
                self.replication.ownership.worker_added(spec)
        if starts and self.replication is not None:
            self.replication.query()
        self._names = [spec.worker_id for spec in specs]

    def place(
        self,
        placement: PlacementRequest,
        rows: Mapping[int, int],
        answer: Placed,
        owner: OwnerName | None = None,
        tier_rows: Mapping[int, int] | None = None,
    ) -> None:
        """Has a worker picked and booked, now or when it is the request's turn.

        Args:
            placement: Request for a worker.
            rows: Leading blocks of its prompt by worker number.
            answer: Called with the worker or the error, once.
            owner: The gateway, if it may go away.
            tier_rows: The same of device and offload tier together; None = there is none.
        """
        names = self._names
        if tier_rows is not None:
            device = [rows.get(row, 0) for row in tier_rows]
            host = list(map(max, device, tier_rows.values()))
            overlaps = Overlaps([names[row] for row in tier_rows], (), device, host)
        else:
            overlaps = Overlaps([names[row] for row in rows], (), list(rows.values())) if rows else NO_OVERLAPS
        request = SelectionRequest(
            MODEL,
            placement.prompt_tokens,
            Prompt(placement.hashes, overlaps=overlaps),
            role=placement.role,
            request_id=placement.request_id,
            attempt_id=1,
            priority=placement.priority,
            expected_output_tokens=placement.expected_output_tokens,
            constraints=WorkerConstraints(lora_name=placement.lora_name) if placement.lora_name else UNCONSTRAINED,
            charge_prefill=placement.charge_prefill,
            max_output_tokens=placement.max_output_tokens,
            output_class=placement.output_class,
            estimates_prefill=placement.estimates_prefill,
        )
        try:
            self.core.reserve_or_wait(request, answer, owner=owner)
        except KvscoutError as error:
            answer(error)

    def book_again(self, booked: GatewayBooking, owner: OwnerName | None = None) -> None:
        """Book what runs already, as a gateway does that finds a scheduler that does not know it."""
        placement, decision = booked.placement, booked.decision
        key = _key(placement.request_id, placement.role)
        self.core.reserve(
            Reservation(
                key,
                1,
                decision.rank,
                placement.prompt_tokens,
                decision.uncached_tokens,
                placement.expected_output_tokens,
                placement.hashes,
                max_output_tokens=placement.max_output_tokens,
                output_class=placement.output_class,
                estimates_prefill=placement.estimates_prefill,
                running=True,
                prefilled=booked.prefilled,
            ),
            owner=owner,
        )
        if booked.prefilled:
            self.core.mark_prefill_complete(key, 1)

    def first_token(self, request_id: str, role: Role) -> None:
        """A request's prompt is computed."""
        with suppress(NotFound):
            self.core.mark_prefill_complete(_key(request_id, role), 1)

    def ended(self, request_id: str, role: Role, output_tokens: int) -> None:
        """A request has its last token."""
        self.core.free(_key(request_id, role), 1, output_tokens=output_tokens)

    def check_idle(self) -> None:
        """Raise AssertionError unless nothing is booked, and nothing counts as load."""
        assert not len(self.core.bookings), f"{len(self.core.bookings)} bookings are left"
        for pool in self.core.workers:
            for slot in pool.order:
                assert pool.load.at(slot) == (0, 0, 0), f"load is left on {pool.ranks[slot]}"


def number_of(rank: WorkerRank) -> int:
    """Return the number in a worker's name."""
    return int(rank.worker_id[1:])


def name_of(number: int) -> str:
    """Return a worker's name; names are in the order of their numbers."""
    return f"w{number:04d}"


def _key(request_id: str, role: Role) -> RequestKey:
    return RequestKey("default", MODEL, role, request_id)
