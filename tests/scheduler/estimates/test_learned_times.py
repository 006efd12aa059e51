"""What is learned of workers from what becomes of requests: prefills of whom nobody hears, paces, contexts, steps."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support.replica_world import World as Replicas
from support.scheduler_builders import MODEL, ManualClock, key, scheduler, worker
from support.scheduler_invariants import check_scheduler
from support.seeds import test_seed

from kvscout_common.errors import KvscoutError
from kvscout_common.worker import WorkerRank
from kvscout_scheduler.estimates.learned_times import UNREPORTED, LearnedTimes
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.request import Prompt, SelectionRequest, WorkerConstraints, pack_hashes
from kvscout_scheduler.values.reservation import Phase, RequestKey

BLOCK = 16


def phase_of(core: Scheduler, name: RequestKey) -> Phase:
    """Where a request is that is booked."""
    (booking,) = (each for each in core.bookings if each.key == name)
    return booking.phase


class Engines:
    """A scheduler, and engines that take prompts one after the other and decode them side by side."""

    def __init__(self, *workers: str, **settings: Any) -> None:
        self.clock = ManualClock()
        fields = {"max_num_batched_tokens": 8_192, "total_kv_blocks": 100_000}
        settings = {"policy": "kv-time", **settings}
        self.core: Scheduler = scheduler(*(worker(name, **fields) for name in workers), clock=self.clock, **settings)
        self._last = 0

    @property
    def times(self) -> LearnedTimes:
        """What is learned."""
        (pool,) = self.core.workers
        return pool.times

    def request(self, tokens: int = 1_024, on: str = "", **fields: Any) -> SelectionRequest:
        """A prompt like no other."""
        self._last += 1
        first = 10_000 * self._last
        return SelectionRequest(
            MODEL,
            tokens,
            Prompt(pack_hashes(range(first, first + tokens // BLOCK))),
            request_id=f"r{self._last}",
            attempt_id=1,
            constraints=WorkerConstraints(on),
            **fields,
        )

    def book(self, tokens: int = 1_024, on: str = "", **fields: Any) -> str:
        """The id of a request that is booked."""
        asked = self.request(tokens, on, **fields)
        self.core.select_and_reserve(asked)
        return asked.request_id

    def first_token(self, request_id: str) -> None:
        """Its prefill is reported as complete."""
        self.core.mark_prefill_complete(key(request_id), 1)

    def end(self, request_id: str, output_tokens: int = 10) -> None:
        """Its caller frees it."""
        self.core.free(key(request_id), 1, output_tokens=output_tokens)

    def phase(self, request_id: str) -> Phase:
        """Where it is."""
        return phase_of(self.core, key(request_id))

    def prefill_tokens(self, name: str) -> int:
        """Active ones of a worker."""
        (pool,) = self.core.workers
        return pool.load.at(pool.slot_of[name, 0]).prefill_tokens

    def cost(self, name: str, **fields: Any) -> float:
        """Of a usual prompt on a worker, in seconds."""
        explanation = self.core.select(self.request(explain=True, **fields)).explanation
        assert explanation is not None
        return next(row.cost for row in explanation.candidates if row.rank.worker_id == name)


@pytest.mark.parametrize("policy", ["kv-time", "kv", "lmetric"])
def test_a_prefill_of_whom_nobody_hears_is_over_when_it_should_be(policy: str) -> None:
    made = Engines("a", "b", policy=policy)
    whole = made.book(2_000, on="a", estimates_prefill=True)
    received = made.book(2_000, on="b")
    made.clock.advance(0.1)
    made.core.expire()
    assert (made.phase(whole), made.prefill_tokens("a")) == (Phase.PREFILL, 2_000)
    # 2,000 tokens: 0.11 s.
    made.clock.advance(0.02)
    made.core.expire()
    assert (made.phase(whole), made.prefill_tokens("a")) == (Phase.DECODE, 0)
    assert (made.phase(received), made.prefill_tokens("b")) == (Phase.PREFILL, 2_000), "of that one somebody will tell"
    made.end(whole)
    made.end(received)
    check_scheduler(made.core)


def test_those_behind_each_other_are_over_one_after_the_other() -> None:
    made = Engines("a")
    ids = [made.book(4_000, on="a", estimates_prefill=True) for _ in range(5)]
    over = []
    for _ in range(120):
        made.clock.advance(0.01)
        made.core.expire()
        over.append(sum(made.phase(each) is Phase.DECODE for each in ids))
    assert sorted(over) == over
    assert set(over) == {0, 1, 2, 3, 4, 5}
    # 20,000 tokens are 1 s, and some for their steps.
    assert 95 < over.index(5) < 120


def test_a_first_token_that_is_heard_tells_of_those_before_it() -> None:
    made = Engines("a")
    whole = made.book(8_000, on="a", estimates_prefill=True)
    received = made.book(1_000, on="a")
    behind = made.book(1_000, on="a", estimates_prefill=True)
    # Engines are ten times faster than is believed.
    made.clock.advance(0.045)
    made.first_token(received)
    made.core.expire()
    assert made.phase(whole) is Phase.DECODE
    assert made.phase(behind) is Phase.PREFILL


def test_who_waits_in_line_goes_when_a_prefill_should_be_over() -> None:
    made = Engines("a", queue_threshold=0.1)
    made.book(4_000, estimates_prefill=True)
    told: list[Decision | KvscoutError] = []
    assert made.core.reserve_or_wait(made.request(estimates_prefill=True), told.append) is not None
    made.clock.advance(0.1)
    made.core.expire()
    assert not told
    made.clock.advance(0.2)
    made.core.expire()
    assert [decision.rank.worker_id for decision in told if isinstance(decision, Decision)] == ["a"]


def test_an_estimate_is_told_to_other_replicas() -> None:
    world = Replicas("a", "b")
    asked = Engines("w0").request(1_024, estimates_prefill=True)
    world["a"].core.select_and_reserve(asked)
    world.run(5.0)
    world["a"].core.expire()
    world.settled()
    for name in ("a", "b"):
        assert phase_of(world[name].core, asked.key) is Phase.DECODE


def test_estimates_teach_nothing_while_some_first_token_is_heard() -> None:
    made = Engines("a", "b")
    for _ in range(3 * UNREPORTED):
        whole, received = made.book(on="a", estimates_prefill=True), made.book(on="b")
        made.clock.advance(0.0612)
        made.first_token(received)
        made.clock.advance(60.0)
        # The answer as a whole took a thousand times as long as the one that is heard.
        made.end(whole, 300)
        made.end(received, 1)
        made.clock.advance(1.0)
    assert made.times.prefill.at(1_024) == pytest.approx(0.0612, rel=0.2)
    assert made.times.decode.base < 0.02


@pytest.mark.parametrize("pace", [0.125, 4.0])
def test_where_nobody_streams_whole_answers_tell_how_fast_engines_are(pace: float) -> None:
    rng, made = Random(test_seed()), Engines("a", "b")
    for _ in range(UNREPORTED + 250):
        tokens, output = rng.randrange(500, 6_000), rng.randrange(20, 300)
        whole = made.book(tokens, estimates_prefill=True)
        made.clock.advance(pace * (0.01 + 50e-6 * tokens + output * (0.01 + 20e-9 * tokens)))
        made.end(whole, output)
        made.clock.advance(1.0)
    assert made.times.prefill.at(3_000) == pytest.approx(pace * 0.16, rel=0.3)
    assert made.times.decode.at(3_000) == pytest.approx(pace * 0.01006, rel=0.3)


def test_a_worker_that_decodes_slowly_is_told_from_one_that_computes_prompts_slowly() -> None:
    rng, made = Random(test_seed()), Engines("fast", "decodes", "computes")
    for _ in range(150):
        for name, prefill, decode in (("fast", 1.0, 1.0), ("decodes", 1.0, 3.0), ("computes", 3.0, 1.0)):
            tokens, output = rng.randrange(500, 6_000), rng.randrange(20, 300)
            booked = made.book(tokens, on=name)
            made.clock.advance(prefill * (0.01 + 50e-6 * tokens))
            made.first_token(booked)
            made.clock.advance(decode * 0.012 * (output - 1))
            made.end(booked, output)
            made.clock.advance(5.0)
    paces = {rank.worker_id: (each.pace, each.decode_pace) for rank, each in made.times._workers.items()}
    assert paces["computes"][0] / paces["fast"][0] > 2.0
    assert paces["decodes"][1] / paces["fast"][1] > 1.5
    assert paces["decodes"][0] == pytest.approx(paces["fast"][0], rel=0.15)
    assert paces["computes"][1] == pytest.approx(paces["fast"][1], rel=0.15)
    assert made.cost("decodes") > made.cost("fast")
    assert made.cost("computes") > made.cost("fast")


def test_contexts_grow_by_what_is_generated() -> None:
    made = Engines("a")
    long = made.book(1_000, on="a", output_class="long")
    made.clock.advance(0.06)
    made.first_token(long)
    before = made.cost("a")
    state = made.times._workers[WorkerRank("a", 0)]
    assert made.times._contexts(state, made.clock()) == 1_000
    made.clock.advance(3.0)
    # 3 s of steps of 10 ms.
    assert made.times._contexts(state, made.clock()) == pytest.approx(1_300, rel=0.02)
    # It came into its third stage: longer than was expected, and so going on for longer.
    assert made.cost("a") > before
    made.end(long, 300)
    assert made.times._contexts(state, made.clock()) == 0


def test_first_tokens_of_one_step_are_one_observation() -> None:
    rng, made = Random(test_seed()), Engines("a")
    for _ in range(200):
        ids = [made.book(rng.randrange(100, 300), on="a") for _ in range(rng.randrange(1, 12))]
        tokens = made.times._workers[WorkerRank("a", 0)].prefill_tokens
        made.clock.advance(0.02 + 20e-6 * tokens)
        for each in ids:
            made.first_token(each)
        for each in ids:
            made.end(each, 1)
        made.clock.advance(1.0)
        made.core.select(made.request())
    assert made.times.prefill.at(500) == pytest.approx(0.03, rel=0.15)
    assert made.times.prefill.at(2_000) == pytest.approx(0.06, rel=0.15)


@pytest.mark.slow
def test_paces_of_many_registered_ranks_are_kept_while_they_idle() -> None:
    names = [f"w{number:04d}" for number in range(1_300)]
    made = Engines(*names)
    for _ in range(60):
        for name in names[:3]:
            booked = made.book(2_000, on=name)
            made.clock.advance(0.33 if name == names[0] else 0.11)
            made.first_token(booked)
            made.end(booked, 1)
            made.clock.advance(1.0)
    for name in names[3:]:
        made.end(made.book(on=name), 0)
    made.core.select(made.request())
    paces = {rank.worker_id: state.pace for rank, state in made.times._workers.items()}
    assert paces[names[0]] / paces[names[1]] > 2.0
