"""What the last prompts share, and who holds it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from kvscout_gateway.fronts.dashboard.prefixes import MAX_WORKERS, SHOWN, heat_map, shared_prefixes
from kvscout_gateway.request.recent import PromptPrefix
from kvscout_gateway.upstreams.interfaces import Indexer
from kvscout_gateway.values.overlaps import Columns, Overlaps
from kvscout_gateway.values.prompt import Geometry

POOL = Geometry(16, False)
DRAW = Random(7)


def hashes(blocks: int) -> bytes:
    return DRAW.randbytes(8 * blocks)


def prompt(block_hashes: bytes, model: str = "m") -> PromptPrefix:
    return PromptPrefix("default", model, POOL, block_hashes)


class Answers:
    """An indexer whose workers hold so many blocks of whatever is asked for."""

    def __init__(self, columns: Columns, problems: Mapping[str, str] = {}) -> None:
        self._columns = columns
        self._problems = problems

    async def match(self, model: str, tenant: str, hashes: Mapping[Geometry, bytes]) -> Overlaps:
        rows: Any = {pool: SimpleNamespace(columns=self._columns) for pool in hashes}
        return Overlaps(hashes, rows, self._problems)


def shown(prompts: list[PromptPrefix], columns: Columns, **problems: str) -> dict[str, Any]:
    return asyncio.run(heat_map(prompts, cast(Indexer, Answers(columns, problems))))


def test_a_system_prompt_and_a_conversation_in_it_are_two_prefixes() -> None:
    system, talk = hashes(64), hashes(64)
    prompts = [*(prompt(system + hashes(20)) for _ in range(6)), prompt(system + talk), prompt(system + talk + talk)]
    found = [(one.blocks, one.requests) for one in shared_prefixes(prompts)]
    assert found == [(64, 8), (128, 2)]


def test_prompts_that_begin_differently_or_are_of_other_models_share_nothing() -> None:
    same = hashes(32)
    assert shared_prefixes([prompt(same), prompt(same, "other"), prompt(hashes(32)), prompt(b"")]) == []


def test_only_the_largest_are_shown() -> None:
    prompts = [prompt(one) for one in (hashes(length) for length in range(8, 8 + 2 * SHOWN)) for _ in range(2)]
    found = shared_prefixes(prompts)
    assert len(found) == SHOWN
    assert [one.blocks for one in found] == sorted((one.blocks for one in found), reverse=True)


def test_each_worker_shows_what_it_holds_on_any_tier_and_one_that_holds_nothing_is_left_out() -> None:
    same = hashes(32)
    document = shown([prompt(same)] * 2, (["w0", "w1", "w2"], [0, 1, 0], [32, 4, 0], [32, 8, 0], [], [], []))
    assert document["rows"] == [["w0/0", 32], ["w1/1", 8]]
    [prefix] = document["prefixes"]
    assert (prefix["blocks"], prefix["tokens"], prefix["requests"], prefix["holders"]) == (32, 512, 2, 1)
    assert document["workers"] == 2


def test_of_a_thousand_workers_those_that_hold_most_are_sent_and_what_was_missed_is_told() -> None:
    ids = [f"w{index}" for index in range(1_000)]
    columns: Columns = (ids, [], [index % 32 + 1 for index in range(1_000)], [], [], [], [])
    document = shown([prompt(hashes(32))] * 2, columns, **{"indexer 0/2": "indexer 0/2: no answer"})
    assert len(document["rows"]) == MAX_WORKERS
    assert document["rows"][0][1] == 32
    assert document["workers"] == 1_000
    assert document["missed"] == "indexer 0/2: no answer"
