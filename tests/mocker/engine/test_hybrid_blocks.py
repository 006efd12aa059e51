"""A hybrid model's cache under random requests: its blocks stay whole, and an index predicts what it hits."""

from __future__ import annotations

import random

import pytest
from support.mocker_hits import BLOCK_SIZE, assert_hits_are_predicted, serve
from support.mocker_invariants import check_blocks
from support.seeds import test_seed

from kvscout_mocker.config import EngineConfig, StepCost
from kvscout_mocker.engine.engine import Engine
from kvscout_mocker.engine.hybrid_blocks import HybridBlockManager
from kvscout_mocker.events import BlockStored

SEED = test_seed()


def engine(sliding_window: int, *, num_gpu_blocks: int = 40, max_num_batched_tokens: int = 64) -> Engine:
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=num_gpu_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=64,
        max_waiting=100,
        vocab_size=50,
        cost=StepCost(0.0, 0.0, 0.0),
        sliding_window=sliding_window,
    )
    return Engine(config, HybridBlockManager(num_gpu_blocks, BLOCK_SIZE, sliding_window))


@pytest.mark.parametrize("world", range(20))
def test_an_index_predicts_what_a_hybrid_engine_hits(world: int) -> None:
    rng = random.Random(SEED + world)
    window, chunk = rng.choice([2, 4, 5, 9, 14, 30]), rng.choice([8, 12, 64])
    served = engine(window, num_gpu_blocks=rng.choice([40, 60]), max_num_batched_tokens=chunk)
    assert_hits_are_predicted(served, rng, f"KVSCOUT_TEST_SEED={SEED}, world {world}")


def test_a_window_is_hit_where_the_same_prompt_goes_on() -> None:
    served = engine(8)
    prompt = list(range(20))
    assert serve(served, prompt, 1).cached_tokens == 0
    window, full = [event for event in served.take_events() if isinstance(event, BlockStored)]
    assert (window.sliding_window, window.group, len(window.block_hashes)) == (8, 0, 2)
    assert (full.sliding_window, full.group, len(full.block_hashes)) == (None, 1, 5)
    # Of what full attention has, the window group has the blocks before the prompt's last one.
    assert serve(served, prompt, 1).cached_tokens == 16
    assert serve(served, prompt[:14], 1).cached_tokens == 0
    # What one prompt was seen to share is kept for the next one.
    assert serve(served, [*prompt[:13], 49], 1).cached_tokens == 12


def test_a_reset_forgets_both_groups() -> None:
    served = engine(8)
    serve(served, list(range(20)), 1)
    assert served.reset_prefix_cache()
    check_blocks(served.blocks)
    assert serve(served, list(range(20)), 1).cached_tokens == 0
