"""What an indexer is told of ranks whose engines emptied their caches without an event."""

from typing import Any

from kvscout.v1 import indexer_pb2, types_pb2
from kvscout_common.worker import WorkerRank
from kvscout_gateway.upstreams.indexer.emptied_caches import TRIES, EmptiedCaches
from kvscout_gateway.values.cache_reports import (
    HASH_BYTES,
    LATEST,
    PROVEN,
    SURPRISES,
    SUSPECT,
    CacheReports,
    Miss,
)

KEY = ("default", WorkerRank("w", 1))


class World:
    """One rank and one indexer, as their answers show them."""

    def __init__(self) -> None:
        self.reports = CacheReports()
        self.caches = EmptiedCaches(self.reports)
        for _ in range(PROVEN):
            self.report(8, 8, 0.0)

    def report(self, predicted: int, cached: int, sent_at: float) -> None:
        miss = Miss((1).to_bytes(HASH_BYTES, "little") * predicted, 0, 16, eagle=False)
        self.reports.add(KEY, predicted=miss, confirmed=True, reported_blocks=cached, sent_at=sent_at)

    def told(self, now: float, event_id: int, **fields: Any) -> list[indexer_pb2.RoutedPrompt]:
        source = indexer_pb2.SourceStatus(
            worker=types_pb2.WorkerRank(worker_id="w", dp_rank=1),
            tenant="default",
            model="m",
            last_event_id=event_id,
            **{"state": indexer_pb2.SOURCE_STATE_LIVE, **fields},
        )
        other = indexer_pb2.SourceStatus(worker=types_pb2.WorkerRank(worker_id="other"), tenant="default")
        messages = self.caches.judge([other, source], now)
        assert all((message.tenant, message.model) == ("default", "m") for message in messages)
        return [prompt for message in messages for prompt in message.prompts]


def test_a_suspect_rank_is_reported_with_its_misses_and_an_event_before_the_last_hit() -> None:
    world = World()
    assert world.told(10.0, 7) == world.told(12.0, 9) == []
    world.report(8, 8, 12.5)
    assert world.told(12.8, 12) == []
    for number in range(SUSPECT):
        world.report(8, 3, 13.0 + number)
    prompts = world.told(20.0, 40)
    assert len(prompts) == SUSPECT
    for prompt in prompts:
        assert (prompt.worker.worker_id, prompt.worker.dp_rank, prompt.block_size) == ("w", 1, 16)
        assert list(prompt.block_hashes) == [1] * 8
        assert prompt.evidence == indexer_pb2.CacheEvidence(
            finding=indexer_pb2.CACHE_FINDING_EMPTIED, cached_blocks=3, intact_event_id=9
        )


def test_without_an_earlier_reading_the_oldest_position_counts() -> None:
    world = World()
    assert world.told(8.0, 5) == world.told(9.0, 6) == []
    for _ in range(SUSPECT):
        world.report(8, 0, 9.5)
    assert world.told(10.0, 7)[0].evidence.intact_event_id == 5


def test_a_rank_that_the_events_acquit_is_reported_a_few_times_and_forgiven() -> None:
    world = World()
    for _ in range(SUSPECT):
        world.report(8, 0, 5.0)
    assert [bool(world.told(10.0 + number, 7)) for number in range(TRIES + 2)] == [True] * TRIES + [False] * 2


def test_a_rank_whose_events_are_incomplete_is_not_suspected() -> None:
    world = World()
    for _ in range(SUSPECT):
        world.report(8, 0, 5.0)
    assert world.told(10.0, 7, state=indexer_pb2.SOURCE_STATE_INCOMPLETE) == []


def test_a_fence_ends_when_the_requests_after_it_had_no_more_than_is_known() -> None:
    world, fence = World(), {"state": indexer_pb2.SOURCE_STATE_INCOMPLETE, "fenced": True}
    assert world.told(20.0, 7, **fence) == []
    for number in range(LATEST - 1):
        world.report(8, 8, 21.0 + number)
    assert world.told(50.0, 8, **fence) == []
    world.report(8, 8, 50.0)
    (prompt,) = world.told(51.0, 9, **fence)
    assert prompt.evidence.finding == indexer_pb2.CACHE_FINDING_AGREES
    assert not prompt.block_hashes


def test_a_fence_is_wrong_when_the_engine_has_more() -> None:
    world, fence = World(), {"state": indexer_pb2.SOURCE_STATE_INCOMPLETE, "fenced": True}
    world.report(0, 8, 10.0)
    assert world.told(20.0, 7, **fence) == []
    for _ in range(SURPRISES):
        assert world.told(22.0, 7, **fence) == []
        world.report(0, 8, 21.0)
    assert [prompt.evidence.finding for prompt in world.told(23.0, 8, **fence)] == [indexer_pb2.CACHE_FINDING_KEPT]
