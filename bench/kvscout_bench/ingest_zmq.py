"""Events over the engines' own sockets: CPU of the indexer process, and how soon an event is found."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from threading import Event, Thread
from typing import Any, Protocol, Self

import zmq

from kvscout_bench.harness import OURS, Say
from kvscout_bench.ingest_publisher import BLOCK_SIZE, Engine, scattered
from kvscout_bench.peer import Driver
from kvscout_bench.peer_dynamo import DynamoIndexer
from kvscout_bench.service_process import IndexerProcess
from kvscout_lab.statistics import percentile

PUBLISHER = [sys.executable, "-m", "kvscout_bench.ingest_publisher"]
ENGINES = 64
IDLE_ENGINES = 512
PROBE_SECONDS = 0.02
"""Interval of probes."""
PROBE_HASHES = 1 << 63
"""First block hash of probes."""
QUICK_DIVISOR = 50


@dataclass(frozen=True, slots=True)
class Load:
    """Batches that are published during a measurement."""

    messages: int
    per_second: float
    """0: as fast as possible."""
    blocks: int
    """Blocks of each message."""
    probed: bool = False
    """Queries are sent meanwhile."""

    def short(self) -> Load:
        """Return the load of a quick run."""
        return replace(self, messages=max(self.messages // QUICK_DIVISOR, ENGINES))


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


SIDES: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {OURS: IndexerProcess, "dynamo": DynamoIndexer}


def ingest(load: Load, say: Say, side: str) -> dict[str, float]:
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


def idle(quick: bool, say: Say, side: str) -> dict[str, float]:
    """Measure the CPU of an indexer process whose sockets are silent."""
    engines, seconds = (ENGINES, 0.5) if quick else (IDLE_ENGINES, 10.0)
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
        register: Registers it, by worker id and endpoint; None = at the indexer.
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

    def __enter__(self) -> Self:
        self._register("probe", self._engine.endpoint)
        self._engine.until_subscribed()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._context.destroy(linger=0)

    def stop(self) -> None:
        """End after the current probe."""
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
