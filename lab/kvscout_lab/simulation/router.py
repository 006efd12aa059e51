"""Gateways and replicas of the scheduler in simulated time: its own code decides, books, queues and forgets.

Nothing here decides anything. A gateway asks the index what is known of a prompt, and its replica for a worker. A
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
class Ask:
    """A request that wants a worker."""

    request_id: str
    role: Role
    prompt_tokens: int
    hashes: bytes
    """Of the complete blocks of its prompt, packed."""
    expected_output_tokens: int = 0
    priority: int = 0
    charge_prefill: bool = True
    max_output_tokens: int = 0
    output_class: str = ""
    estimates_prefill: bool = False
    """Nobody is going to see its first token."""
    lora_name: str = ""


@dataclass(slots=True)
class Booked:
    """What a gateway keeps of a booking, to book it again where it is not known."""

    ask: Ask
    decision: Decision
    prefilled: bool
    """Its first token is out."""


class Replica:
    """One replica of the scheduler.

    Args:
        number: Which one.
        specs: The workers.
        settings: Of the scheduler.
        policies: That it knows.
        now: The simulation's clock.
        seed: Of its draws.
        replicated: Whether there are others.
        make_load: Which twin keeps the load; None = the native one where it is built.
        starts: How often it has been started before.
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

    def place(self, ask: Ask, rows: Mapping[int, int], answer: Placed, owner: OwnerName | None = None) -> None:
        """Has a worker picked and booked, now or when it is the request's turn.

        Args:
            ask: What wants one.
            rows: Leading blocks of its prompt by worker number.
            answer: Told of the worker or of the error, once.
            owner: The gateway, if it may go away.
        """
        names = self._names
        overlaps = Overlaps([names[row] for row in rows], (), list(rows.values())) if rows else NO_OVERLAPS
        request = SelectionRequest(
            MODEL,
            ask.prompt_tokens,
            Prompt(ask.hashes, overlaps=overlaps),
            role=ask.role,
            request_id=ask.request_id,
            attempt_id=1,
            priority=ask.priority,
            expected_output_tokens=ask.expected_output_tokens,
            constraints=WorkerConstraints(lora_name=ask.lora_name) if ask.lora_name else UNCONSTRAINED,
            charge_prefill=ask.charge_prefill,
            max_output_tokens=ask.max_output_tokens,
            output_class=ask.output_class,
            estimates_prefill=ask.estimates_prefill,
        )
        try:
            self.core.reserve_or_wait(request, answer, owner=owner)
        except KvscoutError as error:
            answer(error)

    def book_again(self, booked: Booked, owner: OwnerName | None = None) -> None:
        """Books what runs already, as a gateway does that finds a scheduler that does not know it."""
        ask, decision = booked.ask, booked.decision
        key = _key(ask.request_id, ask.role)
        self.core.reserve(
            Reservation(
                key,
                1,
                decision.rank,
                ask.prompt_tokens,
                decision.uncached_tokens,
                ask.expected_output_tokens,
                ask.hashes,
                max_output_tokens=ask.max_output_tokens,
                output_class=ask.output_class,
                estimates_prefill=ask.estimates_prefill,
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
        """Raises AssertionError unless nothing is booked, and nothing counts as load."""
        assert not len(self.core.bookings), f"{len(self.core.bookings)} bookings are left"
        self.core.check_invariants()
        for pool in self.core.workers:
            for slot in pool.order:
                assert pool.load.at(slot) == (0, 0, 0), f"load is left on {pool.ranks[slot]}"


def number_of(rank: WorkerRank) -> int:
    """The number in a worker's name."""
    return int(rank.worker_id[1:])


def name_of(number: int) -> str:
    """A worker's name; names are in the order of their numbers."""
    return f"w{number:04d}"


def _key(request_id: str, role: Role) -> RequestKey:
    return RequestKey("default", MODEL, role, request_id)
