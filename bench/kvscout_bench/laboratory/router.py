"""Gateways and replicas of the scheduler in simulated time: its own code decides, books, queues and forgets.

Nothing here decides anything. A gateway asks the index what is known of a prompt, and its replica for a worker. A
replica is the core of a scheduler process, `kvscout_scheduler.scheduler`, and where there are several, also what keeps
them together, `kvscout_scheduler.replication`, whose messages are carried some time later. What a process adds to that
(sockets, streams, processes) takes the time of `Latencies` and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from kvscout_bench.laboratory.timing import PICOSECONDS
from kvscout_common.errors import KvscoutError
from kvscout_common.worker import Role, WorkerRank, WorkerSpec
from kvscout_scheduler.active_load import MakeLoad
from kvscout_scheduler.decision import Decision
from kvscout_scheduler.overlaps import NO_OVERLAPS, Overlaps
from kvscout_scheduler.policies import PolicyRegistry
from kvscout_scheduler.request import MAX_LEASE_SECONDS, Prompt, RequestKey, SelectionRequest
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.settings import SchedulerSettings

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
    overlaps: Mapping[int, int]
    """Leading blocks by worker number."""
    expected_output_tokens: int = 0
    priority: int = 0
    charge_prefill: bool = True


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
    ) -> None:
        def clock() -> float:
            return now() / PICOSECONDS

        def wall_clock() -> float:
            return EPOCH + number * 1e-6 + now() / PICOSECONDS

        self.core = Scheduler(
            replace(settings, lease_seconds=MAX_LEASE_SECONDS),
            clock=clock,
            rng=Random(seed * 1_000 + number),
            policies=policies,
            wall_clock=wall_clock,
            make_load=make_load,
        )
        self.replication = None
        if replicated:
            from kvscout_scheduler.replication import Replication

            self.replication = Replication(self.core, f"replica-{number}")
        for spec in specs:
            self.core.workers.worker_added(spec)
            if self.replication is not None:
                self.replication.ownership.worker_added(spec)
        self._names = [spec.worker_id for spec in specs]

    def place(self, ask: Ask, answer: Placed) -> None:
        """Has a worker picked and booked, now or when it is the request's turn."""
        names, rows = self._names, ask.overlaps
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
            charge_prefill=ask.charge_prefill,
        )
        try:
            self.core.reserve_or_wait(request, answer)
        except KvscoutError as error:
            answer(error)

    def first_token(self, request_id: str, role: Role) -> None:
        """A request's prompt is computed."""
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
