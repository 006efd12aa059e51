"""Which requests are turns of one conversation."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support.seeds import test_seed

from kvscout_common.worker import Role, WorkerRank
from kvscout_scheduler.costs.cost import BlockFormat
from kvscout_scheduler.estimates import sessions as module
from kvscout_scheduler.estimates.sessions import Sessions
from kvscout_scheduler.values.request import Prompt, SelectionRequest, pack_hashes
from kvscout_scheduler.values.reservation import End, RequestKey, Reservation

BLOCK = 16
SYSTEM = list(range(1, 65))
"""Blocks of instructions that many prompts begin with."""


class Pool:
    """Books requests as a scheduler does."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.now = 0.0
        self._last = 0

    def find(self, blocks: list[int], **fields: Any) -> int:
        """The session of a prompt that is not booked."""
        self._last += 1
        return self._find(blocks, f"r{self._last}", **fields)[0]

    def book(self, blocks: list[int], request_id: str = "", *, worker: str = "w", **fields: Any) -> Reservation:
        self._last += 1
        request_id = request_id or f"r{self._last}"
        session, prompt = self._find(blocks, request_id, **fields)
        key = RequestKey("t", "m", Role.AGGREGATED, request_id)
        lineage = prompt.lineage(BLOCK)
        tokens = BLOCK * len(blocks) + 3
        made = Reservation(key, 1, WorkerRank(worker, 0), tokens, tokens, lineage=lineage, session=session)
        self.sessions.extend(session, lineage, prompt.block_hashes, self.now)
        self.sessions.booked(made, self.now)
        self.sessions.check_invariants()
        return made

    def end(self, made: Reservation, output_tokens: int = 0) -> None:
        self.sessions.ended(made, End(True, output_tokens), self.now)
        self.sessions.check_invariants()

    def _find(self, blocks: list[int], request_id: str, **fields: Any) -> tuple[int, Prompt]:
        prompt = Prompt(pack_hashes(blocks))
        request = SelectionRequest("m", BLOCK * len(blocks) + 3, prompt, request_id=request_id, **fields)
        return self.sessions.of(request, {BlockFormat(BLOCK, False): prompt}), prompt


def test_a_prompt_that_continues_another_is_a_turn_of_its_session() -> None:
    pool = Pool()
    first = pool.book([*SYSTEM, 100])
    second = pool.book([*SYSTEM, 100, 101, 102])
    third = pool.book([*SYSTEM, 100, 101, 102, *range(1_000, 3_000)])
    assert first.session == second.session == third.session != 0
    assert len(pool.sessions) == 1


def test_conversations_that_begin_alike_are_apart() -> None:
    pool = Pool()
    mine, yours = pool.book([*SYSTEM, 100]), pool.book([*SYSTEM, 200])
    assert mine.session != yours.session
    assert pool.find([*SYSTEM, 200, 201]) == yours.session
    assert pool.find([*SYSTEM, 100, 101]) == mine.session


def test_only_the_first_that_continues_a_prompt_is_its_next_turn() -> None:
    pool = Pool()
    first = pool.book(SYSTEM)
    assert pool.book([*SYSTEM, 100]).session == first.session
    others = [pool.book([*SYSTEM, one]).session for one in (200, 300)]
    assert len({first.session, *others}) == 3


def test_the_same_prompt_again_is_the_same_session() -> None:
    pool = Pool()
    assert pool.book([*SYSTEM, 100]).session == pool.book([*SYSTEM, 100]).session


def test_an_equal_last_block_behind_another_prefix_is_no_turn() -> None:
    pool = Pool()
    pool.book([*SYSTEM, 100, 101])
    for blocks in ([*SYSTEM, 999, 101, 102], [*SYSTEM, 100, 5, 101], [*SYSTEM, 101, 102, 103]):
        assert pool.find(blocks) != pool.find([*SYSTEM, 100, 101])


def test_what_a_caller_says_counts_before_the_prompt() -> None:
    pool = Pool()
    first = pool.book([*SYSTEM, 100], session=7)
    assert first.session == 7
    assert pool.find([*SYSTEM, 100, 101], session=8) == 8
    assert pool.find([*SYSTEM, 100, 101]) == 7, "a turn whose caller forgot"
    assert pool.find([*SYSTEM, 100, 101], by_lineage=False) == 0


def test_a_request_has_one_session_in_every_pool_and_attempt() -> None:
    prefill, decode = Pool(), Pool()
    made = [pool.book([*SYSTEM, 100], "r").session for pool in (prefill, decode, prefill)]
    assert len(set(made)) == 1
    assert prefill.find([]) == 0


def test_a_query_begins_no_session() -> None:
    request = SelectionRequest("m", 1_100, Prompt(pack_hashes(SYSTEM)))
    assert Sessions().of(request, {BlockFormat(BLOCK, False): request.prompt}) == 0


def test_it_is_known_where_a_session_was_and_what_it_has_there() -> None:
    pool = Pool()
    made = pool.book([*SYSTEM, 100], worker="a")
    pool.end(made, 50)
    session = pool.sessions.get(made.session)
    assert session is not None
    assert (session.rank, session.tokens, session.active) == (WorkerRank("a", 0), 65 * BLOCK + 3 + 50, 0)
    pool.end(made)
    assert session.active == 0


def test_sessions_are_forgotten_by_age_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 3)
    pool = Pool()
    made = [pool.book([*SYSTEM, number]) for number in range(100, 105)]
    assert [pool.sessions.get(one.session) is not None for one in made] == [False, False, True, True, True]
    pool.now = 1_000.0
    pool.end(made[-1])
    pool.now += module.TTL_SECONDS - 1
    pool.sessions.forget_old(pool.now)
    assert len(pool.sessions) == 1
    pool.sessions.check_invariants()
    pool.now += 2
    pool.sessions.forget_old(pool.now)
    assert len(pool.sessions) == 0


def test_of_a_prompt_of_equal_blocks_the_longest_session_is_found() -> None:
    pool = Pool()
    for length in range(20, 40):
        pool.book([7] * length, session=length)
    assert pool.find([7] * module.MAX_BLOCKS) == 39
    assert pool.find([7] * (module.MAX_BLOCKS + 40)) not in range(20, 40), "no turn adds that much"


def test_found_is_exactly_the_longest_prompt_that_is_continued() -> None:
    seed = test_seed()
    rng = Random(seed)
    pool = Pool()
    ends: dict[int, list[int]] = {}
    for _ in range(600):
        base = list(rng.choice([SYSTEM, *ends.values()]))
        base = base[: rng.randint(16, len(base))] if rng.random() < 0.3 else base
        blocks = base + [rng.randint(1, 200) for _ in range(rng.randint(0, 4))]
        longest = max((end for end in ends.values() if blocks[: len(end)] == end), key=len, default=None)
        made = pool.book(blocks)
        if longest is not None:
            assert ends[made.session] == longest, f"seed {seed}"
        else:
            assert made.session not in ends, f"seed {seed}"
        ends[made.session] = blocks
