"""What is kept on one worker."""

from __future__ import annotations

from kvscout_gateway.values.session import worker_of


def test_a_session_stays_and_few_move_when_a_worker_comes_or_goes() -> None:
    workers = [f"w{n}" for n in range(10)]
    before = {session: worker_of(session, workers) for session in range(1, 1001)}
    assert {worker_of(session, reversed(workers)) == worker for session, worker in before.items()} == {True}
    without = {session: worker_of(session, workers[1:]) for session in before}
    assert all(without[session] == worker for session, worker in before.items() if worker != "w0")
    assert 50 < sum(worker == "w0" for worker in before.values()) < 150
    assert worker_of(1, []) == ""
