"""`kv` and `kv-time` over both backends of the load, and as a policy that returns its costs: equal ones, bit for bit,
so equal decisions, bookings and state, whatever is asked."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support.scheduler_builders import BLOCK, MODEL, ManualClock, key, scheduler, worker
from support.scheduler_invariants import check_scheduler
from support.seeds import test_seed

from kvscout_common.errors import KvscoutError
from kvscout_common.hashing import native_available
from kvscout_common.worker import WorkerSpec
from kvscout_scheduler.load.active_load import Cheapest, ReferenceLoad
from kvscout_scheduler.policies import PolicyRegistry
from kvscout_scheduler.policies.builtin import Kv
from kvscout_scheduler.policies.kv_time import KvTime
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.overlaps import NO_OVERLAPS, AnyOverlaps, Overlaps
from kvscout_scheduler.values.request import ConfigOverride, Prompt, SelectionRequest, WorkerConstraints, pack_hashes

SPECS = [worker(f"w{number}", dp_size=1 + number % 3, total_kv_blocks=60 * number) for number in range(6)]
OTHER_BLOCKS = worker("w0", block_size=3 * BLOCK, total_kv_blocks=100)

pytestmark = pytest.mark.skipif(
    not native_available(), reason="the extension is not built: there is nothing to compare"
)


class AskedKv(Kv):
    """A class that says of no formula that it is its own: all that it does is asked of it."""


class AskedKvTime(KvTime):
    """The same."""


class Three:
    """Schedulers that are told the same."""

    def __init__(self, seed: int, policy: str) -> None:
        from kvscout_scheduler.load.native import NativeLoad

        self.calls = 0
        """Of the load's own search for the least cost."""

        class CountedLoad(NativeLoad):
            def cheapest(made, *question: Any) -> Cheapest:
                self.calls += 1
                return super().cheapest(*question)

        self.rng, self.clock = Random(seed), ManualClock()
        asked = PolicyRegistry({"kv": AskedKv, "kv-time": AskedKvTime})
        self.each: list[Scheduler] = [
            scheduler(clock=self.clock, seed=seed, make_load=make, policy=policy, policies=policies)
            for make, policies in ((ReferenceLoad, None), (CountedLoad, None), (NativeLoad, asked))
        ]
        self.here: dict[str, WorkerSpec] = {}
        self.booked: list[str] = []
        self.asked = self.decided = 0

    def come_or_go(self) -> None:
        """One worker comes, or goes and leaves its slots to the next, or comes with blocks of another size."""
        spec = self.rng.choice(SPECS)
        if spec.worker_id == OTHER_BLOCKS.worker_id and self.rng.random() < 0.3:
            spec = OTHER_BLOCKS
        old = self.here.pop(spec.worker_id, None)
        if old is None:
            self.here[spec.worker_id] = spec
        for made in self.each:
            if old is None:
                made.workers.worker_added(spec)
            else:
                made.workers.worker_removed(old, "removed")

    def request(self, name: str) -> SelectionRequest:
        """Anything that may be asked."""
        rng = self.rng
        blocks, tail = rng.randrange(60), rng.randrange(1, BLOCK)
        hashes = pack_hashes([rng.choice((1, 2)) for _ in range(blocks)])
        ids = [spec.worker_id for spec in SPECS]
        return SelectionRequest(
            MODEL,
            blocks * BLOCK + tail,
            Prompt(hashes, BLOCK, None, self.overlaps(blocks)),
            (Prompt(hashes[: blocks // 3 * 8], 3 * BLOCK),),
            request_id=name,
            constraints=WorkerConstraints(
                pinned_worker_id=rng.choice(ids) if rng.random() < 0.1 else "",
                excluded_worker_ids=frozenset(rng.sample(ids, 2)) if rng.random() < 0.1 else frozenset(),
            ),
            override=ConfigOverride(
                overlap_score_weight=rng.choice((None, None, 0.0, 0.3, 7.7)),
                router_temperature=rng.choice((None, None, 0.0, 0.1, 3.0)),
                seed=rng.choice((None, 5)),
            ),
            expected_output_tokens=rng.choice((0, 0, 1, 700)),
            charge_prefill=rng.random() < 0.8,
            explain=rng.random() < 0.3,
            session=rng.choice((0, 0, 1, 2, 3)),
            by_lineage=rng.random() < 0.5,
            overlaps_unknown=rng.random() < 0.2,
        )

    def overlaps(self, blocks: int) -> AnyOverlaps:
        rows = self.rng.randrange(8)
        if not rows or not blocks:
            return NO_OVERLAPS
        device = [self.rng.randrange(blocks + 1) for _ in range(rows)]
        host = [self.rng.randint(faster, blocks) for faster in device] if self.rng.random() < 0.5 else []
        ids = [f"w{self.rng.randrange(7)}" for _ in range(rows)]
        return Overlaps(ids, [self.rng.randrange(3) for _ in range(rows)], device, host)

    def ask(self) -> None:
        """Selects, and books or not."""
        self.asked += 1
        asked, books = self.request(f"r{self.asked}"), self.rng.random() < 0.7
        answers: list[Decision | str] = []
        for made in self.each:
            try:
                answers.append((made.select_and_reserve if books else made.select)(asked))
            except KvscoutError as error:
                answers.append(repr(error))
        assert answers[0] == answers[1] == answers[2]
        if isinstance(answers[0], Decision):
            self.decided += 1
            if books:
                self.booked.append(asked.request_id)

    def go_on(self) -> None:
        """Something becomes of a request."""
        if self.booked and self.rng.random() < 0.5:
            name = self.booked.pop(self.rng.randrange(len(self.booked)))
            tokens = self.rng.choice((0, 1, 2, 300))
            for made in self.each:
                made.free(key(name), output_tokens=tokens)
        elif self.booked:
            name = self.rng.choice(self.booked)
            for made in self.each:
                try:
                    made.mark_prefill_complete(key(name))
                except KvscoutError:
                    # Its worker is gone.
                    assert key(name) not in made.bookings


def state_of(made: Scheduler) -> tuple[Any, ...]:
    """What is booked, the load of every worker, and what was learned of them."""
    bookings = [(booking.reservation, booking.phase) for booking in made.bookings]
    loads = [(list(pool.load.requests), list(pool.load.prefill_tokens), pool.times.rates) for pool in made.workers]
    return bookings, loads


@pytest.mark.parametrize("policy", ["kv", "kv-time"])
def test_both_backends_and_a_policy_that_is_asked_decide_and_book_the_same(policy: str) -> None:
    three = Three(test_seed(), policy)
    acts = [three.ask, three.go_on, three.come_or_go]
    for _ in range(1_500):
        three.rng.choices(acts, (8, 8, 1))[0]()
        three.clock.advance(three.rng.choice((0.0, 0.0, 1e-9, 0.013, 0.2, 3.0, 1e5)))
        assert state_of(three.each[0]) == state_of(three.each[1]) == state_of(three.each[2])
    assert three.decided > 300
    assert 100 < three.calls < three.decided
    for made in three.each:
        check_scheduler(made)
