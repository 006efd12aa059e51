"""Evidence that an engine emptied its cache without an event, such as by vLLM's sleep mode. Pure.

A gateway reports prompts of which an engine had few blocks cached although its events announced many. By itself that
is no proof: blocks may have been evicted while the request waited, or the request may have reached another rank. The
events decide. A block that was evicted has a Removed before its next Stored; one that was lost without an event is
stored a second time, and no Removed came between. So what an engine says of its cache can only ever concern itself,
and only where its own events contradict each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvscout_blocks.index.block_index import BlockIndex
from kvscout_common.worker import WorkerRank

HASH_BYTES = 8
ENOUGH = 3
"""Prompts whose lost blocks were stored again: one could be a duplicate event, three in as many prompts are not."""
SHARE = 0.5
"""Part of a prompt's lost blocks that must have been stored again: the others may have been evicted since."""


class Finding(Enum):
    """Conclusion from the cached tokens that an engine reports."""

    EMPTIED = "emptied"
    """It lacks what its events announced."""
    AGREES = "agrees"
    """Since a fence it has what its events announced since."""
    KEPT = "kept"
    """It has more: the fence was wrong."""


@dataclass(frozen=True, slots=True)
class CacheEvidence:
    """What an engine reported about its cache, for one prompt."""

    finding: Finding
    cached_blocks: int = 0
    """Leading blocks that it had cached, with EMPTIED; it lacked all later ones of the prompt."""
    intact_event_id: int | None = None
    """An event before the first miss; None = unknown."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A prompt whose announced blocks were not there."""

    block_hashes: bytes
    """Local hashes of the blocks that events announced: little-endian u64s."""
    evidence: CacheEvidence


def is_proven(index: BlockIndex, rank: WorkerRank, prompts: Sequence[Missed]) -> bool:
    """Return whether a rank's events show that it lost the blocks of enough prompts without an event."""
    return sum(_was_computed_again(index, rank, prompt) for prompt in prompts) >= ENOUGH


def _was_computed_again(index: BlockIndex, rank: WorkerRank, prompt: Missed) -> bool:
    lost = len(prompt.block_hashes) // HASH_BYTES - prompt.evidence.cached_blocks
    if lost <= 0:
        return False
    return index.repeated(rank, prompt.block_hashes, first=prompt.evidence.cached_blocks) >= max(1, SHARE * lost)
