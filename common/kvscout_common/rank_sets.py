"""Which worker ranks a process knows, in two numbers that another process can compare with its own."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvscout_common.worker import WorkerRank

MODULUS = 2**64


class RankSet(NamedTuple):
    """A set of worker ranks."""

    ranks: int = 0
    """How many."""
    digest: int = 0
    """Sum, modulo 2^64, of XXH3_64(utf8(worker_id), seed dp_rank) of each."""


def rank_set(ranks: Iterable[WorkerRank]) -> RankSet:
    """Return the set of some ranks."""
    number = total = 0
    for rank in ranks:
        number, total = number + 1, total + _digest_of(rank)
    return RankSet(number, total % MODULUS)


@lru_cache(maxsize=65_536)
def _digest_of(rank: WorkerRank) -> int:
    return xxh3_64_intdigest(rank.worker_id.encode(), rank.dp_rank)
