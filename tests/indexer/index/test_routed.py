"""Predictions from routing decisions, over both implementations of the index."""

from collections.abc import Callable

import pytest

from kvscout_blocks.index.backend import make_index
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common.errors import FailedPrecondition, NotFound
from kvscout_common.registry.registry import Registry
from kvscout_common.shards import Shard
from kvscout_common.worker import PoolKey, WorkerRank, WorkerSpec
from kvscout_indexer.index.cache_evidence import CacheEvidence, Finding, Missed
from kvscout_indexer.index.pools import Pools
from kvscout_indexer.index.routed import RoutedPrompt, RoutedPrompts

TTL = 10.0


class World:
    """A registry, the indexes of its workers, and a clock."""

    def __init__(self, make: Callable[[PoolKey], BlockIndex], **options: object) -> None:
        self.now = 100.0
        self.registry = Registry(lambda: self.now)
        self.pools = Pools(make)
        settings: dict[str, object] = {"ttl_seconds": TTL, **options}
        self.routed = RoutedPrompts(self.registry, self.pools, clock=lambda: self.now, **settings)  # type: ignore[arg-type]

    def register(self, worker_id: str, **fields: object) -> None:
        spec = WorkerSpec(worker_id=worker_id, model="m", **{"block_size": 4, **fields})  # type: ignore[arg-type]
        self.registry.register(spec)
        self.pools.add(spec)

    def predicted(self, worker_id: str, hashes: bytes, block_size: int = 4) -> int:
        index = self.pools.get(PoolKey("m", "default", block_size, False))
        assert index is not None
        row = index.find_matches(hashes, now=self.now).by_worker().get(WorkerRank(worker_id, 0))
        assert row is None or row.device == 0
        return row.predicted if row else 0


def packed(*hashes: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in hashes)


def prompt(worker_id: str, *hashes: int, **fields: object) -> RoutedPrompt:
    return RoutedPrompt(WorkerRank(worker_id, 0), packed(*hashes), **fields)  # type: ignore[arg-type]


@pytest.fixture(params=["reference", "whatever is built"])
def make(request: pytest.FixtureRequest) -> Callable[[PoolKey], BlockIndex]:
    if request.param == "reference":
        return lambda pool: ReferenceIndex(pool.block_size, pool.eagle, max_predicted_blocks=100)
    return lambda pool: make_index(pool.block_size, pool.eagle, max_predicted_blocks=100)


async def test_a_decision_predicts_its_blocks_until_its_time_is_over(make: Callable[[PoolKey], BlockIndex]) -> None:
    world = World(make)
    world.register("w0")
    assert await world.routed.record("default", "m", [prompt("w0", 1, 2, 3)]) == (3, ())
    assert world.predicted("w0", packed(1, 2, 9)) == 2
    world.now += TTL * 0.6
    assert await world.routed.record("default", "m", [prompt("w0", 1, 2)]) == (0, ())
    world.now += TTL * 0.6
    assert world.predicted("w0", packed(1, 2, 3)) == 2  # the third was not used again
    world.now += TTL
    assert world.predicted("w0", packed(1, 2, 3)) == 0


async def test_above_the_maximum_the_soonest_to_expire_go_first(make: Callable[[PoolKey], BlockIndex]) -> None:
    world = World(make)
    world.register("w0")
    for start in range(0, 110, 10):
        world.now += 0.1
        await world.routed.record("default", "m", [prompt("w0", *range(1_000 + start, 1_010 + start))])
    left = [world.predicted("w0", packed(*range(1_000 + start, 1_010 + start))) for start in range(0, 110, 10)]
    assert sum(left) == 80
    assert left == [0, 0, 0] + [10] * 8


async def test_what_cannot_be_recorded_costs_itself_only(make: Callable[[PoolKey], BlockIndex]) -> None:
    world = World(make)
    world.register("w0")
    world.register("big", block_size=8)
    prompts = [
        prompt("nobody", 1),
        prompt("w0", 1, 2, block_size=4, eagle=False),
        prompt("w0", 1, block_size=16),
        prompt("big", 5, block_size=8),
        prompt("big", 5, eagle=True),
        RoutedPrompt(WorkerRank("w0", 1), packed(1)),
        prompt("w0"),
    ]
    assert await world.routed.record("default", "m", prompts) == (3, (0, 2, 4, 5))
    assert (world.predicted("w0", packed(1, 2)), world.predicted("big", packed(5), block_size=8)) == (2, 1)
    assert (world.routed.recorded, world.routed.refused) == (3, 4)
    for tenant, model in (("default", "another"), ("else", "m")):
        with pytest.raises(NotFound):
            await world.routed.record(tenant, model, [prompt("w0", 1)])
    with pytest.raises(FailedPrecondition, match="worker 'big' have 8 tokens, those of the prompt 16"):
        await world.routed.record("default", "m", [prompt("big", 1, block_size=16), prompt("nobody", 1)])


async def test_workers_of_other_shards_are_refused(make: Callable[[PoolKey], BlockIndex]) -> None:
    world = World(make, shard=Shard(0, 2))
    world.register("w0")
    world.register("w1")  # of shard 1
    with pytest.raises(FailedPrecondition, match="not of shard 0/2"):
        await world.routed.record("default", "m", [prompt("w1", 1)])
    assert await world.routed.record("default", "m", [prompt("w1", 1), prompt("w0", 1)]) == (1, (0,))


async def test_without_predictions_every_decision_is_refused(make: Callable[[PoolKey], BlockIndex]) -> None:
    world = World(make, ttl_seconds=None)
    world.register("w0")
    with pytest.raises(FailedPrecondition, match="--router-predicted-ttl"):
        await world.routed.record("default", "m", [prompt("w0", 1)])
    assert world.predicted("w0", packed(1)) == 0


async def test_a_worker_that_comes_back_starts_with_nothing_predicted(make: Callable[[PoolKey], BlockIndex]) -> None:
    world = World(make)
    world.register("w0")
    await world.routed.record("default", "m", [prompt("w0", 1, 2)])
    world.pools.remove(world.registry.get("default", "w0").spec)
    world.registry.remove("default", "w0")
    world.register("w0")
    assert world.predicted("w0", packed(1, 2)) == 0


async def test_evidence_about_a_cache_goes_to_its_judge_a_rank_at_a_time_and_predicts_nothing() -> None:
    judged: list[tuple[str, WorkerRank, list[Missed]]] = []
    world = World(
        lambda pool: ReferenceIndex(pool.block_size, pool.eagle),
        ttl_seconds=None,
        judge=lambda spec, rank, evidence: judged.append((spec.worker_id, rank, evidence)),
    )
    world.register("w0")
    world.register("w1")
    emptied = CacheEvidence(Finding.EMPTIED, 1, intact_event_id=5)
    prompts = [
        prompt(worker, *hashes, evidence=emptied) for worker, hashes in (("w0", (1, 2)), ("w1", (3,)), ("w0", ()))
    ]
    assert await world.routed.record("default", "m", prompts) == (0, ())
    w0, w1 = WorkerRank("w0", 0), WorkerRank("w1", 0)
    assert judged == [
        ("w0", w0, [Missed(packed(1, 2), emptied), Missed(b"", emptied)]),
        ("w1", w1, [Missed(packed(3), emptied)]),
    ]
    with pytest.raises(NotFound):
        await world.routed.record("default", "m", [prompt("w9", 1, evidence=emptied)])
