"""A hybrid model's cache with states: as vLLM's, step by step, and an index predicts what it hits."""

from __future__ import annotations

import random
import zlib
from array import array
from pathlib import Path
from typing import Any

import msgpack
import pytest
from support.mocker_hits import BLOCK_SIZE, ENCODER, assert_hits_are_predicted, request_of, serve
from support.mocker_invariants import check_blocks
from support.seeds import test_seed

from kvscout_mocker.config import EngineConfig, StepCost
from kvscout_mocker.engine.engine import Engine
from kvscout_mocker.engine.request import Request
from kvscout_mocker.engine.state_blocks import StateBlockManager
from kvscout_mocker.events import BlockStored
from kvscout_mocker.tokens.sequence import Sequence

RECORDING = Path(__file__).parents[2] / "data" / "state_groups" / "align-chunked.bin"
SEED = test_seed()


def engine(*, num_gpu_blocks: int = 60, max_num_batched_tokens: int = 64, max_num_seqs: int = 6) -> Engine:
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=num_gpu_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=200,
        max_waiting=100,
        vocab_size=50,
        cost=StepCost(0.0, 0.0, 0.0),
        state_space=True,
    )
    return Engine(config, StateBlockManager(num_gpu_blocks, BLOCK_SIZE))


class RecordedRequest(Request):
    """Generates the tokens that vLLM's scheduler was given."""

    recorded: list[int]

    def next_token(self, vocab_size: int) -> int:
        return self.recorded[self.output_tokens]


class HashNames:
    """Replaces hashes by what they stand for: full attention tells, after the states."""

    def __init__(self) -> None:
        self._names: dict[int | None, str] = {None: ""}

    def batch(self, payload: bytes) -> list[tuple[object, ...]]:
        events = msgpack.unpackb(payload)[1] if payload else []
        for event in events:
            if event.get("kv_cache_spec_kind") == "full_attention":
                name = self._names[event["parent_block_hash"]]
                for index, block_hash in enumerate(event["block_hashes"]):
                    name += f"/{event['token_ids'][index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]}"
                    self._names[block_hash] = name
        return [self._plain(event) for event in events]

    def _plain(self, event: dict[str, Any]) -> tuple[object, ...]:
        names = [self._names[block_hash] for block_hash in event.get("block_hashes", [])]
        others = {key: value for key, value in event.items() if key not in ("block_hashes", "parent_block_hash")}
        return names, self._names[event.get("parent_block_hash")], others


def test_the_engine_caches_and_reports_what_vllms_scheduler_did() -> None:
    head, records = msgpack.unpackb(zlib.decompress(RECORDING.read_bytes()))
    sampled: dict[int, list[int]] = {}
    for record in records:
        for number, *tokens in record[2] if record[0] == "step" else []:
            sampled.setdefault(number, []).extend(tokens)
    served = engine(num_gpu_blocks=head["num_blocks"], max_num_batched_tokens=head["chunk"])
    theirs, ours, requests, steps = HashNames(), HashNames(), dict[int, RecordedRequest](), 0
    for number, record in enumerate(records):
        match record:
            case ["add", request_id, prompt, max_tokens]:
                sequence = Sequence(array("I", prompt), block_size=BLOCK_SIZE, hash_seed=1)
                request = requests[request_id] = RecordedRequest(str(request_id), sequence, max_tokens)
                request.recorded = sampled.get(request_id, [])
                served.submit(request)
            case ["abort", request_id]:
                served.abort(requests[request_id])
            case ["step", payload, computed]:
                step = served.begin_step()
                assert step is not None
                assert [int(each.request.request_id) for each in step.scheduled] == [i for i, *_ in computed], number
                served.finish_step(step)
                events = served.take_events()
                batch = ENCODER.encode(events, 0.0) if events else b""
                assert ours.batch(batch) == theirs.batch(payload), f"record {number}"
                check_blocks(served.blocks)
                steps += 1
            case ["ask", tokens, cached]:
                hit = served.blocks.cached_prefix(request_of(tokens, 1).sequence)
                assert len(hit) * BLOCK_SIZE == cached, f"record {number}"
    assert steps > 100


@pytest.mark.parametrize("world", range(20))
def test_an_index_predicts_what_an_engine_with_states_hits(world: int) -> None:
    rng = random.Random(SEED + world)
    served = engine(num_gpu_blocks=rng.choice([40, 60]), max_num_batched_tokens=rng.choice([8, 14, 64]))
    assert_hits_are_predicted(served, rng, f"KVSCOUT_TEST_SEED={SEED}, world {world}")


def test_a_state_is_hit_where_the_same_prompt_goes_on_and_where_prompts_part() -> None:
    served = engine()
    prompt = list(range(20))
    assert serve(served, prompt, 1).cached_tokens == 0
    stored = [event for event in served.take_events() if isinstance(event, BlockStored) and event.block_hashes]
    # The first step ends where the same prompt is resumed, four blocks in; full attention then has a fifth one.
    assert [(event.kind, len(event.block_hashes), len(event.token_ids)) for event in stored] == [
        ("mamba", 1, 16),
        ("full_attention", 4, 16),
        ("full_attention", 1, 4),
    ]
    assert serve(served, prompt, 1).cached_tokens == 16
    assert serve(served, prompt[:14], 1).cached_tokens == 0
    # What one prompt was seen to share is kept for the next one.
    assert serve(served, [*prompt[:10], 49, 49], 1).cached_tokens == 0
    assert serve(served, [*prompt[:10], 48, 48], 1).cached_tokens == 8


def test_a_request_that_would_hit_a_state_of_this_step_waits_for_the_next_one() -> None:
    served = engine()
    prompt = list(range(14))
    for number in range(2):
        served.submit(request_of(prompt, 1, str(number)))
    first = served.begin_step()
    assert first is not None
    assert [each.request.request_id for each in first.scheduled] == ["0"]
    served.finish_step(first)
    second = served.begin_step()
    assert second is not None
    assert [(each.request.request_id, each.tokens) for each in second.scheduled] == [("0", 2), ("1", 2)]


def test_a_reset_forgets_states_too() -> None:
    served = engine()
    serve(served, list(range(20)), 1)
    assert served.reset_prefix_cache()
    check_blocks(served.blocks)
    assert serve(served, list(range(20)), 1).cached_tokens == 0
