"""Events over the engines' own sockets: CPU of the indexer process, and how soon an event is found."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Thread
from typing import Any, Protocol, TypeAlias

import zmq

from kvscout_bench.harness import Case, Goal, Row, alternating, compare, values_of
from kvscout_bench.ingest_process import IndexerProcess
from kvscout_bench.ingest_publisher import BLOCK_SIZE, Engine, scattered
from kvscout_bench.machine import Machine, this_machine
from kvscout_bench.peer import Driver
from kvscout_bench.peer_dynamo import DynamoIndexer
from kvscout_lab.statistics import percentile

NAME, OURS = "zmq", "ours"
PUBLISHER = [sys.executable, "-m", "kvscout_bench.ingest_publisher"]
ENGINES = 64
IDLE_ENGINES = 512
PROBE_SECONDS = 0.02
"""Between two probes."""
PROBE_HASHES = 1 << 63
"""Block hashes of probes begin here."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load published during a measurement."""

    messages: int
    per_second: float
    blocks: int
    probed: bool = False
    """Queries are sent meanwhile."""


FULL_RATE = Load(100_000, 20_000, 4)
BATCHES = Load(2_000, 1_000, 1024)
FLOOD = Load(1_500, 0, 1024, probed=True)
MODEST = Load(10_000, 1_000, 4, probed=True)
QUICK_DIVISOR = 50


def _sample(key: str) -> Callable[[Any], float]:
    return lambda sample: float(sample[key])


def _case(name: str, title: str, unit: str, goal: float | None, *, p99: str = "", **more: Any) -> Case:
    return Case(
        name=f"zmq/{name}",
        title=title,
        unit=unit,
        goal=Goal(goal) if goal is not None else None,
        workload=name,
        value=_sample(name),
        p99=_sample(p99) if p99 else None,
        **more,
    )


_MESSAGES = f"{FULL_RATE.per_second:,.0f} messages/s of 4 blocks, {ENGINES} sockets"
CASES = {
    FULL_RATE: (_case("message", f"CPU a message, {_MESSAGES}", "µs", 8.0, published=(17.0, 25.0)),),
    BATCHES: (_case("block", "CPU a block, batches of 1,024", "µs", 0.15, published=(0.54, 0.68)),),
    FLOOD: (
        _case("flood", "blocks a second, batches of 1,024 as fast as they come", "1/s", None, more_is_better=True),
        _case("find", "FindMatches meanwhile, median", "ms", None, p99="find_p99"),
    ),
    MODEST: (
        _case("visible", "event to FindMatches, median, 1,000 messages/s", "ms", None),
        _case("visible_p99", "event to FindMatches, p99, 1,000 messages/s", "ms", 5.0),
    ),
}
IDLE = _case("idle", f"CPU with {IDLE_ENGINES} silent sockets", "% of a core", None)
ROWS: Sequence[str] = [*(case.name for cases in CASES.values() for case in cases), IDLE.name]


class Indexer(Protocol):
    """An indexer process, ours or the peer's."""

    def register(self, worker_id: str, endpoint: str) -> None:
        """Register a worker of one rank that publishes at an endpoint."""

    def until_applied(self, batches: int) -> float:
        """Wait until `batches` batches were applied; return the seconds that it took to be sure."""

    def holds(self, tokens: Sequence[int]) -> bool:
        """Return whether any worker holds the beginning of a prompt."""

    def cpu_ns(self) -> int:
        """Return time on a core."""


Samples: TypeAlias = Mapping[str, Sequence[Any]]
"""One a round, by side."""

SIDES: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {OURS: IndexerProcess, "dynamo": DynamoIndexer}


def run(
    *, rounds: int, quick: bool, wanted: Callable[[str], bool], say: Callable[[str], None], peer: str = ""
) -> Iterator[Row]:
    """See `ingest.Part.run`."""
    machine = this_machine()
    for load, cases in CASES.items():
        chosen = [case for case in cases if wanted(case.name)]
        if chosen:
            shown = replace(load, messages=max(load.messages // QUICK_DIVISOR, ENGINES)) if quick else load
            samples = _in_turns(peer, rounds, partial(_measure, shown, say=say))
            yield from _rows(chosen, samples, quick, machine)
    if wanted(IDLE.name):
        engines, seconds = (ENGINES, 0.5) if quick else (IDLE_ENGINES, 10.0)
        samples = _in_turns(peer, rounds, partial(_idle, engines, seconds, say=say))
        yield from _rows([IDLE], samples, quick, machine)


def _in_turns(peer: str, rounds: int, measure: Callable[[str], dict[str, float]]) -> Samples:
    """Measure each side in turns; return the samples by side."""
    samples: dict[str, list[Any]] = {OURS: [], **({peer: []} if peer else {})}
    for sides in alternating(list(samples), rounds):
        for side in sides:
            samples[side].append(measure(side))
    return samples


def _rows(cases: Sequence[Case], samples: Samples, quick: bool, machine: Machine) -> Iterator[Row]:
    theirs = next((taken for side, taken in samples.items() if side != OURS), None)
    for case in cases:
        peer = None if theirs is None else values_of(case, theirs)
        yield compare(case, values_of(case, samples[OURS]), peer, judge=not quick, machine=machine)


def _measure(load: Load, side: str, say: Callable[[str], None]) -> dict[str, float]:
    """Publish a load to a new indexer process, and measure its cost and the queries meanwhile."""
    with ExitStack() as stack:
        publisher = stack.enter_context(Driver(PUBLISHER))
        indexer: Indexer = stack.enter_context(SIDES[side]())
        _connect(publisher, indexer, ENGINES, load.blocks)
        publisher.request("prepare", messages=load.messages)
        prober = stack.enter_context(Prober(indexer)) if load.probed else None
        before = indexer.cpu_ns()
        started = time.monotonic()
        published = publisher.request("publish", rate=load.per_second)
        if prober is not None:
            prober.stop()
        to_be_sure = indexer.until_applied(load.messages + (prober.probes if prober is not None else 0))
        seconds = time.monotonic() - started - to_be_sure
        used = (indexer.cpu_ns() - before) / 1e9
        late_ms = published["late_p99_ms"]
        say(f"{side}: {load.messages} messages in {published['seconds']:.2f} s, late by {late_ms:.1f} ms at p99")
    blocks = load.messages * load.blocks
    sample = {
        "message": used / load.messages * 1e6,
        "block": used / blocks * 1e6,
        "flood": blocks / seconds,
    }
    if prober is not None:
        sample |= prober.sample()
    return sample


def _idle(engines: int, seconds: float, side: str, say: Callable[[str], None]) -> dict[str, float]:
    with ExitStack() as stack:
        publisher = stack.enter_context(Driver(PUBLISHER))
        indexer: Indexer = stack.enter_context(SIDES[side]())
        _connect(publisher, indexer, engines, 4)
        before = indexer.cpu_ns()
        say(f"{side}: {engines} sockets, nothing comes")
        time.sleep(seconds)
        return {"idle": (indexer.cpu_ns() - before) / 1e9 / seconds * 100}


def _connect(publisher: Driver, indexer: Indexer, engines: int, blocks: int) -> None:
    for number, endpoint in enumerate(publisher.request("open", sockets=engines, blocks=blocks)["endpoints"]):
        indexer.register(f"worker-{number}", endpoint)
    publisher.request("await")


class Prober:
    """An engine of its own in a thread: publishes a block from time to time and queries until it is found.

    Args:
        indexer: Indexer to query.
        register: Makes it known, by its worker id and where it publishes; None = at the indexer.
    """

    def __init__(self, indexer: Indexer, register: Callable[[str, str], None] | None = None) -> None:
        self.probes = 0
        self._indexer = indexer
        self._register = register or indexer.register
        self._visible: list[float] = []
        self._finds: list[float] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._engine = Engine(self._context, 1, scattered(PROBE_HASHES))
        self._random = random.Random(2)
        self._ended = Event()
        self._thread = Thread(target=self._run, name="prober")

    def __enter__(self) -> Prober:
        self._register("probe", self._engine.endpoint)
        self._engine.until_subscribed()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._context.destroy(linger=0)

    def stop(self) -> None:
        """End after the probe that is out."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def sample(self) -> dict[str, float]:
        """Return milliseconds: `visible` from publishing to being found, `find` of one FindMatches."""
        visible, finds = sorted(self._visible), sorted(self._finds)
        return {
            "visible": (percentile(visible, 50) or 0.0) * 1e3,
            "visible_p99": (percentile(visible, 99) or 0.0) * 1e3,
            "find": (percentile(finds, 50) or 0.0) * 1e3,
            "find_p99": (percentile(finds, 99) or 0.0) * 1e3,
        }

    def _run(self) -> None:
        while not self._ended.is_set():
            tokens = [self._random.getrandbits(17) for _ in range(BLOCK_SIZE)]
            self._engine.prepare_prompt(tokens)
            published = time.perf_counter()
            self._engine.send()
            self.probes += 1
            found = False
            while not found:
                began = time.perf_counter()
                found = self._indexer.holds(tokens)
                self._finds.append(time.perf_counter() - began)
            self._visible.append(time.perf_counter() - published)
            self._ended.wait(PROBE_SECONDS)
