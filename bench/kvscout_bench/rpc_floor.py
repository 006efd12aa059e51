"""The floor of the cost of calls: a process that reads a call and writes an answer, as long as ours are."""

from __future__ import annotations

import asyncio
import struct
import subprocess
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack

from kvscout_bench.peer import native_driver
from kvscout_bench.rpc_ours import Call, find_request
from kvscout_bench.service_process import MeasuredProcess
from kvscout_bench.strangers import DriverFailed

ANSWER_BYTES = 200
"""Overlaps of eight workers."""
SHORT_BYTES = 64
"""A small call."""


class FloorSide:
    """A process that reads a call and writes an answer.

    Args:
        running: Ends it.

    Raises:
        DriverFailed: It cannot be compiled or started.
    """

    def __init__(self, running: ExitStack) -> None:
        command = native_driver("floor")
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes: Mapping[str, MeasuredProcess] = {"floor": running.enter_context(MeasuredProcess(process))}
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise DriverFailed(f"{command[0]} ended before it listened")
        self._port = int(line)

    async def call_of(self, kind: str, tokens: int, stack: AsyncExitStack) -> Call:
        """Return the call of a kind.

        Raises:
            KeyError: It has no such kind.
        """
        size = {"find": find_request(tokens).ByteSize(), "python": SHORT_BYTES}[kind]
        loop = asyncio.get_running_loop()
        transport, calls = await loop.create_connection(_Calls, "127.0.0.1", self._port)
        stack.callback(transport.close)
        transport.write(struct.pack("<II", size, ANSWER_BYTES))
        request = bytes(size)

        async def call(number: int) -> None:
            transport.write(request)
            await calls.answered()

        return call


class _Calls(asyncio.Protocol):
    """Calls of one connection, answered in order."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._bytes = 0

    def answered(self) -> asyncio.Future[None]:
        """Return what is done when the next call is answered."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        return waiting

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._bytes += len(data)
        while self._bytes >= ANSWER_BYTES:
            self._bytes -= ANSWER_BYTES
            self._waiting.popleft().set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        for waiting in self._waiting:
            waiting.set_exception(error or ConnectionError("the process ended"))
        self._waiting.clear()
