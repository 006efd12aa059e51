"""Fixture and workloads of the index benchmark for drivers in Python; `bench/README.md` defines them.

It needs the standard library alone: a peer's driver runs in the peer's environment.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
VOCABULARY_MASK = 0x1FFFF_0001FFFF
"""Both halves of a word modulo 2^17."""
TOKEN_PAIRS = 8
GROUP = 64
REMEMBERED_PROMPTS = 128
"""Prompts whose tokens stay in memory: making them takes a hundred times as long as a find."""
CHECKED_QUERIES = 256
SLOW_NS = 100_000
"""A call that took longer may have been interrupted by another process, which is looked into."""

TOKENS, ENGINE_HASHES, HOLDERS, LENGTHS, QUERIES = range(5)


class CallTimes(NamedTuple):
    """Calls of work on a whole rank, by the CPU time of the thread that made them."""

    number: int
    longest_ns: int
    total_ns: int


class BenchedIndex(Protocol):
    """Index under measurement. Workers are numbers; an index that names them otherwise translates."""

    name: str
    version: str

    def local_hashes(self, tokens: bytes) -> Sequence[int]:
        """Return the local hashes of little-endian u32 tokens, 16 a block."""
        ...

    def event(self, parent: int | None, local: Sequence[int], engine: Sequence[int]) -> Any:
        """Return a Stored event in the form that `store` takes."""
        ...

    def store(self, worker: int, event: Any) -> None:
        """Apply an event of a worker."""
        ...

    def request(self, local: array[int]) -> Any:
        """Return a new copy of block hashes in the form that `find` takes."""
        ...

    def token_request(self, tokens: bytes) -> Any:
        """Return a new copy of tokens in the form that `find_tokens` takes."""
        ...

    def find(self, request: Any) -> Any:
        """Return the overlaps of block hashes."""
        ...

    def find_tokens(self, request: Any) -> Any:
        """Return the overlaps of tokens."""
        ...

    def overlaps(self, answer: Any) -> Iterable[tuple[int, int]]:
        """Return (worker, blocks) of an answer."""
        ...

    def rank_work(self, workload: str, worker: int) -> Callable[[], CallTimes] | None:
        """Prepare work on all blocks of a worker; return what does it on another thread. None: not supported."""
        ...

    def wait_for_writers(self, worker: int) -> None:
        """Wait for whoever changes the index."""
        ...


class Fixture:
    """Contents and queries of the index, from one seed."""

    def __init__(self, arguments: dict[str, str]) -> None:
        self.prompts, self.blocks, self.holders = (int(arguments[key]) for key in ("prompts", "blocks", "holders"))
        self.event_blocks, self.workers = int(arguments["event_blocks"]), int(arguments["workers"])
        self.lengths = arguments["lengths"]
        seed = int(arguments["seed"])
        self._tokens: dict[int, bytes] = {}
        self._keys = [mix((seed + stream * GOLDEN) & MASK) for stream in range(QUERIES + 1)]

    def word(self, stream: int, i: int) -> int:
        """Return the i-th word of a stream."""
        return mix((self._keys[stream] + i * GOLDEN) & MASK)

    def tokens(self, prompt: int) -> bytes:
        """Return tokens of a prompt as little-endian u32s."""
        if prompt in self._tokens:
            return self._tokens[prompt]
        first = prompt * self.blocks
        words = (self.word(TOKENS, first + block) & VOCABULARY_MASK for block in range(self.blocks))
        tokens = b"".join(word.to_bytes(8, "little") * TOKEN_PAIRS for word in words)
        if len(self._tokens) < REMEMBERED_PROMPTS:
            self._tokens[prompt] = tokens
        return tokens

    def engine_hashes(self, prompt: int) -> list[int]:
        """Return the engine hashes of a prompt's blocks."""
        return [self.word(ENGINE_HASHES, prompt * self.blocks + block) for block in range(self.blocks)]

    def held(self, prompt: int) -> Iterator[tuple[int, int]]:
        """Yield (worker, blocks) of the holders of a prompt."""
        workers = list(range(self.workers))
        longest = self.word(LENGTHS, prompt * 1024 + 1023) % self.holders
        for holder in range(self.holders):
            swapped = holder + self.word(HOLDERS, prompt * 1024 + holder) % (self.workers - holder)
            workers[holder], workers[swapped] = workers[swapped], workers[holder]
            whole = self.lengths == "equal" or (self.lengths == "unequal" and holder == longest)
            some = 1 + self.word(LENGTHS, prompt * 1024 + holder) % self.blocks
            yield workers[holder], self.blocks if whole else some

    def queried(self, query: int) -> int:
        """Return the prompt of a query."""
        return self.word(QUERIES, query) % self.prompts

    def missed(self, query: int) -> int:
        """Return a prompt that is not held."""
        return self.prompts + self.word(QUERIES, query) % 64


class Bench:
    """A loaded index."""

    def __init__(self, index: BenchedIndex, fixture: Fixture) -> None:
        self._index, self._fixture = index, fixture
        self._local: dict[int, array[int]] = {}
        self._next_query = 0
        self._rank_is_stored = False
        self._second = ThreadPoolExecutor(1)
        # Here: who pins threads does so when all is loaded.
        self._second.submit(int).result()
        empty = sorted(self._time(lambda _: None, None) for _ in range(1001))
        self._empty_ns = empty[len(empty) // 2]

    def load(self) -> dict[str, Any]:
        """Store the fixture."""
        before, started = resident_bytes(), time.perf_counter()
        memberships = sum(self._fill())
        seconds = time.perf_counter() - started
        return {"memberships": memberships, "seconds": seconds, "rss_before": before, "rss_after": resident_bytes()}

    def _fill(self) -> Iterator[int]:
        fixture, size = self._fixture, self._fixture.event_blocks
        for first in range(0, fixture.prompts, GROUP):
            group = [
                (self._local_of(prompt), fixture.engine_hashes(prompt), list(fixture.held(prompt)))
                for prompt in range(first, min(fixture.prompts, first + GROUP))
            ]
            for start in range(0, fixture.blocks, size):
                for local, engine, held in group:
                    events: dict[int, Any] = {}
                    for worker, length in held:
                        end = min(length, start + size)
                        if end <= start:
                            continue
                        if end not in events:
                            parent = engine[start - 1] if start else None
                            events[end] = self._index.event(parent, local[start:end], engine[start:end])
                        self._index.store(worker, events[end])
                        yield end - start

    def _local_of(self, prompt: int) -> array[int]:
        if prompt not in self._local:
            self._local[prompt] = array("Q", self._index.local_hashes(self._fixture.tokens(prompt)))
        return self._local[prompt]

    def _operation(self, workload: str) -> tuple[Callable[[int], Any], Callable[[Any], Any]] | None:
        """Return what makes a query's request, and the call to be timed."""
        index, fixture = self._index, self._fixture
        match workload:
            case "find_hashes":
                return lambda query: index.request(self._local_of(fixture.queried(query))), index.find
            case "find_tokens":
                return lambda query: index.token_request(fixture.tokens(fixture.queried(query))), index.find_tokens
            case "find_miss":
                return lambda query: index.token_request(fixture.tokens(fixture.missed(query))), index.find_tokens
        return None

    def check(self, workload: str) -> dict[str, Any]:
        """Return a checksum of the first answers."""
        operation = self._operation(workload)
        if operation is None:
            return {"unsupported": workload}
        make, find = operation
        total = 0
        for query in range(CHECKED_QUERIES):
            for worker, overlap in self._index.overlaps(find(make(query))):
                total += (worker + 1) * overlap * (query + 1)
        return {"answers": total & MASK}

    def run(self, workload: str, seconds: float) -> dict[str, Any]:
        """Time a workload."""
        operation = self._operation(workload)
        if operation is None:
            return self._run_beside(workload)
        make, find = operation
        times: list[int] = []
        started = time.perf_counter()
        warm, end = started + seconds / 10, started + seconds
        while not times or time.perf_counter() < end:
            request = make(self._next_query)
            self._next_query += 1
            elapsed = self._time(find, request)
            if time.perf_counter() >= warm:
                times.append(max(0, elapsed - self._empty_ns))
        return _report(workload, times)

    def _run_beside(self, workload: str) -> dict[str, Any]:
        """Time finds while another thread works on a whole rank, and how long its work keeps others waiting."""
        index, fixture = self._index, self._fixture
        if not workload.startswith("rank_"):
            return {"unsupported": workload}
        if not self._rank_is_stored:
            self._rank_is_stored = True
            for prompt in range(fixture.prompts):
                index.store(fixture.workers, index.event(None, self._local_of(prompt), fixture.engine_hashes(prompt)))
        work = index.rank_work(workload, fixture.workers)
        if work is None:
            return {"unsupported": workload}
        finds: list[int] = []
        waits: list[int] = []
        interrupted = _interruptions()
        done = self._second.submit(work)
        while not finds or not done.done():
            request = index.request(self._local_of(fixture.queried(self._next_query)))
            self._next_query += 1
            found, waited = self._time(index.find, request), self._time(index.wait_for_writers, fixture.workers)
            if max(found, waited) >= SLOW_NS and interrupted != (interrupted := _interruptions()):
                continue
            finds.append(max(0, found - self._empty_ns))
            waits.append(max(0, waited - self._empty_ns))
        calls = done.result()
        return {
            **_report(workload, finds),
            "calls": calls.number,
            "call_cpu_ns": calls.longest_ns,
            "work_cpu_ns": calls.total_ns,
            "wait_ns": max(waits, default=0),
        }

    @staticmethod
    def _time(call: Callable[[Any], Any], request: Any) -> int:
        started = time.perf_counter_ns()
        call(request)
        return time.perf_counter_ns() - started


def _report(workload: str, times: list[int]) -> dict[str, Any]:
    times.sort()
    last = len(times) - 1
    return {
        "workload": workload,
        "operations": len(times),
        "median_ns": times[round(last * 0.5)],
        "p99_ns": times[round(last * 0.99)],
        "max_ns": times[last],
        "rate": len(times) * 1e9 / max(1, sum(times)),
    }


def _interruptions() -> int:
    """Return the number of involuntary context switches of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class IndexDriver:
    """Commands of a driver of the index benchmark.

    Args:
        make: Makes an empty index for a number of workers.
    """

    def __init__(self, make: Callable[[int], BenchedIndex]) -> None:
        self._make = make
        self._bench: Bench | None = None

    def __call__(self, verb: str, arguments: dict[str, str]) -> dict[str, Any]:
        """See `driver_commands.Handle`."""
        bench = self._bench
        if verb == "hello":
            index = self._make(0)
            return {"driver": index.name, "version": index.version}
        if verb == "quit":
            return {}
        if verb == "load" and bench is None:
            return self._load(Fixture(arguments))
        if bench is not None and verb == "check":
            return bench.check(arguments["workload"])
        if bench is not None and verb == "run":
            return bench.run(arguments["workload"], float(arguments["seconds"]))
        raise ValueError("not a command now")

    def _load(self, fixture: Fixture) -> dict[str, Any]:
        self._bench = Bench(self._make(fixture.workers), fixture)
        loaded = self._bench.load()
        # The loaded index stays: the collector need not look at it while something is timed.
        gc.freeze()
        return loaded


def mix(x: int) -> int:
    """Return a bijection of 64-bit numbers that looks random."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
