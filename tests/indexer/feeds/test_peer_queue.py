"""Many ranks that ask peers at once: each gets its turn, and a peer that is slow or silent for a moment is not lost."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from support.cpu_cost import TIMES, assert_in_proportion

from kvscout_common.errors import Unavailable
from kvscout_common.worker import WorkerSpec
from kvscout_indexer.feeds import peers
from kvscout_indexer.feeds.peers import Peers

RANKS = 40
INDEX: Any = None
"""Nothing is loaded."""


class Answers:
    """What a peer does with one request after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, slow_seconds: float = 0.0, fails: int = 0) -> None:
        self.asked = 0
        self.slow_seconds = slow_seconds
        self.fails = fails
        """Requests from the first one on that fail."""
        self.error: Exception = TimeoutError()
        monkeypatch.setattr(peers.Peer, "dump", self.dump)

    async def dump(self, *_: Any) -> Any:
        self.asked += 1
        number = self.asked
        await asyncio.sleep(self.slow_seconds)
        if number <= self.fails:
            raise self.error
        return Complete()


class Complete:
    """A state, as far as a search looks at it."""

    history_incomplete = False


async def search(of: Peers, ranks: int = RANKS) -> int:
    """How many of many ranks that begin at once find a state."""
    spec = WorkerSpec("w", "m", 16, dp_size=ranks)
    found = await asyncio.gather(*(of.state_of(spec, rank, INDEX) for rank in spec.ranks))
    return sum(state is not None for state in found)


async def test_a_rank_s_time_begins_with_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SEARCH_SECONDS", 1.5)
    Answers(monkeypatch, slow_seconds=0.4)
    # Five turns of eight take longer than one may.
    queue = Peers(["peer:1"])
    assert await search(queue) == RANKS
    assert (queue.found, queue.not_found) == (RANKS, 0)


def test_each_of_thousands_of_ranks_is_asked_for_once_and_costs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch)

    def recover(ranks: int) -> None:
        answers.asked = 0
        queue = Peers(["peer:1"])
        assert asyncio.run(search(queue, ranks)) == ranks
        assert (queue.found, queue.not_found, answers.asked) == (ranks, 0, ranks)

    assert_in_proportion(recover, 1_000, TIMES * 1_000)


async def test_a_peer_that_falls_silent_for_a_moment_is_asked_again_by_all_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "AVOID_SECONDS", 0.05)
    answers = Answers(monkeypatch, fails=peers.MAX_DUMPS)
    queue = Peers(["peer:1"])
    # Those whose request it was have nothing; all others do.
    assert await search(queue) == RANKS - peers.MAX_DUMPS
    assert answers.asked == RANKS
    assert queue.warnings() == []


async def test_a_peer_that_stays_silent_is_given_up_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", 0.0)
    answers = Answers(monkeypatch, fails=RANKS)
    assert await search(Peers(["peer:1"])) == 0
    assert answers.asked == peers.MAX_DUMPS


async def test_a_peer_that_is_not_there_is_waited_for_by_nobody_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="kvscout.events")
    answers = Answers(monkeypatch, fails=RANKS)
    answers.error = Unavailable("connection refused")
    queue = Peers(["peer:1"])
    assert await search(queue) == 0
    assert answers.asked == peers.MAX_DUMPS
    assert queue.warnings() == [
        "no peer can be reached, workers begin without their state (peer:1: connection refused)"
    ]
    assert len(caplog.records) == 1
