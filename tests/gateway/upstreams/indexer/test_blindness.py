"""Which workers an indexer is told to have served: those whose events it should have heard of."""

from typing import Any

import pytest

from kvscout.v1 import indexer_pb2, types_pb2, workers_pb2
from kvscout_common.worker import WorkerRank
from kvscout_gateway.engines.observation import EVENTFUL_KEPT, Observations
from kvscout_gateway.upstreams.indexer.blindness import BlindRanks

WAITING = indexer_pb2.SOURCE_STATE_WAITING


class World:
    """An indexer as its answers show it, and what this gateway has seen."""

    def __init__(self) -> None:
        self.observations = Observations(lambda tenant, worker_id: "m")
        self.ranks = BlindRanks(self.observations.eventful, self.observations.reports_cached_tokens)

    def serve(self, *dispatched_at: float, worker_id: str = "w", dp_rank: int = 0) -> None:
        self.observations.of("default", WorkerRank(worker_id, dp_rank)).eventful.extend(dispatched_at)

    def told(self, now: float, *sources: indexer_pb2.SourceStatus) -> dict[tuple[str, str, int], int]:
        """Prompts by model, worker and rank."""
        counts: dict[tuple[str, str, int], int] = {}
        for message in self.ranks.judge(sources, now):
            assert message.tenant == "default"
            for prompt in message.prompts:
                assert not prompt.block_hashes
                key = message.model, prompt.worker.worker_id, prompt.worker.dp_rank
                counts[key] = counts.get(key, 0) + 1
        return counts


def source(
    opened_at: float, now: float, worker_id: str = "w", dp_rank: int = 0, **fields: Any
) -> indexer_pb2.SourceStatus:
    fields = {"state": WAITING, "model": "m", "tenant": "default", "open_seconds": now - opened_at, **fields}
    return indexer_pb2.SourceStatus(worker=types_pb2.WorkerRank(worker_id=worker_id, dp_rank=dp_rank), **fields)


def test_a_request_is_told_once_its_events_had_the_time_between_two_questions() -> None:
    world = World()
    assert world.told(10.0, source(5.0, 10.0)) == {}
    world.serve(12.0, 13.0)
    assert world.told(40.0, source(5.0, 40.0)) == {}
    world.serve(50.0)
    assert world.told(70.0, source(5.0, 70.0)) == {("m", "w", 0): 2}
    # As long as the indexer has not heard it, it is told anew.
    assert world.told(100.0, source(5.0, 100.0)) == {("m", "w", 0): 3}
    assert world.told(130.0, source(5.0, 130.0, state=indexer_pb2.SOURCE_STATE_BLIND, reason="why")) == {}
    assert world.ranks.blind == {("default", WorkerRank("w", 0)): "why"}
    assert world.told(160.0, source(5.0, 160.0, state=indexer_pb2.SOURCE_STATE_LIVE)) == {}
    assert world.ranks.blind == {}


def test_what_was_served_before_the_indexer_listened_says_nothing() -> None:
    world = World()
    world.serve(1.0, 2.0, 12.0)
    assert world.told(20.0, source(10.0, 20.0)) == {}
    assert world.told(50.0, source(10.0, 50.0)) == {("m", "w", 0): 1}
    # It has restarted.
    assert world.told(80.0, source(60.0, 80.0)) == {}
    assert world.told(110.0, source(60.0, 110.0)) == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"state": indexer_pb2.SOURCE_STATE_NONE},
        {"state": indexer_pb2.SOURCE_STATE_LIVE},
        {"state": indexer_pb2.SOURCE_STATE_DISCONNECTED},
        {"state": indexer_pb2.SOURCE_STATE_REPLAYING},
        {"state": indexer_pb2.SOURCE_STATE_INCOMPLETE, "last_event_id": 3},
        {"open_seconds": None},
    ],
)
def test_only_sources_that_were_never_heard_are_told_of(fields: dict[str, Any]) -> None:
    """The last one is of an indexer that does not say since when it listens: it knows nothing of blindness."""
    world = World()
    world.serve(1.0)
    for now in (10.0, 20.0, 30.0):
        assert world.told(now, source(0.0, now, **fields)) == {}


def test_an_engine_that_does_not_even_open_its_socket_was_not_heard_either() -> None:
    world = World()
    zmq = workers_pb2.EVENT_TRANSPORT_ZMQ
    nobody: dict[str, Any] = {"state": indexer_pb2.SOURCE_STATE_DISCONNECTED, "transport": zmq}
    world.serve(12.0)
    assert world.told(20.0, source(5.0, 20.0, **nobody)) == {}
    assert world.told(50.0, source(5.0, 50.0, **nobody)) == {("m", "w", 0): 1}


def test_a_publisher_that_never_answered_was_not_heard_either() -> None:
    world = World()
    world.serve(1.0)
    sources = [source(0.0, now, state=indexer_pb2.SOURCE_STATE_INCOMPLETE) for now in (40.0, 50.0)]
    assert world.told(40.0, sources[0]) == {}
    assert world.told(50.0, sources[1]) == {("m", "w", 0): 1}


def test_ranks_and_models_are_told_apart_and_the_number_is_bounded() -> None:
    world = World()
    world.serve(*(float(at) for at in range(1, 1_000)), worker_id="busy")
    world.serve(1.0, dp_rank=1)

    def sources(now: float) -> list[indexer_pb2.SourceStatus]:
        return [
            source(0.0, now, dp_rank=0),
            source(0.0, now, dp_rank=1),
            source(0.0, now, "busy", model="n"),
            source(0.0, now, "unknown here"),
        ]

    assert world.told(1_040.0, *sources(1_040.0)) == {}
    assert world.told(1_050.0, *sources(1_050.0)) == {("m", "w", 1): 1, ("n", "busy", 0): EVENTFUL_KEPT}


def test_what_is_missing_is_said_before_the_indexer_is_told_and_where_events_have_stopped() -> None:
    world, key = World(), ("default", WorkerRank("w", 0))
    world.serve(6.0)
    assert world.told(7.0, source(0.0, 7.0, endpoint="tcp://e")) == {}
    assert world.ranks.no_events == {}, "it may be on its way"
    assert world.told(10.0, source(0.0, 10.0, endpoint="tcp://e")) == {}
    assert world.ranks.no_events == {key: "ran 1 request, and no KV event ever came from tcp://e"}
    live: dict[str, Any] = {"state": indexer_pb2.SOURCE_STATE_LIVE, "last_event_id": 3}
    world.told(15.0, source(0.0, 15.0, **live, last_event_age_seconds=8.0))
    assert world.ranks.no_events == {}
    world.serve(16.0, 17.0)
    stopped = source(0.0, 20.0, **live, last_event_age_seconds=13.0)
    world.told(20.0, stopped)
    assert world.ranks.no_events == {}, "an engine that does not say what it had cached may have computed nothing"
    world.observations.reported("default", key[1], isl_tokens=64, cached=16, predicted=None)
    world.told(20.0, stopped)
    said = "ran 2 requests since its last KV event 13 s ago, and announced none of their blocks"
    assert world.ranks.no_events == {key: said}
