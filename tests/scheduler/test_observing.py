"""What policies are told of requests after they picked a worker, and of the clock when they pick one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from support.grpc_server import serving
from support.scheduler_builders import (
    MODEL,
    ManualClock,
    key,
    loads,
    owner,
    request,
    reservation,
    reserve,
    scheduler,
    worker,
)
from support.scheduler_invariants import check_scheduler

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc
from kvscout_common.registry.backends import Backends
from kvscout_common.registry.registry import Registry
from kvscout_common.settings.config import ServerConfig
from kvscout_scheduler.load.active_load import ReferenceLoad
from kvscout_scheduler.policies import Candidates, PolicyRegistry
from kvscout_scheduler.policies.builtin import Kv
from kvscout_scheduler.rpc.servicer import SchedulerServicer
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.reservation import End, FreeOutcome, Reservation


class Listening(Kv):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.untimed: set[str] = set()
        """Requests that ended, and of which nothing is learned."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        self.told.append(("asked", candidates.now))
        return super().costs(candidates)

    def booked(self, reservation: Reservation, now: float) -> None:
        self.told.append(("booked", reservation, now))

    def prefill_completed(self, reservation: Reservation, ttft_seconds: float, now: float) -> None:
        self.told.append(("first token", reservation.key.request_id, ttft_seconds, now))

    def ended(self, reservation: Reservation, end: End, now: float) -> None:
        if reservation.running:
            self.untimed.add(reservation.key.request_id)
        self.told.append(("ended", reservation.key.request_id, end, now))


def listening(**settings: Any) -> tuple[Scheduler, Listening, ManualClock]:
    policy, clock = Listening(), ManualClock(100.0)
    registry = PolicyRegistry({"kv": lambda: policy})
    made = scheduler("w", clock=clock, policies=registry, make_load=ReferenceLoad, **settings)
    return made, policy, clock


def test_a_policy_sees_the_clock_and_what_becomes_of_a_request() -> None:
    made, policy, clock = listening()
    decision = made.select_and_reserve(request([1, 2], isl=40, request_id="r", attempt_id=7, expected_output_tokens=9))
    clock.advance(0.25)
    assert made.mark_prefill_complete(key("r"), 7)
    assert not made.mark_prefill_complete(key("r"), 7)
    clock.advance(1.0)
    assert made.free(key("r"), 7, output_tokens=5) is FreeOutcome.FREED
    assert made.free(key("r"), 7) is FreeOutcome.ALREADY_FREED
    asked, (what, reservation, booked_at), *others = policy.told
    assert asked == ("asked", 100.0)
    assert (what, reservation.key, reservation.attempt_id, booked_at) == ("booked", key("r"), 7, 100.0)
    assert (reservation.rank, reservation.isl_tokens, reservation.uncached_tokens) == (decision.rank, 40, 40)
    assert reservation.expected_output_tokens == 9
    assert reservation.choice == ("kv", 0, 0.0, decision.cost)
    assert others == [("first token", "r", 0.25, 100.25), ("ended", "r", End(True, 5, 1.0), 101.25)]
    assert End(True, 5, 1.0).itl_seconds == 0.25


def test_a_policy_is_told_of_what_others_chose_and_of_what_ends_by_itself() -> None:
    made, policy, clock = listening(lease_seconds=5.0)
    reserve(made, "r", "w", isl=10)
    clock.advance(6.0)
    assert made.expire() == 1
    (_, reservation, _), ended = policy.told
    assert (reservation.key, reservation.choice) == (key("r"), None)
    assert ended == ("ended", "r", End(False), 106.0)
    assert End(False).itl_seconds is None


def test_a_pool_tells_its_own_policies_only() -> None:
    made: list[Listening] = []

    def make() -> Listening:
        made.append(Listening())
        return made[-1]

    each = scheduler("a", worker("b", model="n"), policies=PolicyRegistry({"kv": make}))
    assert len(made) == 2, "a pool's policy listens before it is asked"
    reserve(each, "r", "a", isl=10)
    assert [len(policy.told) for policy in made] == [1, 0]


def test_a_policy_that_fails_when_it_is_told_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Deaf(Kv):
        def booked(self, reservation: Reservation, now: float) -> None:
            raise RuntimeError("not listening")

    made = scheduler("w", policies=PolicyRegistry({"kv": Deaf}))
    with caplog.at_level(logging.WARNING, "kvscout.scheduler"):
        for number in range(3):
            made.select_and_reserve(request([1], request_id=f"r{number}"))
    assert loads(made)["w"][0] == 3
    check_scheduler(made)
    (record,) = caplog.records
    assert "failed: as an observer, booked: RuntimeError: not listening" in record.getMessage()


def test_what_ran_before_it_was_booked_here_is_no_prefill_and_teaches_nothing() -> None:
    made, policy, clock = listening()
    made.reserve(reservation("r", "w", 40)._replace(running=True, prefilled=True))
    made.reserve(reservation("s", "w", 40)._replace(running=True))
    assert loads(made)["w"] == (2, 40, 6), "the prompt of one of them is to be computed still"
    clock.advance(1.0)
    assert not made.mark_prefill_complete(key("r"))
    assert made.mark_prefill_complete(key("s"))
    clock.advance(1.0)
    for name in "rs":
        made.free(key(name), output_tokens=5)
    (_, r, _), (_, s, _), *others = policy.told
    assert [(reservation.running, reservation.prefilled) for reservation in (r, s)] == [(True, True), (True, False)]
    end = End(True, 5)
    assert others == [("first token", "s", 1.0, 101.0), ("ended", "r", end, 102.0), ("ended", "s", end, 102.0)]
    assert policy.untimed == {"r", "s"}
    assert loads(made)["w"] == (0, 0, 0)


def test_what_its_owner_lists_when_it_comes_back_is_not_timed_any_more() -> None:
    made, policy, clock = listening()
    session, _ = made.connect_owner(owner("g"), [])
    for name in "rst":
        made.reserve(reservation(name, "w", 40, attempt_id=1), owner=owner("g"))
    made.mark_prefill_complete(key("r"), 1)
    made.disconnect_owner(owner("g"), session)
    clock.advance(5.0)
    # The first token of s came long ago, nobody could be told.
    made.connect_owner(owner("g"), [(key(name), 1) for name in "rs"])
    made.mark_prefill_complete(key("s"), 1)
    made.free(key("s"), 1, output_tokens=5)
    made.free(key("r"), 1, output_tokens=5)
    assert policy.untimed == {"s"}
    ends = {name: end for what, name, end, _ in (told for told in policy.told if told[0] == "ended")}
    assert ends["s"] == End(True, 5)
    assert ends["r"] == End(True, 5, 5.0), "the time of its first token was told"


def test_a_booking_that_is_there_is_told_that_its_first_token_is_out() -> None:
    made, policy, clock = listening()
    made.reserve(reservation("r", "w", 40, attempt_id=1))
    clock.advance(3.0)
    made.reserve(reservation("r", "w", 40, attempt_id=1)._replace(running=True, prefilled=True))
    assert loads(made)["w"] == (1, 0, 3)
    assert not made.mark_prefill_complete(key("r"), 1)
    made.free(key("r"), 1, output_tokens=5)
    assert policy.untimed == {"r"}
    assert policy.told[-1] == ("ended", "r", End(True, 5), 103.0)
    check_scheduler(made)


async def test_a_free_by_itself_tells_the_tokens_of_its_request() -> None:
    made, policy, clock = listening()
    registry = Registry(clock)
    servicer = SchedulerServicer(made, registry, Backends(registry, ServerConfig()))
    async with serving(servicer.add_to) as channel:
        reserve(made, "r", "w", isl=10)
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        await stub.Free(scheduler_pb2.FreeRequest(model=MODEL, request_id="r", output_tokens=9), timeout=10)
    assert policy.told[-1] == ("ended", "r", End(True, 9), 100.0)
