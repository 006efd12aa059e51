"""The cost formula, with the numbers of its worked example, in both backends, and both against each other."""

from __future__ import annotations

from array import array
from itertools import chain
from random import Random

import pytest
from support.load_backends import COLUMNS, MakeLoad, backends
from support.seeds import test_seed

from kvscout_common.hashing import native_available
from kvscout_scheduler.costs.choose import choose
from kvscout_scheduler.costs.cost import BlockFormat, ScoreInputs
from kvscout_scheduler.costs.time_cost import TimeCostInputs, TimeRow
from kvscout_scheduler.load.active_load import ActiveLoad, Allocation, ReferenceLoad
from kvscout_scheduler.values.overlaps import NO_OVERLAPS, AnyOverlaps, Overlaps, TierWeights
from kvscout_scheduler.values.request import pack_hashes

BLOCK_FORMAT = BlockFormat(16, eagle=False)
IDS = ("a", "b", "c")


@pytest.fixture(params=backends())
def load(request: pytest.FixtureRequest) -> ActiveLoad:
    make: MakeLoad = request.param
    return arranged(make())


def arranged(made: ActiveLoad, workers: int = 3) -> ActiveLoad:
    """One rank of each worker, a at slot 0."""
    made.ensure_slot(workers - 1)
    made.arrange({(chr(ord("a") + slot), 0): slot for slot in range(workers)}, range(workers))
    return made


def device(*blocks: int) -> Overlaps:
    return Overlaps(IDS[: len(blocks)], (), blocks)


def test_s1_worked_example(load: ActiveLoad) -> None:
    for slot, (prefill, decode) in enumerate([(8, 10), (5, 5), (2, 9)]):
        load.add(slot, BLOCK_FORMAT, b"", private_blocks=decode - 1, prefill_tokens=(prefill - 1) * 16)
    asked = ScoreInputs(BLOCK_FORMAT, b"", 16)
    assert list(load.score(asked, NO_OVERLAPS, None).costs) == [18, 10, 11]
    assert list(load.score(asked._replace(overlap_score_weight=2.0), NO_OVERLAPS, None).costs) == [26, 15, 13]
    assert list(load.score(asked._replace(scale=2.0), NO_OVERLAPS, 0b101).costs) == [36, 22]


def test_s1_weight_zero_is_pure_decode_load(load: ActiveLoad) -> None:
    load.add(0, BLOCK_FORMAT, b"", private_blocks=3, prefill_tokens=10**9)
    scores = load.score(ScoreInputs(BLOCK_FORMAT, b"", 16, overlap_score_weight=0.0), device(1), 0b11)
    assert list(scores.costs) == [4, 1]
    assert scores.overlap(0) == (1, 0)


def test_prefill_is_what_is_active_and_what_is_not_cached(load: ActiveLoad) -> None:
    load.add(1, BLOCK_FORMAT, b"", prefill_tokens=40)
    asked = ScoreInputs(BLOCK_FORMAT, b"", 100)
    assert list(load.score(asked, device(2, 0, 99), None).prefill_tokens) == [68, 140, 0]
    elsewhere = load.score(asked._replace(charge_prefill=False), device(2), None)
    assert list(elsewhere.prefill_tokens) == [0, 40, 0]


def test_decode_counts_blocks_that_are_active_already_once(load: ActiveLoad) -> None:
    load.add(0, BLOCK_FORMAT, pack_hashes([1, 2, 3]), private_blocks=1)
    scores = load.score(ScoreInputs(BLOCK_FORMAT, pack_hashes([1, 2, 9]), 50), NO_OVERLAPS, 0b11)
    assert list(scores.decode_blocks) == [6, 4]


@pytest.mark.parametrize("make", backends())
def test_blocks_that_are_not_tracked_cost_nothing(make: MakeLoad) -> None:
    made = arranged(make(track_blocks=False))
    made.add(0, BLOCK_FORMAT, pack_hashes([1, 2, 3]))
    assert list(made.score(ScoreInputs(BLOCK_FORMAT, pack_hashes([1]), 50), NO_OVERLAPS, None).decode_blocks) == [
        0,
        0,
        0,
    ]


def test_slower_tiers_are_worth_less(load: ActiveLoad) -> None:
    overlaps = Overlaps(("a",), (), (2,), (4,), (5,), (9,))
    assert overlaps.effective(0.75, 0.25) == [2 + 0.75 * 2 + 0.25 * (1 + 4)]
    assert load.score(ScoreInputs(BLOCK_FORMAT, b"", 160), overlaps, None).overlap(0) == (2, 4.75)


def test_a_prediction_counts_where_it_reaches_further_than_the_device(load: ActiveLoad) -> None:
    overlaps = Overlaps(("a", "b"), (), (2, 3), (4, 4), predicted_blocks=(5, 3))
    assert overlaps.device() == [5, 3]
    assert overlaps.effective(0.75, 0.25) == [5, 3.75]
    scores = load.score(ScoreInputs(BLOCK_FORMAT, b"", 160), overlaps, None)
    assert list(scores.device_blocks) == [5, 3, 0]
    assert list(scores.effective_blocks) == [5, 3.75, 0]


def test_the_last_row_of_a_worker_holds_and_strangers_are_left_out(load: ActiveLoad) -> None:
    overlaps = Overlaps(("b", "nobody", "b", "a"), (0, 0, 0, 1), (1, 2, 3, 4))
    assert list(load.score(ScoreInputs(BLOCK_FORMAT, b"", 160), overlaps, None).device_blocks) == [0, 3, 0]


def test_seconds_follow_from_the_rows_of_workers_and_one_without_a_row_is_an_error(load: ActiveLoad) -> None:
    busy = TimeRow(behind=0.5, due_at=3.0, pace=2.0, used=0.5, prefills=2.0, room=44.0, decode_pace=3.0)
    busy = busy._replace(decoding=4.0, contexts_0=90.0, requests_0=2.0, contexts_4=50.0, requests_4=0.5)
    rows = (TimeRow(), busy)
    stages = (1e-4, 0.0, 0.0, 0.0, 1e-3)
    question = TimeCostInputs(array("d", chain(*rows)), array("I", [0, 1]), 2.0, 1.0, 0.001, 0.5, 0.0, 0.0, 0.2, stages)
    scores = load.score(ScoreInputs(BLOCK_FORMAT, b"", 100), device(2, 1), 0b11)
    # 1.5 s are ahead; its own 84 ms, and half of the 40 that evict others, count twice for the pace, and 2.2 times for
    # the crowd and 0.2 times for the four that decode. The first stage of its output has 90 + 2 · 100 tokens of context
    # beside it, the last one 50 + 50.
    decode = 3 * (0.2 + 0.029 + 0.1)
    assert list(scores.seconds(question)) == pytest.approx([0.268, 1.5 + 2.4 * 2 * (0.084 + 0.020) + decode])
    alone = load.score(ScoreInputs(BLOCK_FORMAT, b"", 100), device(2, 1), 0b10)
    # Two wait even where the fewest do: each of them waits for it three times.
    assert list(alone.seconds(question)) == pytest.approx([1.5 + (2.4 + 6) * 2 * (0.084 + 0.020) + decode])
    # What would be used again counts for the 40 that evict it, beside the half for the room that others have.
    again = question._replace(table=array("d", chain(TimeRow(), busy._replace(reuse=0.25))))
    assert list(scores.seconds(again))[1] == pytest.approx(1.5 + 2.4 * 2 * (0.084 + 0.030) + decode)
    # Half of the 48 tokens that are popular and not there is paid by others.
    popular = question._replace(popular_tokens=80.0, popular_discount=0.5)
    assert next(iter(scores.seconds(popular))) == pytest.approx(0.268 - 0.024)
    with pytest.raises(IndexError):
        load.score(ScoreInputs(BLOCK_FORMAT, b"", 100), device(2), None).seconds(question)


@pytest.mark.skipif(not native_available(), reason="the extension is not built: there is nothing to compare")
def test_both_backends_give_equal_numbers_whatever_is_asked() -> None:
    from kvscout_scheduler.load.native import NativeLoad

    rng = Random(test_seed())
    pair: list[ActiveLoad] = [arranged(ReferenceLoad(), 6), arranged(NativeLoad(), 6)]
    active: list[list[Allocation]] = []
    for _ in range(1500):
        block_format = BlockFormat(rng.choice((16, 24)), eagle=rng.random() < 0.2)
        if active and rng.random() < 0.45:
            for made, allocation in zip(pair, active.pop(rng.randrange(len(active))), strict=True):
                made.remove(allocation)
        else:
            hashes, slot = pack_hashes(rng.choices((1, 2), k=rng.randrange(9))), rng.randrange(6)
            private, prefill = rng.randrange(3), rng.randrange(500)
            active.append(
                [made.add(slot, block_format, hashes, private_blocks=private, prefill_tokens=prefill) for made in pair]
            )
        question = ScoreInputs(
            block_format,
            pack_hashes(rng.choices((1, 2), k=rng.randrange(9))),
            rng.randrange(1, 300),
            rng.choice((0.0, 1.0, 0.3, 7.7)),
            TierWeights(rng.random(), rng.random()),
            charge_prefill=rng.random() < 0.8,
            scale=rng.choice((1.0, 1.5)),
        )
        overlaps = random_overlaps(rng)
        slots = None if rng.random() < 0.5 else rng.randrange(1, 2**6)
        reference, native = (made.score(question, overlaps, slots) for made in pair)
        for column in COLUMNS:
            assert list(getattr(reference, column)) == list(getattr(native, column)), column
        seed = rng.random()
        temperature = rng.choice((0.0, 0.1, 0.5, 3.0))
        picks = [choose(scores.costs, temperature, Random(seed)) for scores in (reference, native)]
        assert picks[0] == picks[1]
        assert reference.overlap(picks[0]) == native.overlap(picks[0])


def random_overlaps(rng: Random) -> AnyOverlaps:
    rows = rng.randrange(8)
    if not rows:
        return NO_OVERLAPS

    def above(column: list[int]) -> list[int]:
        return [blocks + rng.randrange(3) for blocks in column]

    device_blocks = faster = [rng.randrange(9) for _ in range(rows)]
    slower: list[list[int]] = []
    for _ in range(3):
        slower.append(above(faster) if rng.random() < 0.5 else [])
        faster = slower[-1] or faster
    ids = [rng.choice("abcdefgh") for _ in range(rows)]
    predicted = above(device_blocks) if rng.random() < 0.5 else []
    ranks = [rng.randrange(2) for _ in range(rows)] if rng.random() < 0.5 else []
    host, disk, external = slower
    made = Overlaps(ids, ranks, device_blocks, host, disk, external, predicted)
    made.validate(1000)
    return made
