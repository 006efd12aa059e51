"""Drivers of the index benchmark as processes: built where they are needed, started, pinned, called.

`bench/README.md` has the protocol.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kvscout_bench.strangers import ROOT, VERSIONS, DriverFailed, wheel_venv

BENCH_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "bench")}
"""Environment of processes that run a module of this package, which is installed nowhere."""
LOAD_SECONDS = 600.0
"""Longest wait for an answer beside the time of the measurement."""
END_SECONDS = 10.0
"""Longest wait for a process whose input has ended."""
TAIL_BYTES = 2000


def native_driver(name: str) -> list[str]:
    """Return the command of a native driver, compiled first if it is not up to date.

    Args:
        name: A folder of `bench/peers` with a Cargo.toml: "kvscout" or "dynamo".

    Raises:
        DriverFailed: There is no source tree, no cargo, or it does not compile.
    """
    crate = ROOT / "bench" / "peers" / name
    if not (crate / "Cargo.toml").exists():
        raise DriverFailed(f"the index benchmark compiles its drivers from a source tree, and {crate} is not there")
    cargo = shutil.which("cargo")
    if cargo is None:
        raise DriverFailed("cargo is not on PATH: install Rust, the index benchmark compiles its drivers with it")
    target = crate / "target"
    command = [cargo, "build", "--release", "--locked", "--quiet", "--target-dir", str(target)]
    if subprocess.run([*command, "--manifest-path", str(crate / "Cargo.toml")], check=False).returncode:
        raise DriverFailed(f"{crate} does not compile; cargo's messages are above")
    return [str(target / "release" / f"kvscout-bench-{name}")]


def python_driver() -> list[str]:
    """Return the command of our Python driver."""
    return [sys.executable, "-m", "kvscout_bench.index_bench_driver"]


def dynamo_wheel() -> Path:
    """Return the Python of a venv that has Dynamo's wheel. Errors as of `wheel_venv`."""
    return wheel_venv(VERSIONS["DYNAMO"], "xxhash")


def dynamo_wheel_driver() -> list[str]:
    """Return the command of the driver of Dynamo's wheel, in a venv of its own. Errors as of `wheel_venv`."""
    return [str(dynamo_wheel()), "-m", "kvscout_bench.peer_dynamo_wheel"]


class Driver:
    """A running driver; a context manager that ends it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=BENCH_ENVIRONMENT,
            )
        except OSError as error:
            self._errors.close()
            raise DriverFailed(f"{self.command[0]} cannot be started: {error}") from error
        assert self._process.stdin
        assert self._process.stdout
        self._input, self._output = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the input of the process, and the process where that does not; wait for it."""
        try:
            # One that has started others ends them, too.
            self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._errors.close()

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def request(self, verb: str, *, within_seconds: float = LOAD_SECONDS, **arguments: object) -> Mapping[str, Any]:
        """Return the answer to a command; blocks.

        Raises:
            DriverFailed: It answered with an error, not in time, or not at all.
        """
        line = " ".join([verb, *(f"{key}={value}" for key, value in arguments.items())])
        watchdog = threading.Timer(within_seconds, self._process.kill)
        watchdog.start()
        try:
            self._input.write(line + "\n")
            self._input.flush()
            text = self._output.readline()
        except BrokenPipeError:
            text = ""
        finally:
            watchdog.cancel()
        if not text:
            self._process.wait()
            raise DriverFailed(f"{self.command[0]} ended at {line!r}: {self._tail() or 'it said nothing'}")
        answer: Mapping[str, Any] = json.loads(text)
        if "error" in answer:
            raise DriverFailed(f"{self.command[0]} at {line!r}: {answer['error']}")
        return answer

    def pin(self, main: int, others: int) -> None:
        """Bind the main thread to one core and every other one to another, where the system can."""
        if not hasattr(os, "sched_setaffinity"):
            return
        process = self._process.pid
        for task in Path(f"/proc/{process}/task").iterdir():
            thread = int(task.name)
            os.sched_setaffinity(thread, {main if thread == process else others})

    def _tail(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - TAIL_BYTES))
        return self._errors.read().decode(errors="replace").strip()
