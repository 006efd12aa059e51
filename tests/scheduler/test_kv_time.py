"""`kv-time`: what it thinks a request costs, and what it learns of workers."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

import pytest
from support.load_backends import SideBySide
from support.scheduler_builders import MODEL, ManualClock, key, overlaps, scheduler, worker
from support.seeds import test_seed

from kvscout_common.errors import KvscoutError
from kvscout_common.worker import Role, WorkerRank
from kvscout_scheduler.costs.time_cost import STAGE_WEIGHTS
from kvscout_scheduler.estimates.learned_times import LearnedTimes
from kvscout_scheduler.estimates.output_lengths import BELIEVED, WIDTHS
from kvscout_scheduler.estimates.worker_times import NONE
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.request import (
    EMPTY_PROMPT,
    ConfigOverride,
    Prompt,
    SelectionRequest,
    WorkerConstraints,
    pack_hashes,
)
from kvscout_scheduler.values.reservation import RequestKey
from kvscout_scheduler.values.settings import SchedulerSettings

DECODE = sum(weight * tokens for weight, tokens in zip(STAGE_WEIGHTS, BELIEVED, strict=True)) * 0.01
"""Seconds that an output counts of which nothing is known, on an idle worker."""
BLOCKS = 64
"""Of the usual prompt: 1,024 tokens, 51 ms."""


class World:
    """A scheduler under `kv-time`, whose engines compute as fast as is said; both backends must give the same costs."""

    def __init__(self, *workers: str, reuse_weight: float = 0.0, **fields: Any) -> None:
        self.clock = ManualClock()
        self.core: Scheduler = scheduler(
            *(worker(name, **fields) for name in workers),
            clock=self.clock,
            policy="kv-time",
            make_load=SideBySide,
            session_reuse_weight=reuse_weight,
        )
        (self._pool,) = self.core.workers
        self.placed: list[str] = []
        """Workers of the bookings so far."""
        self._last = 0

    @property
    def times(self) -> LearnedTimes:
        """What it has learned."""
        return self._pool.times

    def ask(self, first: int = 0, blocks: int = BLOCKS, on: dict[str, int] | None = None, **fields: Any) -> Decision:
        """Asks and books nothing."""
        return self.core.select(self._request(first, blocks, on, **fields))

    def book(self, first: int = 0, blocks: int = BLOCKS, on: dict[str, int] | None = None, **fields: Any) -> RequestKey:
        """Books where it is cheapest."""
        asked = self._request(first, blocks, on, **fields)
        self.placed.append(self.core.select_and_reserve(asked).rank.worker_id)
        return asked.key

    def serve(self, name: str, tokens: int, seconds: float, output: int = 1, itl: float = 0.0) -> None:
        """A whole request on one worker."""
        begun = self.book(first=10_000 * self._last, blocks=tokens // 16, pinned_worker_id=name)
        self.clock.advance(seconds)
        self.core.mark_prefill_complete(begun, 1)
        self.clock.advance(itl * (output - 1))
        self.core.free(begun, 1, output_tokens=output)

    def costs(self, **fields: Any) -> dict[str, float]:
        """What it costs on each worker."""
        explanation = self.ask(explain=True, **fields).explanation
        assert explanation is not None
        return {row.rank.worker_id: row.cost for row in explanation.candidates}

    def _request(
        self, first: int, blocks: int, on: dict[str, int] | None, pinned_worker_id: str = "", **fields: Any
    ) -> SelectionRequest:
        self._last += 1
        hashes = pack_hashes(range(first, first + min(blocks, 100)))
        return SelectionRequest(
            MODEL,
            blocks * 16,
            Prompt(hashes, overlaps=overlaps(**(on or {}))),
            request_id=f"r{self._last}",
            attempt_id=1,
            constraints=WorkerConstraints(pinned_worker_id),
            **fields,
        )


def test_it_is_the_default() -> None:
    assert SchedulerSettings().policy == "kv-time"


def test_the_longest_cached_prefix_wins_while_nobody_is_busy() -> None:
    world = World("a", "b", "c")
    assert world.ask(on={"b": 10, "c": 40}).rank.worker_id == "c"
    costs = world.costs(on={"b": 10, "c": 40})
    prompts = {name: cost - DECODE for name, cost in costs.items()}
    assert prompts == pytest.approx({"a": 1_024 * 50e-6, "b": (1_024 - 160) * 50e-6, "c": (1_024 - 640) * 50e-6})


def test_weight_zero_ignores_caches_and_prompts() -> None:
    world = World("a", "b")
    override = ConfigOverride(overlap_score_weight=0.0)
    assert world.costs(on={"a": BLOCKS}, override=override) == pytest.approx({"a": DECODE, "b": DECODE})


def test_what_is_ahead_melts_away_with_time_and_counts_as_late_when_it_does_not() -> None:
    world = World("a", "b")
    begun = world.book(blocks=400, pinned_worker_id="a")
    seen = []
    for seconds in (0.0, 0.2, 0.1, 0.4, 100.0):
        world.clock.advance(seconds)
        seen.append(world.costs(on={"a": BLOCKS})["a"])
    # 6,400 tokens: 0.33 s. 0.03 s are left after 0.3 s, it is 0.37 s late after 0.7 s, and more than 5 s say no more.
    assert seen[0] - seen[1] == pytest.approx(0.2)
    assert seen[1] - seen[2] == pytest.approx(0.1)
    assert seen[3] - seen[2] == pytest.approx(0.34, rel=0.01)
    assert 5.0 < seen[4] - DECODE < 5.1
    world.core.free(begun, 1)
    assert world.costs(on={"a": BLOCKS})["a"] == pytest.approx(DECODE)


def test_a_hot_holder_gets_company() -> None:
    world = World("a", "b")
    placed = []
    for _ in range(40):
        world.book(on={"a": BLOCKS - 1})
        placed.append(world.placed[-1])
        # The holder hears of ever more short questions and is through with none of them.
        world.clock.advance(0.02)
    assert placed[0] == "a"
    assert "b" in placed


def test_a_worker_that_is_busy_all_the_time_counts_a_prompt_many_times_but_not_without_end() -> None:
    world = World("a", "b")
    assert world.costs()["a"] == pytest.approx(1_024 * 50e-6 + DECODE)
    begun = world.book(blocks=1, pinned_worker_id="a")
    for _ in range(300):
        world.clock.advance(10.0)
        after = world.book(blocks=1, pinned_worker_id="a")
        world.core.mark_prefill_complete(begun, 1)
        world.core.free(begun, 1)
        begun = after
    world.core.mark_prefill_complete(begun, 1)
    own = world.times.prefill.slope * world.times._workers[next(iter(world.times._workers))].pace * 1_024
    assert world.costs()["a"] - DECODE == pytest.approx(7 * own, rel=0.05)
    world.core.free(begun, 1)
    world.clock.advance(1e6)
    assert world.costs()["a"] - DECODE == pytest.approx(own, rel=0.01)


def test_what_is_evicted_counts_while_other_caches_have_room() -> None:
    world = World("a", "b", total_kv_blocks=2 * BLOCKS)
    world.ask()
    world.core.free(world.book(blocks=BLOCKS, pinned_worker_id="a", by_lineage=False), 1)
    half = world.costs()
    assert half["a"] == pytest.approx(half["b"]), "there is room for one more"
    world.core.free(world.book(first=1_000, blocks=BLOCKS + 32, pinned_worker_id="a", by_lineage=False), 1)
    # All 128 blocks of a are taken, none of b: half of all is free. A prompt of 64 of which a has 8 evicts 56.
    costs = world.costs(on={"a": 8})
    assert costs["b"] - DECODE == pytest.approx(1_024 * 50e-6)
    assert costs["a"] - DECODE == pytest.approx((1_024 - 128) * 1.5 * 50e-6)
    assert world.ask(on={"a": 8}).rank.worker_id == "b"
    assert world.ask(on={"a": 60}).rank.worker_id == "a", "what is cached there counts still"
    explanation = world.ask(on={"a": 60}, explain=True).explanation
    assert explanation is not None
    assert "s of its own and of what it evicts that count" in explanation.reason


def test_what_goes_to_an_offload_tier_is_not_evicted() -> None:
    world = World("a", "b", total_kv_blocks=2 * BLOCKS, labels={"offload_blocks": str(8 * BLOCKS)})
    world.core.free(world.book(blocks=2 * BLOCKS, pinned_worker_id="a", by_lineage=False), 1)
    world.core.free(world.book(first=1_000, blocks=2 * BLOCKS, pinned_worker_id="a", by_lineage=False), 1)
    costs = world.costs()
    assert costs["a"] == pytest.approx(costs["b"])


def test_where_all_caches_are_full_or_of_unknown_size_nothing_counts_that_is_evicted() -> None:
    for blocks in (2 * BLOCKS, 0):
        world = World("a", "b", total_kv_blocks=blocks)
        for name in ("a", "b"):
            world.core.free(world.book(blocks=2 * BLOCKS, pinned_worker_id=name, by_lineage=False), 1)
        world.core.free(world.book(first=1_000, blocks=2 * BLOCKS, pinned_worker_id="a", by_lineage=False), 1)
        costs = world.costs(on={"b": 8})
        prompts = {name: cost - DECODE for name, cost in costs.items()}
        assert prompts == pytest.approx({"a": 1_024 * 50e-6, "b": (1_024 - 128) * 50e-6})


def test_what_evicts_a_session_that_is_about_to_come_back_costs_more() -> None:
    world = World("a", "b", reuse_weight=1.0, total_kv_blocks=2 * BLOCKS)
    for _ in range(40):  # turns of a session that comes back within a second
        world.core.free(world.book(blocks=2 * BLOCKS, pinned_worker_id="a", session=1), 1)
        world.clock.advance(0.5)
    for number in range(40):  # of sessions that do not
        world.core.free(world.book(first=1_000, blocks=2 * BLOCKS, pinned_worker_id="b", session=100 + number), 1)
        world.clock.advance(300.0)
    world.core.free(world.book(blocks=2 * BLOCKS, pinned_worker_id="a", session=1), 1)
    world.clock.advance(0.5)
    world.ask(), world.ask()  # each looks at one worker
    slot = {rank.worker_id: number for number, rank in enumerate(world.times._registered().places)}
    question = world.times.question(
        world._request(5_000, BLOCKS, None), EMPTY_PROMPT, 16, now=world.clock.now, weight=1.0, books=False
    )
    paused, dead = question.row(slot["a"]), question.row(slot["b"])
    assert paused.room == dead.room == question.empty == 0.0
    assert paused.reuse > 0.4
    assert dead.reuse < 0.1
    costs = world.costs(first=5_000)
    tokens = {"a": 1_024 * (1 + paused.reuse), "b": 1_024 * (1 + dead.reuse)}
    assert costs["a"] - costs["b"] == pytest.approx((tokens["a"] - tokens["b"]) * 50e-6, rel=0.01)
    explanation = world.ask(first=5_000, explain=True).explanation
    assert explanation is not None
    assert "of what it evicts" in explanation.reason
    begun = world.book(blocks=2 * BLOCKS, pinned_worker_id="a", session=1)
    assert (
        world.times.question(
            world._request(5_000, BLOCKS, None), EMPTY_PROMPT, 16, now=world.clock.now, weight=1.0, books=False
        )
        .row(slot["a"])
        .reuse
        == 0.0
    ), "nothing that is in use is evicted"
    world.core.free(begun, 1)


def test_what_was_generated_takes_room_and_a_worker_that_comes_back_has_all_of_it() -> None:
    world = World("a", "b", total_kv_blocks=BLOCKS + 8)
    world.ask()
    world.core.free(world.book(blocks=BLOCKS, pinned_worker_id="a"), 1, output_tokens=128)
    assert world.costs()["a"] > world.costs()["b"]
    spec = worker("a", total_kv_blocks=BLOCKS + 8)
    world.core.workers.worker_removed(spec, "removed")
    world.ask()
    world.core.workers.worker_added(spec)
    assert world.costs()["a"] == world.costs()["b"]


def test_a_first_booking_on_a_worker_looks_at_no_other_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    arranged: list[int] = []
    arrange = LearnedTimes._arrange

    def counted(self: LearnedTimes) -> None:
        arranged.append(1)
        arrange(self)

    monkeypatch.setattr(LearnedTimes, "_arrange", counted)
    world = World(*(f"w{number}" for number in range(50)))
    for number in range(50):
        world.book(first=1_000 * number, blocks=8)
    assert len(set(world.placed)) == 50
    assert len(arranged) == 1
    world.core.workers.worker_added(worker("another"))
    world.book()
    assert len(arranged) == 2


def test_engines_that_are_faster_than_believed_do_not_gather_requests_where_they_were_first() -> None:
    world = World("a", "b", "c")
    for number in range(60):
        begun = world.book(first=1_000 * number, blocks=20)
        world.clock.advance(0.0005)
        world.core.mark_prefill_complete(begun, 1)
        world.core.free(begun, 1, output_tokens=1)
        world.clock.advance(1.0)
    counts = [world.placed.count(name) for name in ("a", "b", "c")]
    assert min(counts) >= 10, counts


def test_each_request_reads_a_shared_prompt_for_itself() -> None:
    world = World("a", "b")
    for _ in range(5):
        begun = world.book(pinned_worker_id="a", on={"a": BLOCKS})
        world.core.mark_prefill_complete(begun, 1)
    # Five contexts here, and five others that have one more, each for as long as both decode; 20 ns a token.
    stages = zip(STAGE_WEIGHTS, BELIEVED, WIDTHS, strict=True)
    both = sum(weight * tokens * tokens / width for weight, tokens, width in stages)
    expected = 20e-9 * (5 + 5) * 1_024 * both
    assert world.costs(on={"a": BLOCKS})["a"] - DECODE == pytest.approx(expected, rel=0.01)


def test_a_long_answer_makes_more_of_the_company_it_has() -> None:
    world = World("a", "b")
    world.core.mark_prefill_complete(world.book(pinned_worker_id="a"), 1)
    beside = [
        costs["a"] - costs["b"]
        for costs in (
            world.costs(max_output_tokens=tokens, on={"a": BLOCKS, "b": BLOCKS}) for tokens in (10, 100, 1_000, 100_000)
        )
    ]
    # Half of all answers have more than 130 tokens: of the others a long one meets less and less.
    assert beside[0] < beside[1] < beside[2] < beside[3] < 20 * beside[0]


def test_it_learns_how_fast_prompts_are_and_which_worker_is_slow() -> None:
    rng, world = Random(test_seed()), World("a", "b", "c", "d")
    for _ in range(500):
        for name, pace in (("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 3.0)):
            tokens = 16 * rng.randint(4, 300)
            world.serve(name, tokens, pace * (0.004 + 10e-6 * tokens))
            world.clock.advance(1.0)
    world.clock.advance(1_000.0)
    costs = world.costs()
    stages = world.times.outputs.expected("", 0, 0, 0)
    steps = sum(weight * tokens for weight, tokens in zip(STAGE_WEIGHTS, stages, strict=True))
    decode = steps * world.times.decode.base
    assert costs["a"] - decode == pytest.approx(1_024 * 10e-6, rel=0.25)
    assert (costs["d"] - decode) / (costs["a"] - decode) == pytest.approx(3.0, rel=0.35)


@pytest.mark.parametrize("speed", [8.0, 0.2])
def test_fifty_requests_say_how_fast_prompts_are_though_one_of_the_first_hangs(speed: float) -> None:
    rng, world = Random(test_seed()), World("a", "b", "c", "d")
    for number in range(50):
        tokens = 16 * rng.randint(4, 500)
        seconds = (0.01 + 50e-6 * tokens) / speed * rng.uniform(0.8, 1.2)
        world.serve("abcd"[number % 4], tokens, 60.0 if number == 1 else seconds)
        world.clock.advance(10.0)
        if number == 3:  # of which three were learned from: the last step may go on
            assert 0.5 <= world.times.prefill.slope * speed / 50e-6 <= 2.0
    world.clock.advance(1_000.0)
    costs = world.costs(blocks=250)
    decode = world.costs(blocks=250, on=dict.fromkeys("abcd", 250))
    for name in "abcd":
        assert costs[name] - decode[name] == pytest.approx(4_000 * 50e-6 / speed, rel=0.25)


def test_it_learns_how_steps_grow_with_contexts() -> None:
    rng, world = Random(test_seed()), World("a")
    for _ in range(600):
        others = [world.book(blocks=rng.randint(10, 8_000)) for _ in range(rng.randint(1, 6))]
        for begun in others:
            world.clock.advance(0.01)
            world.core.mark_prefill_complete(begun, 1)
        contexts = world.times._workers[WorkerRank("a", 0)].prompt_tokens
        begun = world.book(blocks=1)
        world.core.mark_prefill_complete(begun, 1)
        world.clock.advance(99 * (0.02 + 1e-6 * contexts))
        world.core.free(begun, 1, output_tokens=100)
        for other in others:
            world.core.free(other, 1)
    assert world.times.decode.slope == pytest.approx(1e-6, rel=0.2)
    assert sum(world.times.outputs.expected("", 0, 0, 0)) == pytest.approx(100, rel=0.1)


def test_beside_few_contexts_nearly_all_of_a_step_is_its_base() -> None:
    rng, world = Random(test_seed()), World("a")
    for _ in range(600):
        tokens = 16 * rng.randint(60, 2_500)
        world.serve("a", tokens, 0.01 + 50e-6 * tokens, output=100, itl=0.008 + 15e-9 * tokens)
        world.clock.advance(1.0)
    # Through 0 it would be 400 ns a token.
    assert world.times.decode.slope == pytest.approx(15e-9, rel=0.2)
    assert world.times.decode.base == pytest.approx(0.008, rel=0.02)


def test_callers_that_report_nothing_teach_nothing() -> None:
    world = World("a")
    for _ in range(50):
        begun = world.book()
        world.clock.advance(60.0)
        world.core.free(begun, 1, output_tokens=500)
    assert world.times.prefill.slope == 50e-6
    assert world.times.decode.slope == 20e-9


def test_a_worker_that_fails_at_once_does_not_look_fast() -> None:
    world = World("a", "b")
    for _ in range(50):
        begun = world.book(pinned_worker_id="a")
        world.clock.advance(0.001)
        world.core.free(begun, 1)
    assert world.costs()["a"] >= world.costs()["b"]


def test_prefill_workers_are_learned_from_their_ends() -> None:
    world = World("a", role=Role.PREFILL)
    for _ in range(400):
        begun = world.book(role=Role.PREFILL)
        world.clock.advance(0.5)
        world.core.free(begun, 1, output_tokens=1)
    assert world.times.prefill.at(1_024) == pytest.approx(0.5, rel=0.05)


def test_where_prompts_are_computed_elsewhere_only_decoding_counts() -> None:
    world = World("a", "b", role=Role.DECODE)
    world.book(role=Role.DECODE, charge_prefill=False, pinned_worker_id="a")
    costs = world.costs(role=Role.DECODE, charge_prefill=False)
    assert costs["b"] == pytest.approx(DECODE)
    assert world.ask(role=Role.DECODE, charge_prefill=False).rank.worker_id == "b"


def test_what_is_learned_is_that_of_the_pool_whatever_its_policy_was() -> None:
    made = scheduler("a", policy="kv")
    before = SelectionRequest(MODEL, 160, request_id="before", attempt_id=1)
    made.select_and_reserve(before)
    (pool,) = made.workers
    assert pool.times._requests
    cost = made.select(SelectionRequest(MODEL, 160, override=ConfigOverride(policy="kv-time"))).cost
    assert cost > DECODE + 160 * 50e-6
    made.mark_prefill_complete(before.key, 1)
    made.free(before.key, 1, output_tokens=3)
    assert not pool.times._requests


def test_random_lives_leave_nothing_behind_and_every_cost_is_a_number() -> None:
    rng, world = Random(test_seed()), World("a", "b", "c")
    open_: list[RequestKey] = []

    def end() -> None:
        world.core.free(open_.pop(rng.randrange(len(open_))), 1, output_tokens=rng.choice((0, 1, 2, 300)))

    acts: list[Callable[[], object]] = [
        lambda: open_.append(
            world.book(rng.randrange(50), rng.randint(1, 90), {"a": 1}, charge_prefill=rng.random() < 0.9)
        ),
        lambda: open_ and world.core.mark_prefill_complete(rng.choice(open_), 1),
        lambda: end() if open_ else None,
        lambda: world.clock.advance(rng.choice((0.0, 1e-9, 0.01, 3.0, 1e5))),
    ]
    for _ in range(1_500):
        try:
            rng.choice(acts)()
        except KvscoutError as error:
            pytest.fail(str(error))
        assert all(0 <= cost < inf for cost in world.costs().values())
    while open_:
        end()
    assert not world.times._requests
    for one in world.times._workers.values():
        assert (one.prefill_tokens, one.requests, one.prompt_tokens, one.decoding, one.prefills) == (0, 0, 0, 0, {})
        assert one.stages == NONE
        assert one.first_tokens == 0.0


def test_workers_that_come_and_go_under_new_names_are_forgotten() -> None:
    world = World("a")
    for number in range(1_200):
        spec = worker(f"pod-{number}")
        world.core.workers.worker_added(spec)
        world.core.free(world.book(blocks=1, pinned_worker_id=spec.worker_id), 1)
        world.core.workers.worker_removed(spec, "removed")
    world.ask()
    assert set(world.times._workers) <= {WorkerRank("a", 0)}


def test_its_reason_says_what_the_cost_is_made_of() -> None:
    world = World("a")
    assert key("x").model == MODEL
    world.book(blocks=200)
    explanation = world.ask(explain=True).explanation
    assert explanation is not None
    assert explanation.reason == (
        "least cost: 170 ms of prompts ahead, 51 ms of its own that count 4 times, "
        "463 ms for decoding beside others, cost 838 ms"
    )
