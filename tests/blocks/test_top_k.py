"""Few rows for many workers say what all rows say, or that they do not; an answer does not grow with the ranks."""

from __future__ import annotations

import random

import pytest
from support.cpu_cost import cpu_ratio
from support.seeds import test_seed

from kvscout.v1 import indexer_pb2
from kvscout_blocks.bytes.events import EventBatch, Stored
from kvscout_blocks.index.backend import make_index, make_queries
from kvscout_blocks.index.block_index import Overlap, Overlaps, WorkerOptions
from kvscout_blocks.index.native import NativeQueries
from kvscout_blocks.index.top_k import top_k
from kvscout_common.hashing import native_available
from kvscout_common.rank_sets import rank_set
from kvscout_common.worker import PoolKey, WorkerRank

NONE = Overlap(0, 0, 0, 0, 0)
POOL = PoolKey("m", "default", 16, False)
SYSTEM = [7 * number for number in range(1, 65)]
SESSION = [11 * number for number in range(1, 65)]


def columns(rows: dict[WorkerRank, Overlap]) -> Overlaps:
    return Overlaps(tuple(rows), *zip(*rows.values(), strict=True)) if rows else Overlaps()


def test_every_rank_without_a_row_has_what_is_said_of_all_of_them() -> None:
    seed = test_seed()
    rng = random.Random(seed)
    seen = {True: 0, False: 0}
    for _ in range(2_000):
        everyone = [WorkerRank(f"w{number}", rank) for number in range(rng.randrange(1, 8)) for rank in range(2)]
        kinds = [NONE, *(Overlap(*(rng.randrange(1, 4) for _ in range(5))) for _ in range(3))]
        truth = {worker: rng.choice(kinds) for worker in everyone}
        found = {worker: row for worker, row in truth.items() if row != NONE}
        most = rng.randrange(1, 10)
        incomplete = set(rng.sample(everyone, rng.randrange(3)))
        shown, common = top_k(columns(found), most, everyone, incomplete)
        rows = shown.by_worker()
        rest = [truth[worker] for worker in everyone if worker not in rows]
        assert len(rows) <= most, seed
        assert all(truth[worker] == row for worker, row in rows.items()), seed
        assert common.ranks == len(rest), seed
        assert common.digest == rank_set(everyone).digest, seed
        if common.exact:
            assert set(rest) <= {common.overlap}, seed
            # Whose row may be too short has it, if there is room, so that the others' are known to be right.
            kept = incomplete & found.keys()
            assert kept <= rows.keys() or len(rows.keys() | kept) > most, seed
        else:
            assert common.overlap == Overlap(*map(min, zip(*rest, strict=True))), seed
            # Nobody without a row has more, and nothing else could have been said with so few rows.
            assert max(rest) <= min(rows.values()), seed
            assert all(len(everyone) - list(truth.values()).count(kind) > most for kind in truth.values()), seed
        seen[common.exact] += 1
    assert min(seen.values()) > 100, (seed, seen)


@pytest.mark.skipif(not native_available(), reason="the reference makes all rows first")
def test_an_answer_under_a_shared_system_prompt_is_small_however_many_ranks_there_are() -> None:
    answers = {}
    for ranks in (2_000, 16_000):
        queries = _fleet(ranks)
        answer = indexer_pb2.FindMatchesResponse.FromString(_answer(queries, top_k=64))
        assert answer.overlaps.others.exact
        assert (answer.overlaps.others.ranks, answer.overlaps.others.device_blocks) == (ranks - 50, len(SYSTEM))
        assert len(answer.overlaps.worker_ids) == 50
        assert min(answer.overlaps.device_blocks) > len(SYSTEM)
        answers[ranks] = answer.ByteSize()
        # A row each says the same.
        rows = indexer_pb2.FindMatchesResponse.FromString(_answer(queries)).overlaps
        longer = [blocks for blocks in rows.device_blocks if blocks > len(SYSTEM)]
        assert sorted(longer) == sorted(answer.overlaps.device_blocks)
        assert len(rows.worker_ids) == ranks
    assert answers[16_000] <= answers[2_000] + 16 <= 8_000


@pytest.mark.skipif(not native_available(), reason="the reference makes all rows first")
def test_few_rows_cost_less_than_a_quarter_of_a_row_each() -> None:
    queries = _fleet(16_000)

    def some() -> None:
        _answer(queries, top_k=64)

    def every() -> None:
        _answer(queries)

    assert cpu_ratio(every, some) <= 0.25


def _answer(queries: NativeQueries, *, top_k: int = 0) -> bytes:
    request = indexer_pb2.FindMatchesRequest(model="m", block_hashes=SYSTEM + SESSION, top_k=top_k)
    answer = queries.answer(request.SerializeToString(), now=0.0, caller_tenant="*")
    assert answer is not None
    return answer


def _fleet(ranks: int) -> NativeQueries:
    """Ranks that all have the system prompt; 50 of them some of a session behind it."""
    index, queries = make_index(16), make_queries()
    assert queries is not None
    queries.set_pool(POOL, index)
    for number in range(ranks):
        rank = WorkerRank(f"w-{number // 8:05d}", number % 8)
        index.add_worker(rank, WorkerOptions())
        further = number * 50 // ranks + 1 if number % (ranks // 50) == 0 else 0
        blocks = tuple(SYSTEM + SESSION[:further])
        index.apply(rank, EventBatch((Stored(blocks, None, block_size=16, local_hashes=blocks),)))
    return queries
