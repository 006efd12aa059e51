"""The lines of several replicas: vacancies that all of them see, and whose they are."""

from __future__ import annotations

from typing import Any

import pytest
from support.replica_world import World
from support.scheduler_builders import key, request, reservation, worker
from support.seeds import test_seed

from kvscout_common.errors import KvscoutError
from kvscout_common.worker import WorkerSpec
from kvscout_scheduler.queue.remote_queues import YIELD_SECONDS
from kvscout_scheduler.queue.waiting import Waiter
from kvscout_scheduler.replicas.queues import (
    MAX_PRIORITIES,
    STALE_SECONDS,
    highest_priority,
    priorities_from_proto,
    priorities_to_proto,
)
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.reservation import PoolId
from kvscout_scheduler.values.settings import SchedulerSettings

FULL = 200
"""Tokens of a prompt after which a worker has prefill work enough."""
POOL = key("any").pool


class Lines(World):
    """Replicas with a line each, and workers that take one prompt at a time."""

    def __init__(self, *names: str, seed: int = 0, workers: int = 1) -> None:
        self.answers: dict[str, Decision | KvscoutError] = {}
        """By request."""
        self.waiters: dict[str, Waiter | None] = {}
        super().__init__(
            *names, seed=seed, workers=workers, settings=SchedulerSettings(policy="kv", queue_threshold=1.0)
        )

    def spec(self, worker_id: str) -> WorkerSpec:
        return worker(worker_id, max_num_batched_tokens=100)

    def ask(self, at: str, request_id: str, **fields: Any) -> None:
        """A request comes."""
        selection = request(isl=FULL, request_id=request_id, attempt_id=1, **fields)

        def answer(decision: Decision | KvscoutError) -> None:
            self.answers[request_id] = decision

        self.waiters[request_id] = self[at].core.reserve_or_wait(selection, answer)

    def end(self, at: str, request_id: str) -> None:
        self[at].core.free(key(request_id), 1)

    def fill(self, at: str, *names: str) -> None:
        """Requests that take all workers."""
        for number, name in enumerate(names):
            self[at].core.reserve(reservation(name, f"w{number}", FULL, attempt_id=1))
        self.run(0.05)

    @property
    def booked(self) -> list[str]:
        """Requests that came out of a line or never were in one, in order."""
        return [name for name, answer in self.answers.items() if isinstance(answer, Decision)]

    def on_workers(self) -> list[int]:
        """Requests of each worker, as the first replica sees them."""
        return [requests for requests, _, _ in self["a"].loads().values()]


def test_a_vacancy_that_another_replica_makes_wakes_those_that_wait_here(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Lines("a", "b")
    monkeypatch.setattr(world["b"].core, "expire", lambda: 0)
    world.fill("a", "r")
    world.ask("b", "s")
    assert world.booked == []
    world.end("a", "r")
    world.run(0.01)
    assert world.booked == ["s"]
    world.settled()


def test_the_end_of_a_prefill_at_another_replica_is_a_vacancy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Lines("a", "b")
    monkeypatch.setattr(world["b"].core, "expire", lambda: 0)
    world.fill("a", "r")
    world.ask("b", "s")
    world["a"].core.mark_prefill_complete(key("r"), 1)
    world.run(0.01)
    assert world.booked == ["s"]


@pytest.mark.parametrize("at", ["a", "b"])
def test_who_comes_with_a_lower_priority_lets_those_go_first_that_wait_elsewhere(at: str) -> None:
    world = Lines("a", "b")
    world.fill(at, "r")
    world.ask("b", "high", priority=5)
    world.run(0.05)
    world.faults(delay_seconds=0.02)
    world.end(at, "r")
    if at == "b":
        # It was waiting there: nobody else was asked.
        assert world.booked == ["high"]
    world.ask("a", "low")
    world.run(0.06)
    assert world.booked == ["high"]
    assert world.on_workers() == [1]
    world.faults()
    world.end("b", "high")
    world.run(0.05)
    assert world.booked == ["high", "low"]
    world.settled()


def test_a_vacancy_here_is_left_to_the_higher_priority_elsewhere_though_others_wait_here() -> None:
    world = Lines("a", "b")
    world.fill("a", "r")
    world.ask("a", "low")
    world.ask("b", "high", priority=5)
    world.run(0.05)
    world.end("a", "r")
    world.run(0.05)
    assert world.booked == ["high"]
    world.end("b", "high")
    world.run(0.01)
    assert world.booked == ["high", "low"]


def test_the_same_and_higher_priorities_wait_for_nobody_elsewhere() -> None:
    world = Lines("a", "b")
    world.fill("a", "r")
    world.ask("b", "s", priority=5)
    world.run(0.05)
    world.ask("a", "t", priority=5)
    world.ask("a", "u", priority=6)
    world.end("a", "r")
    assert world.booked == ["u"]


def test_who_can_go_to_one_worker_only_neither_waits_for_others_nor_holds_them_up() -> None:
    world = Lines("a", "b", workers=2)
    world.fill("a", "r", "s")
    world.ask("b", "pinned", priority=5, pinned_worker_id="w1")
    world.run(0.05)
    world.end("a", "r")
    world.ask("a", "low")
    assert world.booked == ["low"]
    world.ask("b", "high", priority=5)
    world.run(0.05)
    world.end("a", "s")
    world.ask("a", "also pinned", pinned_worker_id="w1")
    assert world.booked == ["low", "also pinned"]


def test_a_vacancy_that_nobody_elsewhere_fills_is_left_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Lines("a", "b")
    world.fill("a", "r")
    world.ask("b", "high", priority=5)
    monkeypatch.setattr(world["b"].core._admission, "admit_waiting", lambda pool, now: None)
    world.run(0.05)
    world.end("a", "r")
    for number in range(3):
        world.ask("a", f"low{number}")
    world.run(YIELD_SECONDS / 2)
    assert world.booked == []
    world.run(YIELD_SECONDS)
    assert world.booked == ["low0"]
    assert world.on_workers() == [1]


def test_the_line_of_a_replica_that_is_silent_counts_no_more() -> None:
    world = Lines("a", "b")
    world.fill("a", "r")
    world.ask("b", "high", priority=5)
    world.run(0.05)
    views = world["a"].replication.views
    assert highest_priority(POOL, views.values(), world.clock.now) == 5
    world["b"].away = True
    world.run(STALE_SECONDS + 0.01)
    assert highest_priority(POOL, views.values(), world.clock.now) is None
    world.end("a", "r")
    world.ask("a", "low")
    assert world.booked == ["low"]


def test_lines_that_are_told_are_bounded_and_those_of_unknown_roles_left() -> None:
    many = {PoolId("t", f"m{number}", POOL.role): number for number in range(2 * MAX_PRIORITIES)}
    told = priorities_to_proto(many)
    told[0].role = 77  # type: ignore[assignment]
    assert priorities_from_proto(told) == dict(list(many.items())[1:MAX_PRIORITIES])


@pytest.mark.parametrize("run", range(3))
def test_lines_at_several_replicas_are_served_by_priority_and_nobody_is_left(run: int) -> None:
    world = Lines("a", "b", "c", seed=test_seed() + run, workers=2)
    rng = world.rng
    world.fill("a", "r0", "r1")
    running = {"r0": "a", "r1": "a"}
    at: dict[str, str] = {}
    for number in range(60):
        name = f"{'high' if number % 3 == 0 else 'low'}{number}"
        at[name] = rng.choice("abc")
        world.ask(at[name], name, priority=5 if number % 3 == 0 else 0)
    world.run(0.3)
    seen = 0
    for _ in range(400):
        for name in world.booked[seen:]:
            running[name] = at[name]
        seen = len(world.booked)
        if running:
            name = rng.choice(sorted(running))
            world.end(running.pop(name), name)
        world.run(0.05)
    assert sorted(world.booked) == sorted(at), "nobody is left"
    first = world.booked[:20]
    assert sum(name.startswith("high") for name in first) >= 18, "but for crossings, high priorities go first"
    world.settled()
