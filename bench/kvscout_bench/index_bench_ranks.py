"""Work on a whole rank of our index, call by call, as the services do it while queries go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import TypeVar

import kvscout_native
from kvscout_bench.index_bench_serve import CallTimes, mix
from kvscout_blocks.bytes.events import EventBatch, Stored
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.index.native import NativeIndex
from kvscout_common.worker import PoolKey, WorkerRank

MAINTAIN_BUDGET = 256
"""As the indexer's."""
TTL_SECONDS = 60.0
EVENT_BLOCKS = 4
PROMPT_EVENTS = 4

R = TypeVar("R")


class RankWorkload(StrEnum):
    """Operations on all blocks of a rank."""

    LOAD = "rank_load"
    DEMOTE = "rank_demote"
    EXPIRE = "rank_expire"
    DUMP = "rank_dump"
    REPLACE = "rank_replace"


class BenchedRank:
    """A rank that is prepared and worked on, run after run.

    Args:
        index: Whose.
        pool: The index's key.
        rank: Holds what is to be worked on.
    """

    def __init__(self, index: NativeIndex, pool: PoolKey, rank: WorkerRank) -> None:
        self.now = 0.0
        """The index's clock."""
        self._index, self._pool, self._rank = index, pool, rank
        cut = index.cut(rank)
        messages = cut.messages(pool, history_incomplete=False) if cut is not None else None
        if messages is None:
            raise LookupError(f"{rank} holds nothing")
        self._messages = messages

    def prepare(self, workload: RankWorkload) -> Callable[[], CallTimes]:
        """Bring the rank to where the workload begins; what it returns does the work."""
        index, rank = self._index, self._rank
        if workload is RankWorkload.REPLACE:
            return self._prepare_replacing()
        if workload is RankWorkload.LOAD:
            index.reset(rank)
        else:
            index.load_messages(self._messages)
        if workload is RankWorkload.EXPIRE:
            index.demote(rank, ttl_seconds=TTL_SECONDS, now=self.now)
        while index.maintain(now=self.now):
            pass
        calls = {
            RankWorkload.LOAD: self._load,
            RankWorkload.DEMOTE: self._demote,
            RankWorkload.EXPIRE: self._expire,
            RankWorkload.DUMP: self._dump,
        }[workload]
        return lambda: _timed(calls())

    def _prepare_replacing(self) -> Callable[[], CallTimes]:
        """Prepare the same rank in a full index of its own: as many other blocks come, an event a call."""
        known = self._index.worker_stats(self._rank)
        blocks = known.blocks if known is not None else 0
        bounded = NativeIndex(self._pool.block_size, max_blocks=blocks)
        bounded.add_worker(self._rank, WorkerOptions())
        bounded.load_messages(self._messages)

        def calls() -> Iterator[Callable[[], object]]:
            # Numbers that the fixture, whose hashes are spread over all of them, has none of in practice.
            for prompt in range(0, blocks, EVENT_BLOCKS * PROMPT_EVENTS):
                ends = range(prompt, prompt + EVENT_BLOCKS * PROMPT_EVENTS + 1, EVENT_BLOCKS)
                for start, end in pairwise(ends):
                    hashes = tuple(mix(number) for number in range(start, end))
                    parent = mix(start - 1) if start > prompt else None
                    batch = EventBatch((Stored(hashes, parent, block_size=self._pool.block_size, local_hashes=hashes),))
                    yield partial(bounded.apply, self._rank, batch)

        return lambda: _timed(calls())

    def _load(self) -> Iterator[Callable[[], object]]:
        # Reading the messages needs nothing of the index but room for what they have.
        loading = kvscout_native.Loading.of_messages(self._index.core, self._messages)
        yield from _until_done(loading.step)
        yield loading.commit

    def _demote(self) -> Iterator[Callable[[], object]]:
        index, rank = self._index, self._rank
        begun = []
        yield lambda: begun.append(index.demotion(rank, ttl_seconds=TTL_SECONDS, now=self.now))
        yield from _until_done(begun[0].step)

    def _expire(self) -> Iterator[Callable[[], object]]:
        self.now += TTL_SECONDS
        yield from _until_done(lambda: self._index.maintain(now=self.now, budget=MAINTAIN_BUDGET))

    def _dump(self) -> Iterator[Callable[[], object]]:
        begun = []
        yield lambda: begun.append(self._index.cut(self._rank))
        (cut,) = begun
        if cut is None:
            return
        yield from _until_done(cut.step)
        # Beside the index: it has nothing left to say.
        cut.messages(self._pool, history_incomplete=False)


def _until_done(step: Callable[[], bool]) -> Iterator[Callable[[], object]]:
    more = [True]
    while more.pop():
        yield lambda: more.append(step())


def _timed(calls: Iterator[Callable[[], object]]) -> CallTimes:
    """Make calls one after the other, and times each by its thread's CPU time."""
    number = longest_ns = total_ns = 0
    for call in calls:
        started = time.thread_time_ns()
        call()
        elapsed = time.thread_time_ns() - started
        number, longest_ns, total_ns = number + 1, max(longest_ns, elapsed), total_ns + elapsed
    return CallTimes(number, longest_ns, total_ns)
