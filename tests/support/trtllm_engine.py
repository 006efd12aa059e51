"""A rank of TensorRT-LLM that pushes its events: its cache's hashes, its queue, its sockets, its omissions.

::

    store, evict ─▶ pending events ─ flush ─▶ queue (max_queue_size) ─▶ one thread ─▶ PUB at base port + rank
                                                └ full: the batch is gone, its number is taken    └▶ ROUTER, inclusive

A block's key is a chain of SHA-256 that begins with the LoRA adapter and the salt of its request; of both the events
say nothing. It is announced once, however many requests use it, and never cleared. Both sockets always bind, with the
engine's mark for the PUB and ZMQ's for the ROUTER. It is not kinder than the engine; the engine's other pools (windows,
tiers) are left out, since its events leave them out.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgpack
import zmq

from support.engine_events import BLOCK_SIZE

SEND_HWM = 100_000
END_OF_REPLAY = b"\xff" * 8
POLL_SECONDS = 0.1


class TrtllmEngine:
    """One rank.

    Args:
        base_port: Of the PUB sockets of all ranks; the replay sockets begin `replay_offset` above.
        rank: Which one.
        replay_offset: 0 = no replay socket.
        buffer_steps: Batches that a replay can go back.
        max_queue_size: Batches that may wait for the thread.
    """

    def __init__(
        self,
        base_port: int,
        rank: int = 0,
        *,
        replay_offset: int,
        buffer_steps: int = 10_000,
        max_queue_size: int = 100_000,
    ) -> None:
        self.endpoint = f"tcp://127.0.0.1:{base_port + rank}"
        self.replay_endpoint = f"tcp://127.0.0.1:{base_port + replay_offset + rank}" if replay_offset else ""
        self.running = threading.Event()
        """Cleared: the thread does not get its turn."""
        self.running.set()
        self.dropped = 0
        """Batches that found the queue full."""
        self._rank = rank
        self._pending: list[dict[str, Any]] = []
        self._stored: set[bytes] = set()
        self._queue: queue.Queue[tuple[int, list[dict[str, Any]]] | None] = queue.Queue(max_queue_size)
        self._numbers = count()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._publish, daemon=True)
        self._thread.start()
        assert self._bound.wait(30), "its sockets cannot be bound"

    def store(self, tokens: Sequence[int], *, lora_id: int | None = None, salt: str = "") -> list[int]:
        """Compute a prompt; return the wire hashes of its full blocks."""
        key, parent, hashes = hashlib.sha256(f"{lora_id} {salt}".encode()).digest(), None, []
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            block = list(tokens[start : start + BLOCK_SIZE])
            key = hashlib.sha256(key + bytes(str(block), "ascii")).digest()
            wire_hash = int.from_bytes(key[:8], "big", signed=True)
            if key not in self._stored:
                self._stored.add(key)
                self._announce(wire_hash, parent, block)
            parent = wire_hash
            hashes.append(wire_hash)
        return hashes

    def evict(self, *hashes: int) -> None:
        """Evict blocks, by their wire hashes."""
        self._stored = {key for key in self._stored if int.from_bytes(key[:8], "big", signed=True) not in hashes}
        self._pending.append({"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"})

    def flush(self) -> None:
        """End an iteration: what is pending is one batch, if the queue has room."""
        events, self._pending = self._pending, []
        if not events:
            return
        number = next(self._numbers)
        try:
            self._queue.put_nowait((number, events))
        except queue.Full:
            self.dropped += 1

    @property
    def waiting(self) -> int:
        """Return the number of batches in its queue."""
        return self._queue.qsize()

    def close(self) -> None:
        """End it, as a kill does: what waits in its queue is never sent."""
        self.running.set()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _announce(self, wire_hash: int, parent: int | None, tokens: list[int]) -> None:
        last = self._pending[-1] if self._pending else {}
        if last.get("type") == "BlockStored" and parent is not None and last["block_hashes"][-1] == parent:
            last["block_hashes"].append(wire_hash)
            last["token_ids"].extend(tokens)
            return
        self._pending.append({
            "type": "BlockStored",
            "block_hashes": [wire_hash],
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        })  # fmt: skip

    def _publish(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        try:
            pub.set_hwm(SEND_HWM)
            pub.bind(self.endpoint)
            if self.replay_endpoint:
                router.bind(self.replay_endpoint)
            self._bound.set()
            while True:
                self.running.wait()
                if router.poll(0):
                    self._answer(router)
                try:
                    item = self._queue.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    continue
                if item is None:
                    return
                number, events = item
                payload = msgpack.packb([0.0, events, self._rank])
                self.running.wait()
                pub.send_multipart((b"", number.to_bytes(8, "big"), payload))
                self._buffer.append((number, payload))
        finally:
            context.destroy(linger=0)

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        client, _, first = router.recv_multipart()
        for number, payload in self._buffer:
            if number >= int.from_bytes(first, "big"):
                router.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
        router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))
