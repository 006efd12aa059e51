"""Random lifecycles of requests: whatever happens to them, in the end every total is exactly 0.

Both backends of active load go through them side by side. `KVSCOUT_LIFECYCLES` sets how many (default 60,000),
`KVSCOUT_TEST_SEED` repeats a run.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from support.load_backends import SideBySide
from support.scheduler_builders import BLOCK, MODEL, ManualClock, key, owner, reservation, scheduler, worker
from support.scheduler_invariants import check_scheduler
from support.seeds import test_seed

from kvscout_common.errors import AlreadyExists, Cancelled, NotFound, Unavailable
from kvscout_common.worker import WorkerSpec
from kvscout_scheduler.policies import PolicyRegistry
from kvscout_scheduler.policies.builtin import Kv
from kvscout_scheduler.rpc.listing import list_active_requests
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.overlaps import Overlaps
from kvscout_scheduler.values.request import Prompt, SelectionRequest, pack_hashes
from kvscout_scheduler.values.reservation import End, OwnerName, RequestKey, Reservation

PARTS = 4
"""Independent runs, which can go on side by side."""
LIFECYCLES = int(os.environ.get("KVSCOUT_LIFECYCLES", "60000")) // PARTS
"""A part."""
CHECK_EVERY = 400
OWNERS = (owner("gateway-0"), owner("gateway-1"), None)


class Listening(Kv):
    """Is told of each booking once, and of its end once."""

    def __init__(self) -> None:
        self.prefill: dict[RequestKey, float] = {}
        self.decode: dict[RequestKey, float] = {}

    def booked(self, reservation: Reservation, now: float) -> None:
        assert reservation.key not in self.prefill
        assert reservation.key not in self.decode
        self.prefill[reservation.key] = now

    def prefill_completed(self, reservation: Reservation, ttft_seconds: float, now: float) -> None:
        assert now - self.prefill.pop(reservation.key) == ttft_seconds
        self.decode[reservation.key] = now

    def ended(self, reservation: Reservation, end: End, now: float) -> None:
        if self.prefill.pop(reservation.key, None) is None:
            decode_seconds = now - self.decode.pop(reservation.key)
            assert end.decode_seconds == (0.0 if reservation.running else decode_seconds)


class Traffic:
    """Clients, gateways and workers that do whatever they may do, in random order."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.clock = ManualClock()
        self.policy = Listening()
        self.specs: dict[str, WorkerSpec] = {
            f"w{n}": worker(f"w{n}", dp_size=1 + n % 2, total_kv_blocks=1000) for n in range(5)
        }
        self.scheduler: Scheduler = scheduler(
            *self.specs.values(),
            clock=self.clock,
            seed=seed,
            policies=PolicyRegistry({"kv": lambda: self.policy}),
            make_load=SideBySide,
            track_output_blocks=True,
            lease_seconds=10.0,
        )
        self.absent: dict[str, WorkerSpec] = {}
        self.open: list[tuple[str, int]] = []
        self.sessions = {owner: self.scheduler.connect_owner(owner, [])[0] for owner in OWNERS if owner}

    def prompt(self) -> tuple[bytes, int]:
        """Hashes that often share a prefix with others, and a length that often has a partial block."""
        hashes = pack_hashes(self.rng.choices((1, 2), (3, 1), k=self.rng.randrange(12)))
        return hashes, max(1, len(hashes) // 8 * BLOCK + self.rng.randrange(BLOCK))

    def begin(self, number: int) -> None:
        """One more lifecycle: booked by choice or by name, sometimes freed before, twice, or never."""
        rng, name, attempt = self.rng, f"r{number}", rng_attempt(self.rng)
        hashes, isl = self.prompt()
        if rng.random() < 0.03:
            self.scheduler.free(key(name), attempt)
        owner = rng.choice(OWNERS)
        try:
            if rng.random() < 0.8:
                ids = list(self.specs)
                columns = [rng.randrange(len(hashes) // 8 + 1) for _ in ids]
                asked = SelectionRequest(
                    MODEL, isl, Prompt(hashes, overlaps=Overlaps(ids, (), columns)), request_id=name, attempt_id=attempt
                )
                self.scheduler.select_and_reserve(asked, owner=owner)
            else:
                worker_id = rng.choice([*self.specs, *self.absent])
                self.scheduler.reserve(reservation(name, worker_id, isl, hashes, attempt), owner=owner)
        except (Cancelled, NotFound, Unavailable):
            return
        self.open.append((name, attempt))

    def disturb(self) -> None:
        """One thing that happens to a request, an owner or a worker."""
        rng, event = self.rng, self.rng.random()
        if event < 0.9:
            if self.open:
                self.touch(*rng.choice(self.open))
        elif event < 0.96:
            self.clock.advance(rng.random() * 4)
            self.scheduler.expire()
        elif event < 0.97:
            self.reconnect(rng.choice([owner for owner in OWNERS if owner]))
        elif event < 0.99:
            if self.absent:
                name, spec = self.absent.popitem()
                self.specs[name] = spec
                self.scheduler.workers.worker_added(spec)
        elif self.specs:
            name = rng.choice(list(self.specs))
            self.absent[name] = self.specs.pop(name)
            self.scheduler.workers.worker_removed(self.absent[name], "removed")

    def touch(self, name: str, attempt: int) -> None:
        rng, event = self.rng, self.rng.random()
        try:
            if event < 0.6:
                self.scheduler.free(key(name), attempt)
                if rng.random() < 0.9:
                    self.open.remove((name, attempt))
            elif event < 0.8:
                self.scheduler.mark_prefill_complete(key(name), attempt)
            elif event < 0.9:
                self.scheduler.add_output(key(name), rng.randrange(1, 4), attempt)
            elif event < 0.94:
                self.scheduler.undelivered(key(name), attempt)
            elif event < 0.97:
                self.scheduler.free(key(name), attempt + 1)
            else:
                hashes, isl = self.prompt()
                again = SelectionRequest(MODEL, isl, Prompt(hashes), request_id=name, attempt_id=attempt)
                self.scheduler.select_and_reserve(again)
        except (AlreadyExists, Cancelled, NotFound, Unavailable):
            pass

    def reconnect(self, owner: OwnerName) -> None:
        """A stream breaks, and comes back at once, late, or with part of what it had."""
        self.scheduler.disconnect_owner(owner, self.sessions[owner])
        self.clock.advance(self.rng.choice((0.0, 1.0, 5.0, 11.0)))
        self.scheduler.expire()
        listed = [(key(name), attempt) for name, attempt in self.open if self.rng.random() < 0.9]
        takeover = self.scheduler.begin_takeover(owner, listed)
        self.sessions[owner] = takeover.session
        while not takeover.advance(self.clock(), self.rng.randint(1, 100)):
            if self.open and self.rng.random() < 0.5:
                self.touch(*self.rng.choice(self.open))
            else:
                self.clock.advance(self.rng.random())
                self.scheduler.expire()

    def end(self) -> None:
        """Everyone leaves: half of the requests are freed, the rest ends by itself."""
        for name, attempt in self.open[::2]:
            self.scheduler.free(key(name), attempt)
        for each, session in self.sessions.items():
            self.scheduler.disconnect_owner(each, session)
        self.clock.advance(100.0)
        self.scheduler.expire()
        for spec in self.absent.values():
            self.scheduler.workers.worker_added(spec)


def rng_attempt(rng: Random) -> int:
    """Half of the callers tell attempts apart."""
    return rng.choice((0, rng.randrange(1, 2**63)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_s5_random_lifecycles_end_in_exact_zeros(part: int) -> None:
    traffic = Traffic(test_seed() + part)
    made = traffic.scheduler
    for number in range(LIFECYCLES):
        traffic.begin(number)
        while len(traffic.open) > 100 or traffic.rng.random() < 0.5:
            traffic.disturb()
        if number % CHECK_EVERY == 0:
            check_scheduler(made)
            assert len(traffic.policy.prefill) + len(traffic.policy.decode) == len(made.bookings)
    check_scheduler(made)
    traffic.end()
    check_scheduler(made)
    assert len(made.bookings) == 0
    assert list_active_requests(made, "default") == ([], 0, None)
    for pool in made.workers:
        size = len(pool.load.requests)
        assert pool.load.requests == pool.load.prefill_tokens == pool.load.decode_blocks == [0] * size
    stats = made.stats
    assert stats.bookings == stats.freed + sum(stats.ended.values())
    assert stats.bookings > LIFECYCLES * 0.8
    assert not traffic.policy.prefill
    assert not traffic.policy.decode
