"""When a rank's own events show that its engine emptied its cache."""

from __future__ import annotations

import pytest

from kvscout_blocks.bytes.events import EventBatch, Removed, Stored
from kvscout_blocks.index.block_index import BlockIndex, WorkerOptions
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common.worker import WorkerRank
from kvscout_indexer.index.cache_evidence import ENOUGH, CacheEvidence, Finding, Missed, is_proven

RANK = WorkerRank("w", 0)
PROMPTS = [tuple(range(100 * number, 100 * number + 8)) for number in range(1, 7)]


@pytest.fixture
def index() -> BlockIndex:
    """A rank that holds all prompts."""
    index = ReferenceIndex(4)
    index.add_worker(RANK, WorkerOptions())
    for prompt in PROMPTS:
        store(index, *prompt)
    return index


def store(index: BlockIndex, *blocks: int) -> None:
    index.apply(RANK, EventBatch((Stored(blocks, local_hashes=blocks),)))


def missed(prompt: tuple[int, ...], cached: int = 0) -> Missed:
    packed = b"".join(block.to_bytes(8, "little") for block in prompt)
    return Missed(packed, CacheEvidence(Finding.EMPTIED, cached))


def test_prompts_that_were_stored_again_without_a_removal_prove_it(index: BlockIndex) -> None:
    evidence = [missed(prompt) for prompt in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        assert is_proven(index, RANK, evidence) == (number >= ENOUGH)
        store(index, *prompt)


def test_prompts_that_were_evicted_while_they_waited_prove_nothing(index: BlockIndex) -> None:
    for prompt in PROMPTS:
        index.apply(RANK, EventBatch((Removed(prompt),)))
        store(index, *prompt)
    assert not is_proven(index, RANK, [missed(prompt) for prompt in PROMPTS])


def test_what_an_engine_says_proves_nothing_against_its_events(index: BlockIndex) -> None:
    assert not is_proven(index, RANK, [missed(prompt) for prompt in PROMPTS])
    assert not is_proven(index, WorkerRank("other", 0), [missed(prompt) for prompt in PROMPTS])


def test_blocks_that_it_had_do_not_count(index: BlockIndex) -> None:
    for prompt in PROMPTS:
        store(index, *prompt[:4])
    assert not is_proven(index, RANK, [missed(prompt, cached=4) for prompt in PROMPTS])
    assert not is_proven(index, RANK, [missed(prompt, cached=99) for prompt in PROMPTS])


def test_half_of_what_was_lost_is_enough_as_the_rest_may_have_been_evicted_since(index: BlockIndex) -> None:
    for prompt in PROMPTS:
        store(index, *prompt[:4])
    assert is_proven(index, RANK, [missed(prompt) for prompt in PROMPTS])
    assert not is_proven(index, RANK, [missed((*prompt, 7)) for prompt in PROMPTS])
