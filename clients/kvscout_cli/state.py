"""State that `kvscout up` keeps on disk while it runs, so that `kvscout down` finds it.

A lock file shows whether it runs: the kernel releases it with the process, so that nothing is ever stale.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvscout_cli.output import echo, shown
from kvscout_common.errors import DeadlineExceeded, FailedPrecondition

_POLL_SECONDS = 0.05


class StateDirectory:
    """The directory of one `kvscout up`."""

    def __init__(self, path: Path) -> None:
        self.log_file = path / "up.log"
        self._lock_file = path / "up.lock"
        self._state_file = path / "up.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the directory for the length of the block.

        Raises:
            FailedPrecondition: Another process holds it.
        """
        self._lock_file.parent.mkdir(parents=True, exist_ok=True)
        with self._lock_file.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FailedPrecondition(
                    f"kvscout is up already (pid {self.read().get('pid', '?')}); `kvscout down` stops it"
                ) from None
            try:
                yield
            finally:
                self._state_file.unlink(missing_ok=True)

    @contextmanager
    def log(self) -> Iterator[Callable[[str], None]]:
        """Give a function that writes a line to stderr and to the log file, which begins anew.

        A stack in the background has the log file as its stderr: then it is written once.
        """
        with self.log_file.open("a") as log:
            is_stderr = os.path.sameopenfile(log.fileno(), sys.stderr.fileno())
            if not is_stderr:
                log.truncate(0)

            def write(line: str) -> None:
                echo(line, err=True)
                if not is_stderr:
                    log.write(f"{shown(line)}\n")
                    log.flush()

            yield write

    def write(self, state: Mapping[str, Any]) -> None:
        """Report that the stack is ready, and how to reach it."""
        temporary = self._state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"pid": os.getpid(), **state}, indent=2) + "\n")
        temporary.replace(self._state_file)

    def read(self) -> dict[str, Any]:
        """Return the state written last; empty = none."""
        try:
            state: dict[str, Any] = json.loads(self._state_file.read_text())
        except FileNotFoundError:
            return {}
        return state

    def is_held(self) -> bool:
        """Return whether a process holds the directory."""
        try:
            with self._lock_file.open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def wait_until_free(self, timeout_seconds: float) -> None:
        """Wait until no process holds the directory.

        Raises:
            DeadlineExceeded: One still does.
        """
        deadline = time.monotonic() + timeout_seconds
        while self.is_held():
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"kvscout has not stopped within {timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)
