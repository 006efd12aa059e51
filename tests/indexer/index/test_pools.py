"""Which index a worker belongs to and which one a query means."""

from __future__ import annotations

import pytest
from support.cpu_cost import cpu_ratio

from kvscout_blocks.index.backend import make_index, make_queries
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common.errors import FailedPrecondition, InvalidArgument, NotFound
from kvscout_common.worker import Adapter, CopyMode, PoolKey, WorkerRank, WorkerSpec
from kvscout_indexer.index.pools import Pools


@pytest.fixture
def pools() -> Pools:
    return Pools(lambda pool: ReferenceIndex(pool.block_size, pool.eagle))


def spec(worker_id: str = "w", *, model: str = "m", block_size: int = 16, **fields: object) -> WorkerSpec:
    return WorkerSpec(worker_id, model, block_size, **fields)  # type: ignore[arg-type]  # fields of a worker


def test_the_workers_of_one_pool_share_an_index(pools: Pools) -> None:
    first = pools.add(spec("w1", dp_size=2))
    assert pools.add(spec("w2")) is first
    assert first.workers() == (WorkerRank("w1", 0), WorkerRank("w1", 1), WorkerRank("w2", 0))
    assert pools.by_key() == [(PoolKey("m", "default", 16, False), first)]


def test_models_tenants_block_sizes_and_eagle_keep_apart(pools: Pools) -> None:
    specs = [
        spec("a"),
        spec("b", model="n"),
        spec("c", tenant="t"),
        spec("d", block_size=32),
        spec("e", eagle=True),
    ]
    assert len({id(pools.add(each)) for each in specs}) == 5
    assert [key for key, _ in pools.by_key()] == sorted(each.pool for each in specs)


def test_an_index_goes_with_its_last_worker(pools: Pools) -> None:
    pools.add(spec("w1"))
    index = pools.add(spec("w2"))
    pools.remove(spec("w1"))
    assert pools.of(spec("w2")) is index
    pools.remove(spec("w2"))
    assert pools.by_key() == []
    assert pools.add(spec("w1")) is not index


def test_a_rank_can_be_dropped_alone(pools: Pools) -> None:
    index = pools.add(spec(dp_size=3))
    pools.drop_rank(spec(dp_size=3), WorkerRank("w", 1))
    assert index.workers() == (WorkerRank("w", 0), WorkerRank("w", 2))


def test_the_index_is_given_adapters_copies_and_capacity() -> None:
    options = WorkerOptions.of(
        spec(adapters=(Adapter("x", 3), Adapter("unnumbered")), copies=CopyMode.SET, total_kv_blocks=9)
    )
    assert (options.adapters, options.copies, options.total_kv_blocks) == ({3: "x"}, CopyMode.SET, 9)


def test_a_query_need_not_name_what_is_the_only_one(pools: Pools) -> None:
    index = pools.add(spec())
    for block_size in (None, 16):
        for eagle in (None, False):
            assert pools.find("default", "m", block_size, eagle) == (PoolKey("m", "default", 16, False), index)


def test_a_model_without_workers_now_matches_nothing_and_one_never_seen_is_an_error(pools: Pools) -> None:
    pools.add(spec())
    pools.remove(spec())
    assert pools.find("default", "m", None, None) is None
    with pytest.raises(NotFound, match="'other'"):
        pools.find("default", "other", None, None)
    with pytest.raises(NotFound, match="'t'"):
        pools.find("t", "m", None, None)


def test_an_empty_model_and_a_block_size_of_zero_are_refused(pools: Pools) -> None:
    pools.add(spec())
    for model, block_size, field in (("", 16, "model"), ("m", 0, "block_size")):
        with pytest.raises(InvalidArgument) as refused:
            pools.find("default", model, block_size, None)
        assert refused.value.field == field


def test_a_query_that_fits_no_index_or_several_says_what_there_is(pools: Pools) -> None:
    pools.add(spec("a", block_size=16))
    pools.add(spec("b", block_size=32))
    pools.add(spec("c", block_size=32, eagle=True))
    with pytest.raises(FailedPrecondition, match=r"name one: 16, 32, 32 \(eagle\)"):
        pools.find("default", "m", None, None)
    with pytest.raises(FailedPrecondition, match="block size 64 was requested"):
        pools.find("default", "m", 64, None)
    with pytest.raises(FailedPrecondition, match=r"block size 16 \(eagle\) was requested"):
        pools.find("default", "m", 16, True)
    found = pools.find("default", "m", 32, True)
    assert found is not None
    assert found[0].eagle


def test_a_model_is_known_in_any_tenant_if_in_one(pools: Pools) -> None:
    pools.add(spec(tenant="t"))
    pools.require_model("*", "m")
    pools.require_model("*", "")
    with pytest.raises(NotFound):
        pools.require_model("*", "other")
    with pytest.raises(NotFound):
        pools.require_model("default", "m")


def test_what_concerns_one_worker_costs_the_same_however_many_there_are() -> None:
    works = []
    for workers in (500, 5_000):
        pools = Pools(lambda pool: make_index(pool.block_size, pool.eagle), make_queries())
        for number in range(workers):
            pools.add(spec(f"w{number}", dp_size=2))
            pools.set_incomplete(spec().pool, WorkerRank(f"w{number}", 0), incomplete=True)

        def work(pools: Pools = pools) -> None:
            for number in range(100):
                one = spec(f"w{number}", dp_size=2)
                pools.set_incomplete(one.pool, one.ranks[1], incomplete=True)
                pools.set_incomplete(one.pool, one.ranks[1], incomplete=False)
                pools.remove(one)
                pools.add(one)

        work()
        assert len(pools.incomplete(spec().pool)) == workers
        works.append(work)
    assert cpu_ratio(*works) <= 2
