"""A process full of engines: PUB sockets whose batches are made beforehand and published at a given rate.

Commands on its standard input (see `driver_commands`), and their answers:

::

    open sockets=64 blocks=4     {"endpoints": [...]}      one engine a socket; blocks of each batch
    await                        {}                        once every engine has a subscriber
    prepare messages=N           {}                        the next N batches, each of an engine at random
    publish rate=20000           {"sent": N, "seconds": s, "late_p99_ms": ms}    0 = as fast as it can
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import Any

import msgpack
import zmq

from kvscout_bench.driver_commands import serve

BLOCK_SIZE = 16
PROMPT_BLOCKS = 64
"""Blocks of a prompt, unless one batch has more."""
VOCABULARY_BITS = 17
TOPIC = b"kv-events"
SUBSCRIBED = b"\x01"
AWAIT_MS = 30_000


class Engine:
    """Publisher of one rank: a socket and its next batches, in the bytes of vLLM ≥ 0.24."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], blocks: int, hashes: Iterator[int]) -> None:
        # An XPUB is a PUB that reports when somebody has subscribed.
        self.socket = context.socket(zmq.XPUB)
        self.socket.set(zmq.XPUB_VERBOSE, 1)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.ready: deque[tuple[bytes, bytes]] = deque()
        self._blocks, self._hashes = blocks, hashes
        self._seq = count()
        self._parent: int | None = None
        self._depth = 0

    def prepare(self, random_words: random.Random) -> None:
        """Make the next batch: one Stored event that continues a prompt, or begins one."""
        if self._depth + self._blocks > max(PROMPT_BLOCKS, self._blocks):
            self._parent, self._depth = None, 0
        words = [random_words.getrandbits(VOCABULARY_BITS) for _ in range(self._blocks * BLOCK_SIZE)]
        self._store(words, self._hashes)

    def prepare_prompt(self, tokens: list[int], hashes: Iterator[int] | None = None) -> None:
        """Make the next batch: one Stored event of a prompt of these tokens, whole blocks.

        Args:
            tokens: The prompt.
            hashes: Hashes of its blocks, for engines that hash alike; None = unique ones.
        """
        self._parent, self._depth = None, 0
        self._store(tokens, hashes or self._hashes)

    def send(self) -> None:
        """Publish the next batch."""
        seq, payload = self.ready.popleft()
        self.socket.send_multipart((TOPIC, seq, payload), copy=len(payload) < 16_384)

    def until_subscribed(self) -> None:
        """Wait for a subscriber.

        Raises:
            TimeoutError: None comes.
        """
        if not self.socket.poll(AWAIT_MS) or not self.socket.recv().startswith(SUBSCRIBED):
            raise TimeoutError(f"nobody subscribed to {self.endpoint}")

    def _store(self, tokens: list[int], hashes: Iterator[int]) -> None:
        named = [next(hashes) for _ in range(len(tokens) // BLOCK_SIZE)]
        self.ready.append((next(self._seq).to_bytes(8, "big"), stored(named, self._parent, tokens)))
        self._parent, self._depth = named[-1], self._depth + len(named)


def stored(hashes: list[int], parent: int | None, tokens: list[int]) -> bytes:
    """Return a batch of one BlockStored event."""
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": None,
    }
    packed: bytes = msgpack.packb([time.time(), [event], 0])
    return packed


def scattered(first: int) -> Iterator[int]:
    """Yield block hashes as engines have them: 64 bits, each once."""
    return (number * 0x9E3779B97F4A7C15 % 2**64 for number in count(first + 1))


class Publisher:
    """The engines of this process."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_535)
        self._engines: list[Engine] = []
        self._random = random.Random(1)
        self._order: list[Engine] = []
        """Engines in the order in which they publish."""

    def __call__(self, verb: str, arguments: dict[str, str]) -> dict[str, Any]:
        """See `driver_commands.Handle`.

        Raises:
            TimeoutError: An engine has no subscriber.
            ValueError: The command is not known.
        """
        match verb:
            case "open":
                hashes, blocks = scattered(0), int(arguments["blocks"])
                self._engines = [Engine(self._context, blocks, hashes) for _ in range(int(arguments["sockets"]))]
                return {"endpoints": [engine.endpoint for engine in self._engines]}
            case "await":
                for engine in self._engines:
                    engine.until_subscribed()
            case "prepare":
                self._order = self._random.choices(self._engines, k=int(arguments["messages"]))
                for engine in self._order:
                    engine.prepare(self._random)
            case "publish":
                return self._publish(float(arguments["rate"]))
            case _:
                raise ValueError("not a command")
        return {}

    def close(self) -> None:
        """Close every socket."""
        self._context.destroy(linger=0)

    def _publish(self, rate: float) -> dict[str, Any]:
        """Send each batch when it is due, so that none waits to be part of a burst."""
        late: list[float] = []
        started = time.perf_counter()
        for number, engine in enumerate(self._order):
            if rate:
                due = started + number / rate
                while (ahead := due - time.perf_counter()) > 0:
                    time.sleep(ahead)
                late.append(-ahead)
            engine.send()
        seconds = time.perf_counter() - started
        late.sort()
        return {
            "sent": len(self._order),
            "seconds": seconds,
            "late_p99_ms": late[len(late) * 99 // 100] * 1e3 if late else 0.0,
        }


if __name__ == "__main__":
    with closing(Publisher()) as publisher:
        serve(publisher)
