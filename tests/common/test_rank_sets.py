"""Sets of worker ranks are equal where the ranks are, whoever counts them."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from kvscout_blocks.index.backend import make_index, make_queries
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_common.rank_sets import RankSet, rank_set
from kvscout_common.worker import PoolKey, WorkerRank

RANKS = [WorkerRank("w-0", 0), WorkerRank("w-0", 1), WorkerRank("wörker", 70_000)]


def test_a_set_is_a_number_and_a_sum_of_hashes_whatever_the_order() -> None:
    assert rank_set([]) == RankSet(0, 0)
    hashes = [xxh3_64_intdigest(rank.worker_id.encode(), rank.dp_rank) for rank in RANKS]
    assert rank_set(RANKS) == rank_set(reversed(RANKS)) == RankSet(3, sum(hashes) % 2**64)


def test_an_index_has_the_set_of_the_ranks_that_are_in_it() -> None:
    pool, index, queries = PoolKey("m", "default", 16, False), make_index(16), make_queries()
    if queries is None:
        assert rank_set(index.workers()) == RankSet()  # the reference counts them when asked
        return
    queries.set_pool(pool, index)
    for here in (RANKS, RANKS[1:], [*RANKS[1:], RANKS[0]], []):
        for rank in RANKS:
            if rank in here and rank not in index.workers():
                index.add_worker(rank, WorkerOptions())
            elif rank not in here:
                index.remove_rank(rank)
        found = queries.find(pool, bytes(8), 0, top_k=1, now=0.0)
        assert found is not None
        assert found[3] == rank_set(here)
