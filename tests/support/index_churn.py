"""Engines that live for ever, for tests of what an index is like after millions of events.

An engine here is a prefix cache of vLLM's kind: multi-turn sessions on shared system prompts, blocks evicted
least recently used first, leaves before their parents, one BlockStored for a run of new blocks and one
BlockRemoved for each evicted block. Its batches are an engine's bytes.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, cycle, takewhile
from typing import NamedTuple

import msgpack

from kvscout_blocks.index.block_index import BlockIndex, IndexStats, WorkerOptions
from kvscout_common.hashing import block_hashes_packed
from kvscout_common.worker import WorkerRank

BLOCK_SIZE = 16
SYSTEM_PROMPTS = 20
SYSTEM_BLOCKS = 8
TURN_BLOCKS = 8
"""Mean length of what a turn adds."""
SESSION_BLOCKS = 64
"""Longer sessions end."""
PREFIX_BLOCKS = 64
UNIQUE_BLOCKS = 12
"""Mean length of what a request adds to a long-lived prefix, and nobody asks for again."""
REQUESTS_A_QUERY = 8

Block = tuple[int, int]
"""Engine hash, content."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the engines do."""

    engines: int
    capacity: int
    """Blocks that one engine holds."""
    max_blocks: int
    """The index's bound, below what all engines hold together."""
    population: int = 0
    """Sessions that there are, each started again and again; 0: every session is a new one."""
    live_sessions: int = 64
    """Sessions of one engine that go on at the same time."""
    prefixes: int = 0
    """Prefixes of one engine that live for ever: each request is one of them and a tail of its own. 0: sessions."""
    requests_a_clear: int = 0
    """Each so-manieth empties an engine's cache, ghosts included, one engine after the other; 0: none does."""

    @property
    def cycle(self) -> int:
        """Requests until each engine was emptied once."""
        return self.engines * max(self.requests_a_clear, 1)


class Sample(NamedTuple):
    """The index at one time."""

    events: int
    stats: IndexStats
    measured: int
    """What the caller measures beside it: memory, objects."""
    cached: int
    """Leading blocks of the prompts asked for that their engines had, since the sample before."""
    found: int
    """How many of them the index knew of."""


class Engine:
    """One engine and its cache."""

    def __init__(self, rng: random.Random, load: Load, number: int) -> None:
        self._rng = rng
        self._load = load
        # Halfway between the clears of the others, and between the ends of cycles.
        self._requests = load.requests_a_clear * (2 * number + 1) // (2 * load.engines)
        self._cached: OrderedDict[int, None] = OrderedDict()
        # Engines share no session, as behind a router that keeps sessions where they are.
        self._serial = count(rng.getrandbits(26))
        self._sessions: list[list[Block]] = [self._new_session() for _ in range(load.live_sessions)]
        self._prefixes = [self._new_prefix() for _ in range(load.prefixes)]

    def _new_session(self) -> list[Block]:
        """The system prompt of a session, and the number of the session as its first content."""
        number = self._rng.randrange(self._load.population) if self._load.population else next(self._serial)
        system = number % SYSTEM_PROMPTS
        prompt: list[Block] = []
        for position in range(SYSTEM_BLOCKS):
            self._extend(prompt, system * SYSTEM_BLOCKS + position)
        # A population repeats itself to the end of its sessions; new sessions differ by their number.
        self._extend(prompt, 1_000_000 + number)
        return prompt

    def _new_prefix(self) -> list[Block]:
        prefix = self._new_session()[-1:]
        while len(prefix) < PREFIX_BLOCKS:
            self._extend(prefix, prefix[-1][1] + 1)
        return prefix

    def _next_prompt(self) -> list[Block]:
        """What is asked for next."""
        rng = self._rng
        if self._prefixes:
            prompt = [*rng.choice(self._prefixes)]
            for _ in range(rng.randrange(1, 2 * UNIQUE_BLOCKS)):
                self._extend(prompt, rng.getrandbits(26))
            return prompt
        at = rng.randrange(self._load.live_sessions)
        prompt = self._sessions[at]
        for _ in range(rng.randrange(1, 2 * TURN_BLOCKS)):
            self._extend(prompt, prompt[-1][1] + 1)
        if len(prompt) > SESSION_BLOCKS:
            self._sessions[at] = self._new_session()
        return prompt

    @staticmethod
    def _extend(prompt: list[Block], content: int) -> None:
        above = prompt[-1][0] if prompt else 0
        prompt.append((hash((above, content)) & (2**64 - 1), content))

    def request(self) -> tuple[list[Block], int, bytes, int]:
        """Serves one request.

        Returns:
            Its prompt, the leading blocks of it that are cached, the payload that the engine publishes, and how many
            events are in it.
        """
        prompt = self._next_prompt()
        cached = sum(1 for _ in takewhile(lambda block: block[0] in self._cached, prompt))
        events: list[list[object]] = []
        self._requests += 1
        if self._load.requests_a_clear and self._requests % self._load.requests_a_clear == 0:
            self._cached.clear()
            events.append(["AllBlocksCleared"])
        events.extend(self._store(prompt))
        while len(self._cached) > self._load.capacity:
            evicted, _ = self._cached.popitem(last=False)
            events.append(["BlockRemoved", [evicted], "GPU"])
        return prompt, cached, msgpack.packb([0.0, events, 0]), len(events)

    def _store(self, prompt: list[Block]) -> Iterator[list[object]]:
        """One event for each run of blocks that are not cached; all are then the latest used, leaves first to go."""
        run: list[Block] = []
        parent: int | None = None
        for block in [*prompt, None]:
            if block is not None and block[0] not in self._cached:
                run.append(block)
                continue
            if run:
                tokens = [token for _, content in run for token in tokens_of(content)]
                hashes = [engine_hash for engine_hash, _ in run]
                yield ["BlockStored", hashes, parent, tokens, BLOCK_SIZE, None, "GPU"]
            run = []
            if block is not None:
                parent = block[0]
        for engine_hash, _ in reversed(prompt):
            self._cached[engine_hash] = None
            self._cached.move_to_end(engine_hash)


def tokens_of(content: int) -> list[int]:
    """The tokens of a block."""
    return [content * BLOCK_SIZE + position & 0xFFFF_FFFF for position in range(BLOCK_SIZE)]


class Request(NamedTuple):
    """What one request of an engine is for an index."""

    worker: WorkerRank
    payload: bytes
    """What the engine publishes."""
    events: int
    query: bytes
    """Local hashes to look up before it is applied; mostly none."""
    cached: int
    """How many leading ones of them the engine has then."""


def ranks(load: Load) -> list[WorkerRank]:
    """The engines."""
    return [WorkerRank(f"w{number}", 0) for number in range(load.engines)]


def requests(load: Load, seed: int) -> Iterator[Request]:
    """What the engines do, for ever: in turns, so that a cycle of clears is always as long."""
    rng = random.Random(seed)
    engines = [
        (worker, Engine(random.Random(rng.getrandbits(64)), load, number)) for number, worker in enumerate(ranks(load))
    ]
    for worker, engine in cycle(engines):
        prompt, cached, payload, events = engine.request()
        query = b""
        if rng.randrange(REQUESTS_A_QUERY) == 0:
            query = block_hashes_packed([token for _, content in prompt for token in tokens_of(content)], BLOCK_SIZE)
        yield Request(worker, payload, events, query, cached)


class Churn:
    """An index under what engines do.

    Args:
        index: Empty.
        load: What the engines do.
        source: Their requests, from the first one.
    """

    def __init__(self, index: BlockIndex, load: Load, source: Iterable[Request]) -> None:
        self._index = index
        self._load = load
        self._source = iter(source)
        self.apply_seconds = 0.0
        self._cached = self._found = 0
        for worker in ranks(load):
            index.add_worker(worker, WorkerOptions(total_kv_blocks=load.capacity))

    def run(self, events: int, samples: int, measure: Callable[[], int]) -> Iterator[Sample]:
        """Applies about so many events, with a sample after each equal share of them and whole cycles of clears."""
        applied = served = 0
        for number in range(1, samples + 1):
            while applied < events * number // samples or served % self._load.cycle:
                applied += self._step(next(self._source))
                served += 1
            # What was dropped by a Cleared is on its way out, and none of the index's content.
            while self._index.maintain(now=0.0):
                pass
            yield Sample(applied, self._index.stats(), measure(), self._cached, self._found)
            self._cached = self._found = 0

    def _step(self, request: Request) -> int:
        if request.query:
            overlap = self._index.find_matches(request.query, now=0.0).by_worker().get(request.worker)
            found = overlap.device if overlap else 0
            assert found <= request.cached, "never more than the engine has"
            self._found += found
            self._cached += request.cached
        start = time.perf_counter()
        result = self._index.apply_payload(request.worker, request.payload, event_id=0)
        self.apply_seconds += time.perf_counter() - start
        assert (result.events, result.faults) == (request.events, 0)
        assert not result.over_capacity, "no engine has more copies than blocks"
        return request.events


def spread(values: list[int]) -> float:
    """Largest value above the smallest one, as a share of it; 0 = flat."""
    low, high = min(values), max(values)
    return high / low - 1 if low else float(high > 0)
