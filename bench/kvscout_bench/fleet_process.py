"""Thousands of engines in one native process, and an indexer process that reads them."""

from __future__ import annotations

import threading
import time
import urllib.request
from array import array
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, NamedTuple, Self

from kvscout.v1 import indexer_pb2, types_pb2, workers_pb2
from kvscout_bench.index_bench_serve import mix
from kvscout_bench.peer import Driver, native_driver
from kvscout_bench.service_process import BLOCK_SIZE, MODEL, READY_SECONDS, IndexerProcess, cpu_ns_of, until
from kvscout_bench.strangers import DriverFailed
from kvscout_common.hashing import block_hashes
from kvscout_lab.statistics import percentile

FIRST_ADDRESS = 127 << 24 | 64 << 16 | 1
"""127.64.0.1, that of rank 0; `peers/fleet/src/engines.rs` has the same."""
SYSTEM_BLOCKS = 64
PROMPT_BLOCKS = 64
EVENT_BLOCKS = 4
VOCABULARY_BITS = 17
PROBE_SECONDS = 0.02
"""Between two FindMatches of a probe."""
STATUS_SECONDS = 2.0
"""Between two looks at the status of all sources, which is itself work for an indexer."""
TOP_K = 64
STATUS_LIMIT_SECONDS = 60.0
REGISTERED_AT_ONCE = 64


class Fleet(NamedTuple):
    """A number of ranks, and what each has published."""

    ranks: int
    batches: int
    """Each has published before an indexer comes."""
    capacity: int
    """Blocks of a rank's cache beside the system prompt."""
    dp_size: int = 1
    """Ranks of a worker."""

    @property
    def blocks(self) -> int:
        """Return the blocks of all ranks together."""
        return self.ranks * (SYSTEM_BLOCKS + min(self.capacity, (self.batches - 1) * EVENT_BLOCKS))


class Engines:
    """The process that plays a fleet's engines; a context manager that ends it.

    Raises:
        DriverFailed: It cannot be built or started.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.published = fleet.ranks * fleet.batches
        """Batches of ranks that were not ended."""
        self._driver = Driver(native_driver("fleet"))
        self.request = self._driver.request
        shape = {"blocks": EVENT_BLOCKS, "system": SYSTEM_BLOCKS, "capacity": fleet.capacity, "dp": fleet.dp_size}
        opened = self.request("open", ranks=fleet.ranks, **shape)
        self._ports = opened["port"], opened["replay_port"]
        self.request("advance", batches=fleet.batches)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.close()

    def publish(self, messages: int, *, per_second: int = 0, burst: int = 1, ranks: int = 0) -> dict[str, Any]:
        """Publish batches of ranks in turn; blocks until they are sent.

        Args:
            messages: How many.
            per_second: Their rate; 0 = as fast as they are read.
            burst: Of one rank at a time.
            ranks: Of the first ranks; 0 = of all.
        """
        self.published += messages
        load = {"messages": messages, "rate": per_second, "burst": burst}
        return dict(self.request("publish", first=0, count=ranks or self.fleet.ranks, **load))

    def restart(self, ranks: int) -> None:
        """End the first ranks as kill -9 does, start them again, empty; each publishes once it is subscribed to."""
        self.request("kill", first=0, count=ranks)
        self.request("revive", first=0, count=ranks)
        until(self._all_subscribed, "every rank is subscribed to")
        self.publish(ranks, ranks=ranks)

    def _all_subscribed(self) -> bool:
        return bool(self.request("status")["subscribed"] == self.fleet.ranks)

    def cpu_ns(self) -> int:
        """Return the nanoseconds that the process was on a core."""
        return cpu_ns_of(self._driver.pid)

    def workers(self) -> Iterator[workers_pb2.Worker]:
        """Yield the registrations."""
        size = self.fleet.dp_size
        for number, first in enumerate(range(0, self.fleet.ranks, size)):
            yield workers_pb2.Worker(
                worker_id=f"worker-{number:05}",
                model=MODEL,
                block_size=BLOCK_SIZE,
                dp_size=size,
                total_kv_blocks=self.fleet.capacity + SYSTEM_BLOCKS,
                event_endpoints=map(self._endpoint, range(first, first + size)),
            )

    def _endpoint(self, rank: int) -> workers_pb2.EventEndpoint:
        host = ".".join(map(str, (FIRST_ADDRESS + rank).to_bytes(4, "big")))
        port, replay_port = self._ports
        return workers_pb2.EventEndpoint(
            dp_rank=rank % self.fleet.dp_size,
            endpoint=f"tcp://{host}:{port}",
            replay_endpoint=f"tcp://{host}:{replay_port}",
        )


class FleetIndexer(IndexerProcess):
    """An indexer of a fleet. Arguments and errors as of `ServiceProcess`."""

    def __init__(self, fleet: Fleet, *flags: str) -> None:
        self.began = time.perf_counter()
        super().__init__(*flags)
        self._fleet = fleet
        self._metrics = f"http://127.0.0.1:{self.ready['metrics_port']}/metrics"

    def register_all(self, engines: Engines) -> None:
        """Register every worker, several at a time."""
        workers = engines.workers()
        while some := list(islice(workers, REGISTERED_AT_ONCE)):
            requests = (workers_pb2.RegisterWorkerRequest(worker=worker) for worker in some)
            calls = [self.stub.RegisterWorker.future(request, timeout=READY_SECONDS) for request in requests]
            for call in calls:
                call.result()

    def find(self, request: indexer_pb2.FindMatchesRequest) -> indexer_pb2.FindMatchesResponse:
        """Return the answer to a request."""
        answer: indexer_pb2.FindMatchesResponse = self.stub.FindMatches(request, timeout=READY_SECONDS)
        return answer

    def until_live(self, *, batches: int = 0, restarted: int = 0, within_seconds: float) -> float:
        """Wait until every source is live; return the seconds that it took to be sure.

        Args:
            batches: So many are applied.
            restarted: So many ranks are known to have started again.
            within_seconds: Longest wait.

        Raises:
            DriverFailed: They are not.
        """
        took = 0.0
        deadline = time.monotonic() + within_seconds
        while True:
            began = time.monotonic()
            sources = self.status().sources
            states = [indexer_pb2.SourceState.Name(source.state) for source in sources]
            applied, resets = sum(source.applied for source in sources), sum(source.resets > 0 for source in sources)
            took = time.monotonic() - began
            live = len(states) == self._fleet.ranks == states.count("SOURCE_STATE_LIVE")
            if live and applied >= batches and resets >= restarted:
                return took
            if time.monotonic() > deadline:
                counts = {state: states.count(state) for state in set(states)}
                seen = f"{applied} of {batches} batches, {resets} of {restarted} restarts"
                raise DriverFailed(f"{seen}, {counts}: not within {within_seconds:g} s")
            time.sleep(min(STATUS_SECONDS, max(0.05, 10 * took)))

    def status(self) -> indexer_pb2.IndexerGetStatusResponse:
        """Return the status of all sources."""
        status: indexer_pb2.IndexerGetStatusResponse = self.stub.GetStatus(
            types_pb2.GetStatusRequest(), timeout=STATUS_LIMIT_SECONDS
        )
        return status

    def scrape(self) -> int:
        """Read the metrics page; return its bytes."""
        with urllib.request.urlopen(self._metrics, timeout=STATUS_LIMIT_SECONDS) as page:
            return len(page.read())


class Probe:
    """FindMatches of one rank's prompts beside something else; a context manager.

    Args:
        indexer: What is asked.
    """

    def __init__(self, indexer: FleetIndexer) -> None:
        self._indexer = indexer
        self._request = find_request()
        self._ended = threading.Event()
        self._seconds: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the milliseconds that a FindMatches took."""
        return (percentile(sorted(self._seconds), percent) or 0.0) * 1e3

    def _run(self) -> None:
        ended = False
        while not ended:
            began = time.perf_counter()
            self._indexer.find(self._request)
            self._seconds.append(time.perf_counter() - began)
            ended = self._ended.wait(PROBE_SECONDS)


def find_request(rank: int = 0, prompt: int = 0) -> indexer_pb2.FindMatchesRequest:
    """Return a request for the system prompt and one of a rank's prompts behind it."""
    hashes = block_hashes(prompt_tokens(rank, prompt), BLOCK_SIZE)
    return indexer_pb2.FindMatchesRequest(model=MODEL, block_hashes=hashes, top_k=TOP_K)


def prompt_tokens(rank: int, prompt: int) -> array[int]:
    """Return the tokens of the system prompt and of one of a rank's prompts behind it."""
    first = prompt * PROMPT_BLOCKS
    names = chain(range(SYSTEM_BLOCKS), (1 << 63 | rank << 36 | first + block for block in range(PROMPT_BLOCKS)))
    return array("I", (token for name in names for token in tokens_of(name)))


def tokens_of(name: int) -> Iterator[int]:
    """Yield the tokens of a block by its name; see `peers/fleet/src/events.rs`."""
    for place in range(BLOCK_SIZE):
        drawn = mix(name ^ mix(place // 3))
        yield drawn >> place % 3 * VOCABULARY_BITS & (1 << VOCABULARY_BITS) - 1
