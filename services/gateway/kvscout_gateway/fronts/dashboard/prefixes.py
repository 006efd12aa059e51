"""Which workers hold the prefixes that the last prompts share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvscout_common.plain_text import printable
from kvscout_gateway.request.recent import MAX_BLOCKS, PromptPrefix
from kvscout_gateway.values.prompt import HASH_BYTES

if TYPE_CHECKING:
    from kvscout_gateway.upstreams.interfaces import Indexer
    from kvscout_gateway.values.overlaps import Columns

SHOWN: Final = 12
"""Prefixes: those whose blocks, times the requests that begin with them, are most."""
MAX_WORKERS: Final = 64
"""Worker ranks that are sent, those that hold most first."""
LENGTHS: Final = tuple(sorted({2**power * step // 4 for power in range(12) for step in (4, 5, 6, 7)}))
"""Lengths in blocks at which prompts are compared: four from each power of two to the next."""


class SharedPrefix(NamedTuple):
    """A prefix with which several of the last prompts begin."""

    prefix: PromptPrefix
    requests: int

    @property
    def blocks(self) -> int:
        """Its length."""
        return len(self.prefix.block_hashes) // HASH_BYTES


def shared_prefixes(prompts: Iterable[PromptPrefix]) -> list[SharedPrefix]:
    """Return the prefixes that most blocks of prompts belong to; of those with equal requests only the longest."""
    counts: dict[PromptPrefix, int] = {}
    longer: dict[PromptPrefix, int] = {}
    """Most requests of any longer one."""
    chains: list[list[PromptPrefix]] = []
    for prompt in prompts:
        blocks = min(len(prompt.block_hashes) // HASH_BYTES, MAX_BLOCKS)
        chain = [
            prompt._replace(block_hashes=prompt.block_hashes[: HASH_BYTES * length])
            for length in LENGTHS
            if length <= blocks
        ]
        for one in chain:
            counts[one] = counts.get(one, 0) + 1
        chains.append(chain)
    for chain in chains:
        for shorter, one in pairwise(chain):
            longer[shorter] = max(longer.get(shorter, 0), counts[one])
    found = [
        SharedPrefix(one, requests)
        for one, requests in counts.items()
        if requests > 1 and requests > longer.get(one, 0)
    ]
    return sorted(found, key=lambda one: one.blocks * one.requests, reverse=True)[:SHOWN]


async def heat_map(prompts: Iterable[PromptPrefix], indexer: Indexer) -> dict[str, Any]:
    """Return how much of each shared prefix each worker rank holds, as the indexers say now."""
    shared = shared_prefixes(prompts)
    held: dict[tuple[str, str, int], list[int]] = {}
    missed = ""
    for place, one in enumerate(shared):
        asked = one.prefix
        found = await indexer.match(asked.model, asked.tenant, {asked.pool: asked.block_hashes})
        missed = missed or next(iter(found.problems.values()), "")
        rows = found.rows.get(asked.pool)
        for worker_id, rank, blocks in _reaches(rows.columns) if rows is not None else ():
            held.setdefault((asked.tenant, worker_id, rank), [0] * len(shared))[place] = blocks
    workers = sorted(held.items(), key=lambda item: (-sum(item[1]), item[0]))
    return {
        "prefixes": [
            {
                "tenant": printable(one.prefix.tenant),
                "model": printable(one.prefix.model),
                "blocks": one.blocks,
                "tokens": one.blocks * one.prefix.pool.block_size,
                "requests": one.requests,
                "holders": sum(blocks[place] >= one.blocks for blocks in held.values()),
            }
            for place, one in enumerate(shared)
        ],
        "rows": [[printable(f"{name[1]}/{name[2]}", 300), *blocks] for name, blocks in workers[:MAX_WORKERS]],
        "workers": len(workers),
        "missed": printable(missed, 500),
    }


def _reaches(columns: Columns) -> Iterable[tuple[str, int, int]]:
    """Yield the workers that hold a part, on whatever tier."""
    ids, ranks, *tiers = columns
    for row, worker_id in enumerate(ids):
        blocks = max((tier[row] for tier in tiers[:4] if tier), default=0)
        if blocks:
            yield worker_id, ranks[row] if ranks else 0, blocks
