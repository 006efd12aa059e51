"""What policies of one replica are told of what others do: nothing that would teach them a wrong time."""

from __future__ import annotations

from typing import TypeVar

import pytest
from support.replica_world import SETTINGS, World
from support.scheduler_builders import key, owner, request, reservation, scheduler

from kvscout_scheduler.policies import CheckedPolicy, PolicyRegistry
from kvscout_scheduler.policies.builtin import Kv
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.reservation import End, Reservation
from kvscout_scheduler.values.settings import SchedulerSettings


class Timing(Kv):
    """What a replica's policy can time, by request."""

    def __init__(self) -> None:
        self.booked_as: dict[str, tuple[bool, bool]] = {}
        """Whether it ran, and whether its first token was out."""
        self.ttft_seconds: dict[str, float] = {}
        self.decode_seconds: dict[str, float] = {}

    def booked(self, reservation: Reservation, now: float) -> None:
        self.booked_as[reservation.key.request_id] = (reservation.running, reservation.prefilled)

    def prefill_completed(self, reservation: Reservation, ttft_seconds: float, now: float) -> None:
        if not reservation.running:
            self.ttft_seconds[reservation.key.request_id] = round(ttft_seconds, 2)

    def ended(self, reservation: Reservation, end: End, now: float) -> None:
        if end.decode_seconds:
            self.decode_seconds[reservation.key.request_id] = end.decode_seconds


P = TypeVar("P")


def policy_of(core: Scheduler, kind: type[P]) -> P:
    """The policy that listens to the workers of a scheduler."""
    *_, checked = core.workers.pool(key("any").pool).observers
    assert isinstance(checked, CheckedPolicy)
    assert isinstance(checked._policy, kind)
    return checked._policy


class Timed(World):
    """Replicas whose policies are `Timing`."""

    def policy(self, name: str) -> Timing:
        return policy_of(self[name].core, Timing)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Timed:
    monkeypatch.setattr(
        "kvscout_scheduler.scheduler.installed_policies", lambda: PolicyRegistry({SETTINGS.policy: Timing})
    )
    return Timed("a", "b")


def test_what_others_book_is_timed_by_when_their_events_come(world: Timed) -> None:
    world.book("a", "r")
    world.run(0.5)
    world["a"].core.mark_prefill_complete(key("r"), 1)
    world.run(0.1)
    policy = world.policy("b")
    assert policy.booked_as == {"r": (False, False)}
    assert policy.ttft_seconds == {"r": 0.5}
    world.settled()


def test_a_joiner_knows_who_decodes_and_times_nothing_that_ran_before_it_came(world: Timed) -> None:
    world.book("a", "decodes")
    world["a"].core.mark_prefill_complete(key("decodes"), 1)
    world.book("a", "computes")
    world.run(1)
    world.start("c")
    world.run(1)
    policy = world.policy("c")
    assert policy.booked_as == {"decodes": (True, True), "computes": (True, False)}
    world["a"].core.mark_prefill_complete(key("computes"), 1)
    # And neither do those whom it takes them over from differ from it.
    world["c"].core.connect_owner(owner("g"), [(key("decodes"), 1), (key("computes"), 1)])
    world.settled()
    for name in ("decodes", "computes"):
        world["c"].core.free(key(name), 1, output_tokens=9)
    assert policy.ttft_seconds == policy.decode_seconds == {}
    world.settled()


def test_events_that_come_all_at_once_are_not_timed(world: Timed) -> None:
    world.book("a", "before")
    world.run(0.2)
    world["b"].away = True
    world["a"].core.mark_prefill_complete(key("before"), 1)
    world.book("a", "r")
    world.run(0.5)
    world["a"].core.mark_prefill_complete(key("r"), 1)
    world.run(0.5)
    world["b"].away = False
    world.run(0.1)
    policy = world.policy("b")
    assert policy.ttft_seconds == {}
    assert policy.booked_as["r"][0]
    world.book("a", "after")
    world.run(0.3)
    world["a"].core.mark_prefill_complete(key("after"), 1)
    world.settled()
    assert policy.ttft_seconds == {"after": 0.3}


def test_clocks_that_are_far_apart_keep_nobody_from_learning(world: Timed) -> None:
    world.start("c", clock_behind_seconds=900)
    world.run(1)
    for at, name in (("a", "r"), ("c", "s")):
        world.book(at, name)
        world.run(0.5)
        world[at].core.mark_prefill_complete(key(name), 1)
        world.run(0.1)
    assert world.policy("b").ttft_seconds == {"r": 0.5, "s": 0.5}
    assert world.policy("c").ttft_seconds == {"r": 0.5, "s": 0.5}


def test_a_takeover_times_nothing_that_its_former_owner_may_have_known(world: Timed) -> None:
    world["a"].core.connect_owner(owner("g"), [])
    world.book("a", "r", owner=owner("g"))
    world.run(0.5)
    world.faults(loss=1)
    world["a"].core.mark_prefill_complete(key("r"), 1)
    world.run(0.01)
    world.kill("a")
    world.run(3)
    world["b"].core.connect_owner(owner("g"), [(key("r"), 1)])
    # Its gateway says it again.
    world["b"].core.mark_prefill_complete(key("r"), 1)
    world["b"].core.free(key("r"), 1, output_tokens=9)
    assert world.policy("b").ttft_seconds == world.policy("b").decode_seconds == {}


def test_a_restart_with_many_in_flight_leaves_the_learned_rates_as_they_are() -> None:
    core = scheduler("w0", "w1", policy="kv-time")
    (pool,) = core.workers
    times = pool.times
    believed = times.prefill.slope, times.decode.slope
    in_flight = [f"r{number}" for number in range(200)]
    for number, name in enumerate(in_flight):
        booked = reservation(name, f"w{number % 2}", 1_000 + number, attempt_id=1)
        core.reserve(booked._replace(running=True, prefilled=number % 10 > 0))
    for name in in_flight:
        core.mark_prefill_complete(key(name), 1)
    assert (times.prefill.slope, times.decode.slope) == believed
    for name in in_flight:
        core.free(key(name), 1, output_tokens=500)
    assert (times.prefill.slope, times.decode.slope) == believed


def test_a_joiner_sees_no_prompts_ahead_where_requests_decode() -> None:
    world = World("a", "b", workers=1, settings=SchedulerSettings(policy="kv-time"))
    for number in range(50):
        world["a"].core.reserve(reservation(f"r{number}", "w0", 20_000, attempt_id=1))
        world["a"].core.mark_prefill_complete(key(f"r{number}"), 1)
    world.run(1)
    world.start("c")
    world.run(1)
    world.agree()
    reasons = []
    for name in "ac":
        explanation = world[name].core.select(request(isl=100, explain=True)).explanation
        assert explanation is not None
        reasons.append(explanation.reason)
    assert all("0 ms of prompts ahead" in reason for reason in reasons), reasons
