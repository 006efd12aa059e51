"""What it costs to put a request on each worker of one lane, in blocks.

::

    cached_tokens(w)  = (device + host_weight·host_ext + disk_weight·(disk_ext + external_ext)) · block_size
    prefill_tokens(w) = active_prefill_tokens(w) + max(0, isl - cached_tokens(w))
    prefill_blocks(w) = prefill_tokens(w) / block_size
    decode_blocks(w)  = blocks active on w with this request added (those it shares with active ones count once)
    cost(w)           = overlap_score_weight · prefill_blocks(w) + decode_blocks(w)

Worked example, weight 1: (prefill, decode) = (8, 10), (5, 5), (2, 9) → costs 18, 10, 11 → the second worker.

The formula is that of Dynamo's KV router. Columns in, columns out: one of the two modules a native twin replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvscout_scheduler.active_load import ActiveLoad


@dataclass(frozen=True, slots=True)
class TierWeights:
    """What a cached block of a slower tier is worth, in device blocks."""

    host: float = 0.75
    disk: float = 0.25
    """Also for external storage."""


DEFAULT_TIER_WEIGHTS = TierWeights()


def prefill_tokens(
    load: ActiveLoad, slots: Sequence[int], effective_blocks: Sequence[float], isl_tokens: int, block_size: int
) -> list[float]:
    """Prompt tokens that each worker has to compute, this request's included.

    Args:
        load: Active load of the pool.
        slots: The workers.
        effective_blocks: Weighted overlap of each of them, in blocks.
        isl_tokens: Prompt length.
        block_size: Tokens a block.
    """
    active = load.prefill_tokens
    return [
        active[slot] + (isl_tokens - cached if (cached := blocks * block_size) < isl_tokens else 0)
        for slot, blocks in zip(slots, effective_blocks, strict=True)
    ]


def decode_blocks(load: ActiveLoad, slots: Sequence[int], shared: dict[int, int], request_blocks: int) -> list[int]:
    """Blocks active on each worker with this request added.

    Args:
        load: Active load of the pool.
        slots: The workers.
        shared: Leading blocks of the request that are active on a worker already, by slot.
        request_blocks: Blocks of the request, the partial one included.
    """
    active = load.decode_blocks
    if not load.track_blocks:
        return [0] * len(slots)
    if not shared:
        return [active[slot] + request_blocks for slot in slots]
    get = shared.get
    return [active[slot] + request_blocks - get(slot, 0) for slot in slots]


def costs(
    prefill: Sequence[float], decode: Sequence[int], *, block_size: int, overlap_score_weight: float, scale: float = 1.0
) -> list[float]:
    """Cost of each worker, in blocks.

    Args:
        prefill: `prefill_tokens` of each worker.
        decode: `decode_blocks` of each worker.
        block_size: Tokens a block.
        overlap_score_weight: Weight of prefill against decode; 0 = decode load alone.
        scale: Size of these blocks in units of the blocks that costs are compared in, where block sizes differ.
    """
    if not overlap_score_weight:
        return [scale * blocks for blocks in decode]
    return [
        scale * (overlap_score_weight * (tokens / block_size) + blocks)
        for tokens, blocks in zip(prefill, decode, strict=True)
    ]
