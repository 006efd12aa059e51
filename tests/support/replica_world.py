"""Replicas of the scheduler in simulated time, on a network that loses, repeats and reorders; no sockets.

What a run did is known from outside: `World.truth` has every request that was booked and not freed, with what it must
weigh, and is compared with every replica.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random
from typing import Any

from kvscout_common.worker import WorkerSpec
from kvscout_scheduler.bookings.booking import Booking
from kvscout_scheduler.replicas.claim import shared
from kvscout_scheduler.replicas.replication import TICK_SECONDS, OutgoingMessage, Replication
from kvscout_scheduler.rpc.listing import potential_loads
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.request import pack_hashes
from kvscout_scheduler.values.reservation import FreeOutcome, OwnerName, Phase
from kvscout_scheduler.values.settings import SchedulerSettings
from support.scheduler_builders import BLOCK, MODEL, ManualClock, key, reservation, worker
from support.scheduler_invariants import check_ownership, check_scheduler

SETTINGS = SchedulerSettings(track_output_blocks=True)


class Node:
    """One replica."""

    def __init__(
        self,
        name: str,
        clock: ManualClock,
        workers: list[str],
        settings: SchedulerSettings,
        wall_clock: Callable[[], float],
        *,
        spec: Callable[[str], WorkerSpec] = worker,
    ) -> None:
        self.name = name
        self._spec = spec
        self.core = Scheduler(settings, clock=clock, rng=Random(1), wall_clock=wall_clock)
        self.replication = Replication(self.core, name)
        self.away = False
        """Stopped (SIGSTOP): its messages wait for it."""
        self.on_wake: list[Callable[[], None]] = []
        """What it learns as soon as it is not."""
        self.cut_off = False
        """Its connection is down: messages to and from it are lost."""
        for worker_id in workers:
            self.add_worker(worker_id)

    def add_worker(self, worker_id: str) -> None:
        spec = self._spec(worker_id)
        self.core.workers.worker_added(spec)
        self.replication.ownership.worker_added(spec)

    def remove_worker(self, worker_id: str) -> None:
        spec = self._spec(worker_id)
        self.core.workers.worker_removed(spec, "removed")
        self.replication.ownership.worker_removed(spec, "removed")

    def state(self) -> dict[str, tuple[Any, ...]]:
        """Everything that replicas must agree on, request by request."""
        return {
            b.key.request_id: (shared(b.reservation), b.phase, b.output_blocks, b.owner, b.lease_seconds)
            for b in self.core.bookings
        }

    def loads(self) -> dict[str, tuple[int, int, int]]:
        return {
            load.rank.worker_id: (load.active_requests, load.active_prefill_tokens, load.active_decode_blocks)
            for load in potential_loads(self.core, key("any").pool)
        }

    def registers(self) -> tuple[Any, ...]:
        registers = self.replication.ownership.registers
        thresholds = {
            name: (event.version, event.replica_id, self.core.thresholds.get(*name))
            for name, event in registers.thresholds.items()
        }
        return thresholds, dict(registers.cool_downs)

    def check(self) -> None:
        check_scheduler(self.core)
        self.replication.ownership.settle()
        check_ownership(self.replication.ownership)


class World:
    """Some replicas and the network between them.

    Args:
        names: Of the replicas.
        seed: Of the faults.
    """

    def __init__(self, *names: str, seed: int = 0, settings: SchedulerSettings = SETTINGS, workers: int = 3) -> None:
        self.rng = Random(seed)
        self.clock = ManualClock()
        self.workers = [f"w{number}" for number in range(workers)]
        self.settings = settings
        self.loss = self.repeats = 0.0
        self.delay_seconds = 0.0005
        self.nodes: dict[str, Node] = {}
        self._ticked_at = self.clock.now
        self._numbers = itertools.count()
        self._flying: list[tuple[float, int, str, str, bytes]] = []
        for name in names:
            self.start(name)

    def start(self, name: str, *, clock_behind_seconds: float = 0.0) -> Node:
        """Starts a replica, as a new incarnation if it was there before."""

        def wall_clock() -> float:
            return self.clock.now - clock_behind_seconds

        node = self.nodes[name] = Node(name, self.clock, self.workers, self.settings, wall_clock, spec=self.spec)
        return node

    def spec(self, worker_id: str) -> WorkerSpec:
        """What a worker is."""
        return worker(worker_id)

    def kill(self, name: str) -> None:
        """A replica is gone, with what it had not sent."""
        del self.nodes[name]

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def run(self, seconds: float) -> None:
        """Lets time pass, a millisecond at a time, or a tick at a time where it is long."""
        end = self.clock.now + seconds
        while self.clock.now < end - 1e-9:
            self.step(0.001 if seconds <= 1 else TICK_SECONDS)

    def step(self, seconds: float) -> None:
        """What was sent arrives, what is due is done."""
        self.clock.advance(seconds)
        held = []
        while self._flying and self._flying[0][0] <= self.clock.now:
            flight = heapq.heappop(self._flying)
            node = self.nodes.get(flight[3])
            if node is None or node.cut_off:
                continue
            if node.away:
                held.append(flight)
            else:
                node.replication.receive(flight[4])
        for flight in held:
            heapq.heappush(self._flying, flight)
        tick = self.clock.now - self._ticked_at >= TICK_SECONDS - 1e-9
        if tick:
            self._ticked_at = self.clock.now
        for node in list(self.nodes.values()):
            if not node.away:
                while node.on_wake:
                    node.on_wake.pop(0)()
                if tick:
                    node.replication.tick()
                    node.core.expire()
                self._send(node)

    def outgoing(self, node: Node) -> list[OutgoingMessage]:
        """What a replica sends now."""
        return node.replication.take()

    def _send(self, node: Node) -> None:
        for to, payload in self.outgoing(node):
            for other in self.nodes.values():
                if other is node or to not in ("", other.name) or node.cut_off or other.cut_off:
                    continue
                copies = 1 + (self.rng.random() < self.repeats)
                for _ in range(copies):
                    if self.rng.random() >= self.loss:
                        arrival = self.clock.now + self.rng.uniform(0, self.delay_seconds)
                        heapq.heappush(self._flying, (arrival, next(self._numbers), node.name, other.name, payload))

    def faults(self, *, loss: float = 0.0, repeats: float = 0.0, delay_seconds: float = 0.0005) -> None:
        """What the network does to messages from now on; a delay above that of a message reorders."""
        self.loss, self.repeats, self.delay_seconds = loss, repeats, delay_seconds

    def wake(self) -> list[str]:
        """Continues whoever is stopped; returns everyone."""
        for node in self.nodes.values():
            node.away = False
        return list(self.nodes)

    def settled(self) -> None:
        """One quiet second without faults, after which all must agree exactly."""
        self.faults()
        for node in self.nodes.values():
            node.away = False
            if node.cut_off:
                # What the link of a real process does.
                node.cut_off = False
                node.replication.query()
        self.run(1.0)
        self.agree()

    def agree(self) -> None:
        """Fails unless all replicas have exactly the same."""
        nodes = list(self.nodes.values())
        running = {node.replication.me for node in nodes}
        for node in nodes:
            node.check()
            # Of one that is gone nobody may have the last events: those are lost, and waited for until it is given up.
            for status in [each for each in node.replication.status() if (each.replica_id, each.epoch) in running]:
                assert not status.diverged, f"{node.name} on {status.replica_id}"
                assert status.lag_events == 0, f"{node.name} on {status.replica_id}"
        first = nodes[0]
        for node in nodes[1:]:
            assert node.state() == first.state(), f"{node.name} and {first.name} differ"
            assert node.loads() == first.loads()
            assert node.registers() == first.registers()

    # Calls, as a servicer makes them.

    def book(
        self, at: str, request_id: str, *, worker_id: str = "w0", blocks: int = 2, attempt: int = 1,
        owner: OwnerName | None = None, shared: int = 0, lease_seconds: float = 0.0,
    ) -> Booking:  # fmt: skip
        """Books a request; the first `shared` blocks are those of all others."""
        hashes = [*range(shared), *(hash((request_id, number)) % 2**64 for number in range(blocks - shared))]
        self[at].core.reserve(
            reservation(request_id, worker_id, blocks * BLOCK + 3, pack_hashes(hashes), attempt),
            owner=owner,
            lease_seconds=lease_seconds,
        )
        found = self[at].core.bookings.find(key(request_id))
        assert found is not None
        return found

    def free(self, at: str, request_id: str, attempt: int = 1) -> FreeOutcome:
        return self[at].core.free(key(request_id), attempt)


def decoding(world: World, at: str, request_id: str) -> bool:
    """Whether a replica has a request in its decode phase."""
    booking = world[at].core.bookings.find(key(request_id))
    return booking is not None and booking.phase is Phase.DECODE


__all__ = ["MODEL", "Node", "World", "decoding"]
