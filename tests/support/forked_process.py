"""Service processes forked from one that has imported everything: importing is nine tenths of a start.

::

    tests ══ module, arguments, descriptors ══▶ forker ── fork ──▶ python -m module, from there on
      ▲                                           │
      └──────────── exit status ◀─────────────────┘

A forked process is one like any other, with sockets and signals of its own. One that is to have another environment
than the tests had at their start is not forked, but executed (`processes.spawn`).
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

PACKAGES = (
    "kvscout_indexer",
    "kvscout_scheduler",
    "kvscout_gateway",
    "kvscout_serve",
    "kvscout_bridge",
    "kvscout_mocker",
)
MAX_REQUEST_BYTES = 1 << 17
_OF_PYTEST = "PYTEST_"
"""How variables begin that pytest changes with each test."""


class ForkedProcess:
    """A process that was forked, as `asyncio.subprocess.Process` shows one.

    Args:
        pid: Its id.
        status: Read end of the pipe that its id came through, and its exit status will.
        stdout: What it prints.
    """

    def __init__(self, pid: int, status: int, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout = stdout
        self._status: int | None = status
        self._returncode: int | None = None
        os.set_blocking(status, False)

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None = it runs."""
        if self._status is not None:
            try:
                answer = os.read(self._status, 4)
            except BlockingIOError:
                return None
            os.close(self._status)
            self._status = None
            assert answer, "the forker ended before the process"
            self._returncode = os.waitstatus_to_exitcode(struct.unpack("=i", answer)[0])
        return self._returncode

    async def wait(self) -> int:
        """Waits for its end; the exit code."""
        while (code := self.returncode) is None:
            assert self._status is not None
            await _readable(self._status)
        return code

    async def communicate(self) -> tuple[bytes, None]:
        """Waits for its end; the rest of what it prints."""
        printed = await self.stdout.read()
        await self.wait()
        return printed, None

    def send_signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Forker:
    """The process that forks, and its other end here."""

    def __init__(self) -> None:
        self._environment = _environment(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-X", "faulthandler", __file__, str(theirs.fileno())]
        os.set_inheritable(theirs.fileno(), True)
        self._pid = os.posix_spawn(sys.executable, command, dict(os.environ))
        theirs.close()
        atexit.register(self._socket.close)

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether a process that it forks has this environment."""
        return _environment(environment) == self._environment

    async def fork(self, module: str, arguments: tuple[str, ...], stderr: int) -> ForkedProcess:
        """Has `python -m module` forked.

        Args:
            module: Its main module.
            arguments: Its command line.
            stderr: Descriptor of its log.
        """
        printed, its_stdout = os.pipe()
        status, its_status = os.pipe()
        try:
            request = json.dumps([module, arguments, os.getcwd()]).encode()
            socket.send_fds(self._socket, [request], [its_stdout, stderr, its_status])
        finally:
            os.close(its_stdout)
            os.close(its_status)
        stdout = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(printed, "rb", buffering=0)
        )
        await _readable(status)
        answer = os.read(status, 4)
        assert answer, "the forker ended"
        return ForkedProcess(struct.unpack("=i", answer)[0], status, stdout)


async def _readable(descriptor: int) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_OF_PYTEST)}


def _import_everything() -> None:
    for package in PACKAGES:
        path = import_module(package).__path__
        for module in walk_packages(path, f"{package}."):
            # What runs as the main module is not to be there before.
            if not module.name.endswith(".main"):
                import_module(module.name)


def _serve(requests: socket.socket) -> None:
    """Forks for as long as the tests run; what it forked ends with them."""
    _import_everything()
    running: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not requests:
                    pid = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    os.write(running[pid], struct.pack("=i", os.waitpid(pid, 0)[1]))
                    os.close(running.pop(pid))
                    continue
                request, descriptors, *_ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 3)
                if not request:
                    for pid in running:
                        os.kill(pid, signal.SIGKILL)
                    return
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    requests.close()
                    _become(json.loads(request), descriptors[0], descriptors[1], {*running.values(), *descriptors})
                    return
                running[pid] = descriptors[2]
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                for descriptor in descriptors[:2]:
                    os.close(descriptor)
                os.write(descriptors[2], struct.pack("=i", pid))


def _become(request: tuple[str, list[str], str], stdout: int, stderr: int, inherited: set[int]) -> None:
    """Runs a module in this process as `python -m` does."""
    module, arguments, directory = request
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in inherited:
        os.close(descriptor)
    os.chdir(directory)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    sys.argv = [module, *arguments]
    # By this a process would start itself anew.
    sys.orig_argv = [sys.executable, "-m", module, *arguments]
    # Another one may have imported it: the process of all services is made of theirs.
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.remove(str(Path(__file__).resolve().parent))
    _serve(socket.socket(fileno=int(sys.argv[1])))
