"""Continuous batching, step by step."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
from support.mocker_invariants import check_blocks, free_blocks
from support.seeds import test_seed

from kvscout_common.errors import ResourceExhausted
from kvscout_mocker.config import EngineConfig, StepCost
from kvscout_mocker.engine.engine import Engine
from kvscout_mocker.engine.request import Output, Request, RequestState
from kvscout_mocker.events import AllBlocksCleared, BlockStored
from kvscout_mocker.tokens.sequence import Sequence

CONFIG = EngineConfig(
    block_size=4,
    num_gpu_blocks=65,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    max_model_len=256,
    max_waiting=4,
    vocab_size=1000,
    cost=StepCost(base_seconds=1.0, prefill_seconds_per_token=0.1, decode_seconds_per_request=0.01),
)


def request(tokens: list[int], max_tokens: int = 1, seed: int = 0) -> Request:
    return Request("r", Sequence(array("I", tokens), block_size=4, hash_seed=1), max_tokens, seed)


def step(engine: Engine) -> list[Output]:
    scheduled = engine.begin_step()
    return [] if scheduled is None else engine.finish_step(scheduled)


def drain(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    while (scheduled := engine.begin_step()) is not None:
        outputs += engine.finish_step(scheduled)
    return outputs


def test_an_idle_engine_has_no_step() -> None:
    assert Engine(CONFIG).begin_step() is None


def test_a_prompt_within_the_budget_answers_after_one_step() -> None:
    engine = Engine(CONFIG)
    asked = request(list(range(10)), max_tokens=3)
    engine.submit(asked)
    outputs = [step(engine) for _ in range(3)]
    assert [len(output) for output in outputs] == [1, 1, 1]
    assert [output[0].finish for output in outputs] == [None, None, "length"]
    assert asked.state is RequestState.FINISHED
    assert free_blocks(engine.blocks) == engine.blocks.capacity
    assert engine.begin_step() is None


def test_a_long_prompt_is_computed_in_chunks_with_one_event_each() -> None:
    engine = Engine(CONFIG)
    engine.submit(request(list(range(70))))
    stored: list[list[int]] = []
    while (scheduled := engine.begin_step()) is not None:
        engine.finish_step(scheduled)
        stored += [e.token_ids for e in engine.take_events() if isinstance(e, BlockStored)]
    assert stored == [list(range(32)), list(range(32, 64)), list(range(64, 68))]


def test_decodes_come_before_prefills_in_a_steps_budget() -> None:
    engine = Engine(CONFIG)
    first, second = request(list(range(20)), max_tokens=5), request(list(range(100, 170)))
    engine.submit(first)
    step(engine)
    engine.submit(second)
    scheduled = engine.begin_step()
    assert scheduled is not None
    assert [(s.request is first, s.tokens) for s in scheduled.scheduled] == [(True, 1), (False, 31)]
    assert scheduled.duration_seconds == pytest.approx(1.0 + 31 * 0.1 + 0.01)


def test_cached_tokens_cost_nothing_and_are_reported() -> None:
    engine = Engine(CONFIG)
    engine.submit(request(list(range(16))))
    drain(engine)
    again = request(list(range(16)))
    engine.submit(again)
    scheduled = engine.begin_step()
    assert scheduled is not None
    assert again.cached_tokens == 12
    assert scheduled.scheduled[0].tokens == 4
    assert (engine.counters.prefix_query_tokens, engine.counters.prefix_hit_tokens) == (32, 12)


def test_requests_scheduled_in_one_step_share_their_prefix_already() -> None:
    engine = Engine(CONFIG)
    twins = [request(list(range(9))) for _ in range(2)]
    for twin in twins:
        engine.submit(twin)
    step(engine)
    assert [twin.cached_tokens for twin in twins] == [0, 8]


def test_generated_blocks_are_hit_by_the_next_turn() -> None:
    engine = Engine(CONFIG)
    first = request(list(range(10)), max_tokens=7)
    engine.submit(first)
    drain(engine)
    assert len(first.sequence) == 17
    following = request([*first.sequence.tokens, 1, 2, 3])
    engine.submit(following)
    drain(engine)
    assert following.cached_tokens == 16


def test_tokens_depend_on_prompt_position_and_seed_alone() -> None:
    def generate(tokens: list[int], seed: int = 0) -> list[int]:
        engine = Engine(CONFIG)
        engine.submit(request([500]))  # company must not matter
        asked = request(tokens, max_tokens=12, seed=seed)
        engine.submit(asked)
        drain(engine)
        return asked.sequence.tokens[len(tokens) :].tolist()

    assert generate([1, 2, 3]) == generate([1, 2, 3])
    assert len({tuple(generate([1, 2, 3])), tuple(generate([1, 2, 4])), tuple(generate([1, 2, 3], 9))}) == 3
    assert len(set(generate([1, 2, 3]))) > 6
    assert all(8 <= token < 1000 for token in generate([1, 2, 3]))


def test_a_full_waiting_queue_refuses() -> None:
    engine = Engine(CONFIG)
    for _ in range(4):
        engine.submit(request([1]))
    with pytest.raises(ResourceExhausted, match="waiting queue is full"):
        engine.submit(request([1]))
    assert engine.num_waiting == 4


def test_a_batch_has_no_more_than_max_num_seqs_requests() -> None:
    engine = Engine(replace(CONFIG, max_num_seqs=2))
    for first in range(3):
        engine.submit(request([first], max_tokens=2))
    step(engine)
    assert (engine.num_running, engine.num_waiting) == (2, 1)


def test_a_request_is_admitted_only_when_its_whole_prompt_fits() -> None:
    engine = Engine(replace(CONFIG, num_gpu_blocks=31))
    engine.submit(request(list(range(80)), max_tokens=2))
    engine.submit(request(list(range(200, 280))))
    step(engine)
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    assert len(drain(engine)) == 3


def test_the_youngest_request_is_preempted_and_recomputed_when_blocks_run_out() -> None:
    engine = Engine(replace(CONFIG, num_gpu_blocks=6))
    old, young = request([1, 2, 3, 4, 5, 6, 7], max_tokens=12), request([9, 8, 7, 6, 5], max_tokens=6)
    engine.submit(old)
    engine.submit(young)
    outputs = drain(engine)
    assert engine.counters.preemptions > 0
    assert [o.request for o in outputs if o.finish] == [old, young]
    alone = Engine(CONFIG)
    again = request([9, 8, 7, 6, 5], max_tokens=6)
    alone.submit(again)
    drain(alone)
    assert young.sequence.tokens == again.sequence.tokens
    assert young.cached_tokens == 0
    check_blocks(engine.blocks)


def test_an_abort_in_the_middle_of_a_step_frees_the_blocks_and_gives_no_token() -> None:
    engine = Engine(CONFIG)
    running, waiting = request(list(range(40))), request([1])
    engine.submit(running)
    engine.submit(waiting)
    scheduled = engine.begin_step()
    assert scheduled is not None
    engine.abort(running)
    engine.abort(waiting)
    engine.abort(waiting)
    assert engine.finish_step(scheduled) == []
    assert free_blocks(engine.blocks) == engine.blocks.capacity
    assert (engine.num_running, engine.num_waiting, engine.counters.aborted) == (0, 0, 2)


def test_the_clearing_of_the_cache_is_reported_before_the_next_requests_blocks() -> None:
    engine = Engine(CONFIG)
    engine.submit(request(list(range(8))))
    drain(engine)
    engine.take_events()
    assert engine.reset_prefix_cache()
    engine.submit(request(list(range(8))))
    step(engine)
    assert [type(event) for event in engine.take_events()] == [AllBlocksCleared, BlockStored]


def receiving(tokens: list[int], max_tokens: int = 2) -> Request:
    asked = request(tokens, max_tokens)
    asked.receives = True
    return asked


def test_a_received_prompt_costs_no_prefill_and_its_blocks_are_known_when_it_is_there() -> None:
    engine = Engine(CONFIG)
    asked = receiving(list(range(18)))
    engine.submit(asked)
    assert engine.begin_step() is None
    [pull] = engine.take_pulls()
    assert (pull.request, pull.tokens, asked.state) == (asked, 18, RequestState.RECEIVING)
    assert (engine.num_waiting, engine.take_events(), engine.blocks.cached_copies()) == (1, [], {})
    assert free_blocks(engine.blocks) == engine.blocks.capacity - 5
    engine.received(pull)
    scheduled = engine.begin_step()
    assert scheduled is not None
    assert [s.tokens for s in scheduled.scheduled] == [1]
    [stored] = engine.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == list(range(16))
    assert len(engine.finish_step(scheduled)) + len(drain(engine)) == 2
    alone = Engine(CONFIG)
    computed = request(list(range(18)), 2)
    alone.submit(computed)
    drain(alone)
    assert asked.sequence.tokens == computed.sequence.tokens
    assert (engine.counters.expected_tokens, engine.counters.received_tokens) == (18, 18)
    assert free_blocks(engine.blocks) == engine.blocks.capacity


def test_only_what_is_not_cached_is_received_and_others_run_meanwhile() -> None:
    engine = Engine(CONFIG)
    engine.submit(request(list(range(9))))
    drain(engine)
    asked, other = receiving(list(range(18))), request([500])
    engine.submit(asked)
    engine.submit(other)
    assert [output.request for output in step(engine)] == [other]
    [pull] = engine.take_pulls()
    assert (pull.tokens, asked.cached_tokens) == (10, 8)


def test_a_prompt_that_does_not_come_is_computed_here_or_fails() -> None:
    engine = Engine(CONFIG)
    for recompute in (True, False):
        asked = receiving(list(range(20)), max_tokens=1)
        engine.submit(asked)
        assert engine.begin_step() is None
        [pull] = engine.take_pulls()
        assert engine.lost(pull, recompute=recompute) is not recompute
        scheduled = engine.begin_step()
        assert ([s.tokens for s in scheduled.scheduled] if scheduled else []) == ([20] if recompute else [])
        if scheduled is not None:
            engine.finish_step(scheduled)
        assert asked.state is RequestState.FINISHED
        assert engine.reset_prefix_cache()
    assert engine.counters.failed_transfers == 2


@pytest.mark.parametrize("arrives", [True, False])
def test_an_aborted_request_keeps_its_blocks_until_nothing_is_written_into_them(arrives: bool) -> None:
    engine = Engine(CONFIG)
    asked = receiving(list(range(20)))
    engine.submit(asked)
    assert engine.begin_step() is None
    [pull] = engine.take_pulls()
    engine.abort(asked)
    assert free_blocks(engine.blocks) == engine.blocks.capacity - 5
    if arrives:
        engine.received(pull)
    else:
        assert not engine.lost(pull, recompute=False)
    assert (engine.begin_step(), engine.take_events(), engine.num_waiting) == (None, [], 0)
    assert free_blocks(engine.blocks) == engine.blocks.capacity
    check_blocks(engine.blocks)


def test_a_request_for_another_engine_keeps_its_blocks_until_they_are_released() -> None:
    engine = Engine(replace(CONFIG, num_gpu_blocks=7))
    asked = request(list(range(20)))
    asked.holds = True
    engine.submit(asked)
    drain(engine)
    assert (asked.state, engine.num_running) == (RequestState.FINISHED, 0)
    engine.submit(request(list(range(100, 120))))
    assert engine.begin_step() is None
    engine.release(asked)
    engine.release(asked)
    assert len(drain(engine)) == 1
    assert free_blocks(engine.blocks) == engine.blocks.capacity


def test_random_load_finishes_every_request_and_leaves_nothing_referenced() -> None:
    seed = test_seed()
    rng = random.Random(seed)
    where = f"rerun with KVSCOUT_TEST_SEED={seed}"
    engine = Engine(replace(CONFIG, num_gpu_blocks=20, max_waiting=1000, max_num_seqs=5))
    live = [request([rng.randrange(3) for _ in range(rng.randint(1, 40))], rng.randint(1, 30)) for _ in range(80)]
    for asked in live:
        engine.submit(asked)
    while (scheduled := engine.begin_step()) is not None:
        assert sum(s.tokens for s in scheduled.scheduled) <= 32, where
        if rng.random() < 0.1:
            engine.abort(rng.choice(live))
        engine.finish_step(scheduled)
        check_blocks(engine.blocks)
    assert engine.counters.finished + engine.counters.aborted == 80, where
    assert free_blocks(engine.blocks) == engine.blocks.capacity, where
