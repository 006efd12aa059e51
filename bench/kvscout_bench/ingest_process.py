"""A real indexer process under measurement, and what the system says of its CPU time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import grpc

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2, workers_pb2
from kvscout_bench.peer import DriverFailed

MODEL = "bench"
BLOCK_SIZE = 16
READY_SECONDS = 30.0
DRAIN_SECONDS = 60.0
TICKS = os.sysconf("SC_CLK_TCK")

T = TypeVar("T")


class IndexerProcess:
    """An indexer on a free port; a context manager that ends it.

    Args:
        flags: Its command line beside the ports.
        environment: Added to this process's.

    Raises:
        DriverFailed: It does not become ready.
    """

    def __init__(self, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "kvscout_indexer.main", "--port", "0", "--metrics-port", "0", *flags]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._process.communicate()
            raise DriverFailed(f"the indexer ended with {self._process.returncode} before it was ready")
        self.address = f"127.0.0.1:{json.loads(line)['port']}"
        self._channel = grpc.insecure_channel(self.address)
        grpc.channel_ready_future(self._channel).result(READY_SECONDS)
        self.stub = indexer_pb2_grpc.IndexerStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._channel.close()
        self._process.terminate()
        self._process.communicate()

    def register(self, worker_id: str, endpoint: str) -> None:
        """Registers a worker of one rank that publishes at an endpoint."""
        worker = workers_pb2.Worker(
            worker_id=worker_id,
            model=MODEL,
            block_size=BLOCK_SIZE,
            dp_size=1,
            event_endpoints=[workers_pb2.EventEndpoint(endpoint=endpoint)],
        )
        self.stub.RegisterWorker(workers_pb2.RegisterWorkerRequest(worker=worker), timeout=READY_SECONDS)

    def sources(self) -> Sequence[indexer_pb2.SourceStatus]:
        """What it says of every worker's events."""
        status: indexer_pb2.IndexerStatus = self.stub.GetStatus(types_pb2.GetStatusRequest(), timeout=READY_SECONDS)
        return status.sources

    def until_applied(self, batches: int) -> None:
        """Waits until so many batches were applied, by all workers together.

        Raises:
            DriverFailed: They are not, or events were lost.
        """

        def applied() -> bool:
            sources = self.sources()
            if any(source.gaps or source.demotions or source.malformed for source in sources):
                raise DriverFailed("the indexer lost events: what it did is not what was to be measured")
            return sum(source.applied for source in sources) >= batches

        until(applied, f"{batches} batches applied")

    def cpu_seconds(self) -> float:
        """User and system time of the process so far, in seconds."""
        return cpu_of(Path(f"/proc/{self._process.pid}/stat"))

    def cpu_by_thread(self) -> dict[str, float]:
        """Seconds of user and system time by thread name; threads of one name are added up."""
        seconds: dict[str, float] = {}
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            try:
                name, used = (task / "comm").read_text().strip(), cpu_of(task / "stat")
            except FileNotFoundError:
                continue  # it ended meanwhile
            seconds[name] = seconds.get(name, 0.0) + used
        return seconds


def cpu_of(stat: Path) -> float:
    """User and system time in the text of a `stat` file of /proc, in seconds."""
    # The name of the program, in parentheses, may have spaces.
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def until(reached: Callable[[], T], what: str, *, within_seconds: float = DRAIN_SECONDS) -> T:
    """Waits until something is truthy and returns it; blocks.

    Raises:
        DriverFailed: It is not in time.
    """
    deadline = time.monotonic() + within_seconds
    while not (value := reached()):
        if time.monotonic() > deadline:
            raise DriverFailed(f"{what}: not within {within_seconds:g} s")
        time.sleep(0.02)
    return value
