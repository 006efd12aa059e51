"""A real NATS server with JetStream for tests: on a free port, with a store of its own, which can be killed."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.free_ports import free_ports

DEADLINE_SECONDS = 60.0


def server_binary() -> str:
    """The nats-server of the environment that runs the tests, else the one on the PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "nats-server is missing: the extra [embedded] brings it"
    return found


class NatsServer:
    """A nats-server process; the port and the store outlive a `kill`, so that `start` is a restart."""

    def __init__(self, store: Path, *, extra_flags: tuple[str, ...] = (), jetstream: bool = True) -> None:
        (self.port,) = free_ports(1)
        self.store = store
        self.jetstream = jetstream
        """From the next start on."""
        self._flags = extra_flags
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return f"nats://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Starts it and waits until it accepts clients."""
        stored = ("-js", "-sd", str(self.store)) if self.jetstream else ()
        self._process = await asyncio.create_subprocess_exec(
            server_binary(), "-a", "127.0.0.1", "-p", str(self.port), *stored, *self._flags,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                assert self._process.returncode is None, f"nats-server exited with {self._process.returncode}"
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.02)
                    continue
                writer.close()
                return

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends it, without a word by default."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
            await self._process.wait()

    def pause(self) -> None:
        """SIGSTOP; returns when every thread stands still: until then some of them still answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")
        while tasks.is_dir() and not all(_is_stopped(task) for task in tasks.iterdir()):
            time.sleep(0.001)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def _is_stopped(task: Path) -> bool:
    """Whether a thread, a folder of /proc, is stopped or has ended."""
    try:
        stat = (task / "stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "TtZX"


@asynccontextmanager
async def nats_server(*, extra_flags: tuple[str, ...] = (), jetstream: bool = True) -> AsyncIterator[NatsServer]:
    """A running server for the length of a block."""
    with tempfile.TemporaryDirectory(prefix="kvscout-nats-") as folder:
        server = NatsServer(Path(folder), extra_flags=extra_flags, jetstream=jetstream)
        await server.start()
        try:
            yield server
        finally:
            await server.kill()
