"""The index predicts what vLLM's scheduler hits with groups of states, step by step.

The recordings are of vLLM 0.32's own scheduler and KV cache manager (`tests/real_vllm_scheduler.py`): after each step
the batch that it published, and the cached tokens that it then computed for some prompts.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest
from support.index_scenarios import IndexFactory

from kvscout_blocks.bytes.acceptance import Ignored
from kvscout_blocks.index.block_index import BlockIndex, WorkerOptions
from kvscout_common.hashing import block_hashes
from kvscout_common.worker import PoolKey, WorkerRank

DATA = Path(__file__).parents[1] / "data" / "state_groups"
WORKER = WorkerRank("engine", 0)

NAMES = sorted(path.stem for path in DATA.iterdir())
LOWER_BOUNDS = {
    # States within the blocks of full attention: the index has no place for them.
    "finer-hashes",
    # Without full attention nothing says which of a run's blocks have a state.
    "only-states-align",
}


def recording(name: str) -> tuple[int, list[Any]]:
    head, records = msgpack.unpackb(zlib.decompress((DATA / f"{name}.bin").read_bytes()))
    return head["block_size"], records


def new_index(factory: IndexFactory, block_size: int) -> BlockIndex:
    index = factory(block_size)
    index.add_worker(WORKER, WorkerOptions())
    return index


def predicted_tokens(index: BlockIndex, tokens: list[int]) -> int:
    usable = (len(tokens) - 1) // index.block_size
    found = index.find_matches(block_hashes(tokens, index.block_size), now=0.0, usable=usable).by_worker()
    return min(found[WORKER].device if found else 0, usable) * index.block_size


class FullAttention:
    """Keeps the events of full-attention groups."""

    def __init__(self) -> None:
        self._groups: set[int] = set()

    def of(self, payload: bytes) -> bytes:
        kept = [event for event in msgpack.unpackb(payload)[1] if self._is_kept(event)]
        packed: bytes = msgpack.packb([0.0, kept])
        return packed

    def _is_kept(self, event: dict[str, object]) -> bool:
        if event.get("kv_cache_spec_kind") == "full_attention":
            self._groups.add(event["group_idx"])  # type: ignore[arg-type]
        return event["group_idx"] in self._groups


@pytest.mark.parametrize("name", NAMES)
def test_predicted_tokens_are_what_the_scheduler_hits(index_factory: IndexFactory, name: str) -> None:
    block_size, records = recording(name)
    index, without_states = new_index(index_factory, block_size), new_index(index_factory, block_size)
    full_attention = FullAttention()
    hits = shortened = 0
    for number, record in enumerate(records):
        if record[0] == "step" and record[1]:
            index.apply_payload(WORKER, record[1], event_id=number)
            without_states.apply_payload(WORKER, full_attention.of(record[1]), event_id=number)
        if record[0] != "ask":
            continue
        _, tokens, cached = record
        predicted = predicted_tokens(index, tokens)
        assert predicted <= cached if name in LOWER_BOUNDS else predicted == cached, f"record {number}"
        hits += cached > 0
        shortened += predicted_tokens(without_states, tokens) > cached
    index.check_invariants()
    stats = index.worker_stats(WORKER)
    assert stats is not None
    assert not stats.unjudged_groups and not stats.incompatible and not stats.ignored.get(Ignored.SKIPPED_GROUP)
    # What has no place in the index is counted.
    assert bool(stats.ignored.get(Ignored.UNKNOWN_MOVED)) == (name in LOWER_BOUNDS)
    assert hits > 50
    if not name.startswith("only-states") and name not in ("all", "finer-hashes"):
        assert shortened > 50, "states matter in what was recorded"


@pytest.mark.parametrize("name", NAMES)
def test_what_a_bridge_sends_on_gives_the_same_index(index_factory: IndexFactory, name: str) -> None:
    block_size, records = recording(name)
    direct, bridged = new_index(index_factory, block_size), new_index(index_factory, block_size)
    pool = PoolKey("m", "default", block_size, False)
    for number, payload in enumerate(record[1] for record in records if record[0] == "step" and record[1]):
        direct.apply_payload(WORKER, payload, event_id=number)
        message = direct.encode_batch(WORKER, pool, {}, direct.decode(payload), epoch=0, event_id=number)
        bridged.apply(WORKER, bridged.decode_message(message).batch, event_id=number)
    assert bridged.dump(WORKER) == direct.dump(WORKER)
