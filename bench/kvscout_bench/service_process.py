"""Real processes under measurement, services above all: what the system says of their CPU time and memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from kvscout_bench.peer import DriverFailed

READY_SECONDS = 30.0
DRAIN_SECONDS = 60.0
END_SECONDS = 10.0
"""After which a process is killed that does not end."""
TICKS = os.sysconf("SC_CLK_TCK")

T = TypeVar("T")


class MeasuredProcess:
    """A process, and what the system says of it; a context manager that ends it."""

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

    def cpu_seconds(self) -> float:
        """Return the user and system time of the process so far, in seconds."""
        return cpu_of(Path(f"/proc/{self._process.pid}/stat"))

    def cpu_ns(self) -> int:
        """Return the nanoseconds on a core of all its live threads: for runs too short for ticks."""
        return sum(int((task / "schedstat").read_text().split()[0]) for task in self._tasks())

    def _tasks(self) -> Iterable[Path]:
        return Path(f"/proc/{self._process.pid}/task").iterdir()

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


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_of(stat: Path) -> float:
    """Return the user and system time in the text of a `stat` file of /proc, in seconds."""
    # The name of the program, in parentheses, may have spaces.
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_of(pid: int) -> int:
    """Return the memory of a process that is in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(reached: Callable[[], T], what: str, *, within_seconds: float = DRAIN_SECONDS) -> T:
    """Wait until something is truthy and return it; blocks.

    Raises:
        DriverFailed: It is not in time.
    """
    deadline = time.monotonic() + within_seconds
    while not (value := reached()):
        if time.monotonic() > deadline:
            raise DriverFailed(f"{what}: not within {within_seconds:g} s")
        time.sleep(0.02)
    return value
