"""A process that publishes as vLLM does: one thread, its socket options, its loop, its way to answer replays.

::

    python -m support.vllm_publisher --payload-bytes N      (in tests/)
                                                          first line: {"endpoint": "tcp://...", "replay_endpoint": "tcp://..."}
    a line with a number on standard input                publishes so many batches; answers {"next_seq": N}

The ROUTER keeps ZMQ's mark of 1,000 messages and is not mandatory: what outruns it is dropped, the end marker too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import zmq

from support.engine_events import batch, stored

BUFFER_STEPS = 10_000
SEND_HWM = 100_000
END_OF_REPLAY = b"\xff" * 8


class Publisher:
    """The two sockets, in the hands of one thread."""

    def __init__(self, payload_bytes: int) -> None:
        self.payloads: queue.Queue[int] = queue.Queue()
        self._padding = b"\0" * payload_bytes
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_STEPS)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(SEND_HWM)
        self._pub.bind("tcp://127.0.0.1:*")
        self._replay = context.socket(zmq.ROUTER)
        self._replay.bind("tcp://127.0.0.1:*")
        self.endpoint = self._pub.get_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.get_string(zmq.LAST_ENDPOINT)

    def run(self) -> None:
        """Replays between two batches, for ever."""
        while True:
            if self._replay.poll(0):
                client, _, start = self._replay.recv_multipart()
                first = int.from_bytes(start, "big")
                for seq, payload in self._buffer:
                    if seq >= first:
                        self._replay.send_multipart((client, b"", b"", seq.to_bytes(8, "big"), payload))
                self._replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))
            try:
                seq = self.payloads.get(timeout=0.1)
            except queue.Empty:
                continue
            payload = batch(stored([seq + 1], [seq] * 4, padding=self._padding))
            self._pub.send_multipart((b"", seq.to_bytes(8, "big"), payload))
            self._buffer.append((seq, payload))
            self.payloads.task_done()


def main() -> None:
    """Publishes until its standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--payload-bytes", type=int, required=True)
    publisher = Publisher(parser.parse_args().payload_bytes)
    threading.Thread(target=publisher.run, daemon=True).start()
    print(json.dumps({"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}), flush=True)
    next_seq = 0
    for line in sys.stdin:
        for _ in range(int(line)):
            publisher.payloads.put(next_seq)
            next_seq += 1
        publisher.payloads.join()
        print(json.dumps({"next_seq": next_seq}), flush=True)


class VllmPublisher:
    """Such a process."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any]) -> None:
        self.endpoint: str = ready["endpoint"]
        self.replay_endpoint: str = ready["replay_endpoint"]
        self._process = process

    async def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        await self._process.wait()

    async def publish(self, batches: int) -> None:
        """Publishes batches of one block each; returns when they are sent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{batches}\n".encode())
        assert await self._process.stdout.readline(), "the publisher has ended"


@asynccontextmanager
async def vllm_publisher(*, payload_bytes: int) -> AsyncIterator[VllmPublisher]:
    """A publisher for the length of a block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "support.vllm_publisher", "--payload-bytes", str(payload_bytes),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield VllmPublisher(process, json.loads(await process.stdout.readline()))
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


if __name__ == "__main__":
    main()
