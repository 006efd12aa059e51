"""A worker is slow by comparison: with the others of its pool, over some seconds, where enough was streamed."""

from __future__ import annotations

from collections.abc import Mapping

from kvscout_common.worker import WorkerRank
from kvscout_gateway.engines.speed import KEPT_SECONDS, WINDOW_SAMPLES, Key, Speeds
from kvscout_gateway.engines.worker_state import WELL, WorkerState


def key(name: str) -> Key:
    return "default", WorkerRank(name, 0)


class World:
    """Ranks that stream at speeds that a test says, for a second between two samples."""

    def __init__(self) -> None:
        self.speeds = Speeds()
        self.now = 100.0
        self._totals: dict[Key, tuple[float, int]] = {}

    def run(self, seconds: int, seconds_a_token: Mapping[str, float], pools: Mapping[str, str] | None = None) -> None:
        """Each rank streams one answer; 0 = none."""
        for _ in range(seconds):
            self.now += 1.0
            for name, pace in seconds_a_token.items():
                streamed, tokens = self._totals.get(key(name), (0.0, 0))
                if pace:
                    streamed, tokens = streamed + 1.0, tokens + round(1.0 / pace)
                self._totals[key(name)] = streamed, tokens
            due = {rank: total for rank, total in self._totals.items() if self._is_due(rank, seconds_a_token)}
            self.speeds.sample(self.now, due, lambda rank: (pools or {}).get(rank[1].worker_id, "pool"))

    def _is_due(self, rank: Key, seconds_a_token: Mapping[str, float]) -> bool:
        return rank in self.speeds or bool(seconds_a_token.get(rank[1].worker_id))

    def state(self, name: str) -> WorkerState:
        return self.speeds.judge(key(name), self.now).state


def test_one_that_takes_several_times_as_long_as_the_others_is_slow_and_says_how_much() -> None:
    world = World()
    world.run(5, {"a": 0.01, "b": 0.01, "c": 0.012})
    assert {world.state(name) for name in "abc"} == {WorkerState.OK}
    world.run(4, {"a": 0.01, "b": 0.01, "c": 0.1})
    judged = world.speeds.judge(key("c"), world.now)
    assert judged.state is WorkerState.SLOW
    assert judged.cause == "takes 100 ms a token, the other workers 10 ms"
    assert judged.age_seconds is not None
    assert judged.age_seconds <= 4
    assert world.speeds.judge(key("a"), world.now) == WELL
    world.run(4, {"a": 0.01, "b": 0.01, "c": 0.012})
    assert world.state("c") is WorkerState.OK


def test_of_two_the_slower_one_is_slow_and_of_two_pools_none() -> None:
    world = World()
    world.run(5, {"a": 0.01, "b": 0.1})
    assert (world.state("a"), world.state("b")) == (WorkerState.OK, WorkerState.SLOW)
    apart = World()
    apart.run(5, {"a": 0.01, "b": 0.1}, {"a": "decode", "b": "prefill"})
    assert (apart.state("a"), apart.state("b")) == (WorkerState.OK, WorkerState.OK)


def test_what_all_have_in_common_what_is_fast_and_what_is_alone_is_not_slow() -> None:
    world = World()
    world.run(5, {"a": 0.2, "b": 0.2, "c": 0.02})
    assert {world.state(name) for name in "ab"} == {WorkerState.OK}, "half of the others are as slow"
    world = World()
    world.run(5, {"a": 0.0001, "b": 0.001})
    assert world.state("b") is WorkerState.OK
    world = World()
    world.run(5, {"a": 1.0})
    assert world.state("a") is WorkerState.OK


def test_a_slow_worker_without_requests_stays_slow_for_a_while_and_no_longer() -> None:
    world = World()
    world.run(5, {"a": 0.01, "b": 0.1})
    world.run(8, {"a": 0.01, "b": 0.0})
    assert world.state("b") is WorkerState.SLOW
    world.run(int(KEPT_SECONDS), {"a": 0.01, "b": 0.0})
    assert world.state("b") is WorkerState.OK


def test_a_rank_that_is_gone_is_forgotten() -> None:
    world = World()
    world.run(5, {"a": 0.01, "b": 0.1})
    world.speeds.sample(world.now, {}, lambda _: "pool")
    assert world.state("b") is WorkerState.OK


def test_a_rank_that_streams_nothing_any_more_is_sampled_no_longer() -> None:
    world = World()
    world.run(5, {"a": 0.01, "b": 0.01})
    assert key("b") in world.speeds
    world.run(int(KEPT_SECONDS) + WINDOW_SAMPLES + 1, {"a": 0.01, "b": 0.0})
    assert key("a") in world.speeds
    assert key("b") not in world.speeds
