"""Load columns, by cases and against a model that counts everything anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
from support.load_backends import MakeLoad, backends
from support.scheduler_invariants import check_load
from support.seeds import test_seed

from kvscout_scheduler.costs.cost import BlockFormat
from kvscout_scheduler.load.active_load import ActiveLoad, Allocation, Limits
from kvscout_scheduler.values.request import pack_hashes

BLOCK_FORMAT = BlockFormat(16, eagle=False)
Load = Callable[..., ActiveLoad]


@pytest.fixture(params=backends())
def load(request: pytest.FixtureRequest) -> Load:
    make: MakeLoad = request.param

    def made(slots: int = 1, *, track_blocks: bool = True) -> ActiveLoad:
        active = make(track_blocks=track_blocks)
        active.ensure_slot(slots - 1)
        return active

    return made


def test_s4_shared_blocks_count_once_and_end_at_zero(load: Load) -> None:
    active = load()
    first = active.add(0, BLOCK_FORMAT, pack_hashes([10, 20, 30]))
    second = active.add(0, BLOCK_FORMAT, pack_hashes([10, 20, 99]))
    assert active.decode_blocks == [4]
    active.remove(first)
    assert active.decode_blocks == [3]
    active.remove(second)
    assert active.decode_blocks == [0]


def test_s4_a_fully_shared_pair_counts_once(load: Load) -> None:
    active = load()
    active.add(0, BLOCK_FORMAT, pack_hashes([1, 2]))
    active.add(0, BLOCK_FORMAT, pack_hashes([1, 2]))
    assert active.decode_blocks == [2]


def test_partial_tails_and_output_blocks_are_private(load: Load) -> None:
    active = load()
    first = active.add(0, BLOCK_FORMAT, pack_hashes([1]), private_blocks=1)
    second = active.add(0, BLOCK_FORMAT, pack_hashes([1]), private_blocks=1)
    assert active.decode_blocks == [3]
    active.add_private(first, 5)
    assert active.decode_blocks == [8]
    active.remove(first)
    assert active.decode_blocks == [2]
    active.remove(second)
    assert active.decode_blocks == [0]


def test_prefill_tokens_leave_once(load: Load) -> None:
    active = load()
    allocation = active.add(0, BLOCK_FORMAT, b"", prefill_tokens=100)
    assert active.prefill_tokens == [100]
    active.complete_prefill(allocation)
    active.complete_prefill(allocation)
    assert active.prefill_tokens == [0]
    active.remove(allocation)
    assert (active.prefill_tokens, active.requests) == ([0], [0])


def test_limits_say_who_is_busy_and_who_has_room(load: Load) -> None:
    active = load(2)
    active.arrange({("a", 0): 1, ("b", 0): 0}, [1, 0])
    assert (active.busy(), active.full()) == (0, 0)
    active.add(0, BLOCK_FORMAT, pack_hashes([1, 2]), private_blocks=1, prefill_tokens=50)
    active.limit(0, Limits(prefill_tokens=50, decode_blocks=3, queued_prefill_tokens=49))
    assert (active.busy(), active.full()) == (0, 0b01)
    extra = active.add(0, BLOCK_FORMAT, pack_hashes([1, 3]))
    assert (active.busy(), active.full()) == (0b01, 0b01)
    active.remove(extra)
    assert (active.busy(), active.full()) == (0, 0b01)
    active.limit(0, Limits(decode_blocks=-1))
    active.limit(1, Limits(decode_blocks=-1))
    assert (active.busy(), active.full()) == (0b11, 0b11)


def test_untracked_blocks_are_never_counted(load: Load) -> None:
    active = load(track_blocks=False)
    allocation = active.add(0, BLOCK_FORMAT, pack_hashes([1, 2]), private_blocks=1, prefill_tokens=7)
    active.add_private(allocation, 3)
    assert (active.decode_blocks, active.prefill_tokens) == ([0], [7])
    assert active.shared(BLOCK_FORMAT, pack_hashes([1, 2])) == {}
    active.remove(allocation)
    assert (active.decode_blocks, active.prefill_tokens) == ([0], [0])


def test_lanes_share_nothing(load: Load) -> None:
    active = load()
    active.add(0, BLOCK_FORMAT, pack_hashes([1, 2]))
    active.add(0, BlockFormat(32, eagle=False), pack_hashes([1, 2]))
    assert active.decode_blocks == [4]


@dataclass
class Counted:
    allocation: Allocation
    slot: int
    hashes: tuple[int, ...]
    private: int
    prefill: int


def test_random_operations_match_a_model_that_counts_anew(load: Load) -> None:
    rng = Random(test_seed())
    slots = 3
    active, model = load(slots), list[Counted]()
    for _ in range(4000):
        operation = rng.random()
        if not model or operation < 0.45:
            hashes = tuple(rng.choices((1, 2), k=rng.randrange(8)))
            slot, private, prefill = rng.randrange(slots), rng.randrange(2), rng.randrange(100)
            allocation = active.add(
                slot, BLOCK_FORMAT, pack_hashes(hashes), private_blocks=private, prefill_tokens=prefill
            )
            model.append(Counted(allocation, slot, hashes, private, prefill))
        elif operation < 0.85:
            active.remove(model.pop(rng.randrange(len(model))).allocation)
        elif operation < 0.95:
            chosen = rng.choice(model)
            active.complete_prefill(chosen.allocation)
            chosen.prefill = 0
        else:
            chosen = rng.choice(model)
            active.add_private(chosen.allocation, 2)
            chosen.private += 2
        for slot in range(slots):
            mine = [each for each in model if each.slot == slot]
            distinct = {each.hashes[: n + 1] for each in mine for n in range(len(each.hashes))}
            assert active.requests[slot] == len(mine)
            assert active.prefill_tokens[slot] == sum(each.prefill for each in mine)
            assert active.decode_blocks[slot] == len(distinct) + sum(each.private for each in mine)
    check_load(active, [each.allocation for each in model])
    for each in model:
        active.remove(each.allocation)
    assert active.requests == active.prefill_tokens == active.decode_blocks == [0] * slots
