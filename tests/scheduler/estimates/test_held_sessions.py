"""What a worker holds of each session, and who comes back for it."""

from __future__ import annotations

from random import Random

import pytest
from support.seeds import test_seed

from kvscout_common.worker import Role, WorkerRank
from kvscout_scheduler.estimates.held_sessions import NEXT_TOKENS, HeldSessions
from kvscout_scheduler.estimates.sessions import Sessions
from kvscout_scheduler.values.reservation import End, RequestKey, Reservation

HERE, THERE = WorkerRank("here", 0), WorkerRank("there", 0)


def turn(session: int, rank: WorkerRank = HERE) -> Reservation:
    return Reservation(RequestKey("t", "m", Role.AGGREGATED, f"r{session}"), 1, rank, 100, 100, session=session)


def known(pauses: dict[int, float], *, now: float = 1_000.0, turns: int = 30) -> Sessions:
    """Sessions that came back after so many seconds each time, and pause now for as long."""
    sessions = Sessions()
    for session, pause in pauses.items():
        at = now - pause * turns
        for _ in range(turns):
            sessions.booked(turn(session), at)
            sessions.ended(turn(session), End(True, 1), at)
            at += pause
    return sessions


def test_the_first_sessions_lose_their_tokens_when_there_are_too_many() -> None:
    held = HeldSessions()
    for session, tokens in ((1, 40), (2, 40), (3, 20), (1, 5), (4, 30)):
        held.add(session, tokens, 100)
    assert dict(held._tokens) == {2: 5, 3: 20, 1: 45, 4: 30}
    held.add(5, 500, 100)
    assert dict(held._tokens) == {5: 100}


def test_totals_are_never_above_the_capacity() -> None:
    rng = Random(test_seed())
    held = HeldSessions()
    for _ in range(2_000):
        held.add(rng.randrange(20), rng.randrange(60), 300)
        assert held._total == sum(held._tokens.values()) <= 300
        assert all(tokens >= 0 for tokens in held._tokens.values())


def test_what_is_evicted_next_is_worth_the_chance_that_its_session_comes_back() -> None:
    sessions = known({1: 2.0, 2: 2.0})
    held = HeldSessions()
    assert held.reuse(HERE, sessions, 1_000.0) == 0.0
    held.add(1, 10_000, 100_000)
    chance = sessions.soon(1, HERE, 1_000.0)
    assert chance is not None
    assert held.reuse(HERE, sessions, 1_000.0) == pytest.approx(chance)
    assert chance > 0.4
    held.add(99, NEXT_TOKENS, 100_000)
    assert held.reuse(HERE, sessions, 1_000.0) == pytest.approx(chance * 10_000 / NEXT_TOKENS), "nobody knows of 99"


def test_what_a_session_has_left_behind_is_worth_nothing() -> None:
    sessions = known({1: 2.0})
    held = HeldSessions()
    held.add(1, 10_000, 100_000)
    assert held.reuse(THERE, sessions, 1_000.0) == 0.0


def test_what_is_in_use_is_not_evicted_next() -> None:
    sessions = known({1: 2.0, 2: 2.0})
    held = HeldSessions()
    held.add(1, 10_000, 100_000)
    held.add(99, 10_000, 100_000)
    sessions.booked(turn(1), 1_000.0)
    assert held.reuse(HERE, sessions, 1_000.0) == 0.0
    assert sessions.soon(1, HERE, 1_000.0) is None


def test_sessions_that_never_come_back_are_learned_from_while_they_are_away() -> None:
    sessions, now = Sessions(), 0.0
    for session in range(1, 200):
        sessions.booked(turn(session), now)
        sessions.ended(turn(session), End(True, 1), now)
        now += 2.0
    # None was away for long enough to be given up, and yet nobody believes that the next one comes back.
    assert sessions.pauses.everyone.hazard(0) < 0.02
    assert sessions.pauses.everyone.hazard(3) < 0.02
    sessions.check_invariants()
