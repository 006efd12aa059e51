"""An engine's event sockets as vLLM's are, for engines that are none of the known ones.

    with ZmqKvEventPublisher("tcp://*:5557", replay_endpoint="tcp://*:5657", block_size=16) as events:
        events.publish_stored(tokens, [16, 16], hashes, parent_hash=None)

Whatever reads vLLM's events reads these: kvscout's indexer and bridge, and others. It needs nothing of kvscout but this
file, pyzmq and msgpack, and no asyncio: any thread may publish.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import msgpack
import zmq

log = logging.getLogger("kvscout.publisher")

END_OF_REPLAY = b"\xff" * 8
REPLAY_SECONDS = 10.0
"""Time after which a client that takes none of a replay is given up."""


class StoredBlocks(NamedTuple):
    """Full blocks, each the child of the one before it."""

    block_hashes: tuple[int, ...]
    token_ids: tuple[int, ...]


def full_blocks(
    token_ids: Sequence[int], num_block_tokens: Sequence[int], block_hashes: Sequence[int], block_size: int
) -> StoredBlocks:
    """Return the leading full blocks of what an engine stored, without a short block and what follows it.

    Args:
        token_ids: Tokens of all blocks, u32.
        num_block_tokens: Tokens in each block; at most `block_size`.
        block_hashes: The engine's own hash of each block, u64 or i64.
        block_size: Tokens a full block.

    Raises:
        ValueError: The lengths contradict each other, or a value is out of range.
    """
    if len(num_block_tokens) != len(block_hashes):
        raise ValueError(f"{len(num_block_tokens)} num_block_tokens for {len(block_hashes)} block_hashes")
    if sum(num_block_tokens) != len(token_ids):
        raise ValueError(f"num_block_tokens add up to {sum(num_block_tokens)}, there are {len(token_ids)} token_ids")
    if any(not 0 < number <= block_size for number in num_block_tokens):
        raise ValueError(f"num_block_tokens must be between 1 and block_size ({block_size})")
    if len(token_ids) and not (min(token_ids) >= 0 and max(token_ids) < 2**32):
        raise ValueError("token_ids must be u32")
    whole = next((at for at, number in enumerate(num_block_tokens) if number < block_size), len(num_block_tokens))
    return StoredBlocks(tuple(map(u64, block_hashes[:whole])), tuple(token_ids[: whole * block_size]))


def u64(block_hash: int) -> int:
    """Return an engine's hash as u64; a signed one is reinterpreted bit for bit.

    Raises:
        ValueError: It has more than 64 bits.
    """
    if not -(2**63) <= block_hash < 2**64:
        raise ValueError(f"{block_hash} is not a 64-bit hash")
    return block_hash % 2**64


class ZmqKvEventPublisher:
    """PUB socket for live batches, ROUTER socket that repeats the last ones; one a rank. Thread-safe.

    Args:
        endpoint: Endpoint of the PUB socket. As in vLLM it is bound if it contains "*" or "::" or is ipc or inproc,
            else connected to; rank r adds r to the port.
        block_size: Tokens a block.
        replay_endpoint: Endpoint of requests for past batches; None = none, and lost events stay lost.
        topic: First frame of every message.
        dp_rank: Data-parallel rank.
        buffer_steps: Batches retained for replay.
        high_water_mark: Messages a slow subscriber may lag behind before ZMQ drops for it.

    Raises:
        zmq.ZMQError: An address cannot be used.
        ValueError: `block_size` is below 1.
    """

    def __init__(
        self,
        endpoint: str = "tcp://*:5557",
        *,
        block_size: int,
        replay_endpoint: str | None = None,
        topic: str = "",
        dp_rank: int = 0,
        buffer_steps: int = 10_000,
        high_water_mark: int = 100_000,
    ) -> None:
        if block_size < 1:
            raise ValueError("block_size must be at least 1")
        self.block_size = block_size
        self.dp_rank = dp_rank
        self._topic = topic.encode()
        self._lock = threading.Lock()
        """Lock of everything below: the sequence, the buffer, and the PUB socket, which one thread uses at a time."""
        self._next_seq = 0
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replay_thread: threading.Thread | None = None
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set(zmq.SNDHWM, high_water_mark)
            self._pub.set(zmq.LINGER, 1000)
            self.endpoint = _open(self._pub, endpoint, dp_rank)
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                router = self._context.socket(zmq.ROUTER)
                router.set(zmq.SNDHWM, 0)
                router.set(zmq.LINGER, 0)
                router.set(zmq.ROUTER_MANDATORY, 1)
                router.set(zmq.SNDTIMEO, int(REPLAY_SECONDS * 1000))
                self.replay_endpoint = _open(router, replay_endpoint, dp_rank)
                self._replay_thread = threading.Thread(
                    target=self._serve_replay, args=(router,), name=f"kv-event-replay-{dp_rank}", daemon=True
                )
                self._replay_thread.start()
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    def publish_stored(
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        parent_hash: int | None = None,
        *,
        lora_name: str | None = None,
        medium: str | None = None,
    ) -> int | None:
        """Publish that blocks were stored; short ones are left out.

        Args:
            token_ids: Tokens of all blocks, u32.
            num_block_tokens: Tokens in each block.
            block_hashes: The engine's own hash of each block: any 64 bits that name it until it is removed.
            parent_hash: Hash of the block before the first one; None = the first one begins a prompt.
            lora_name: Adapter that computed them; None = the base model.
            medium: Medium that holds them, such as "CPU"; None = the device.

        Returns:
            The batch's number; None if there was no full block.

        Raises:
            ValueError: The arguments contradict each other.
        """
        blocks = full_blocks(token_ids, num_block_tokens, block_hashes, self.block_size)
        if not blocks.block_hashes:
            return None
        return self._publish(
            {
                "type": "BlockStored",
                "block_hashes": blocks.block_hashes,
                "parent_block_hash": None if parent_hash is None else u64(parent_hash),
                "token_ids": blocks.token_ids,
                "block_size": self.block_size,
                "lora_id": None,
                "medium": medium,
                "lora_name": lora_name,
            }
        )

    def publish_removed(self, block_hashes: Sequence[int], *, medium: str | None = None) -> int:
        """Publish that one physical copy of each block is gone; return the batch's number."""
        return self._publish({"type": "BlockRemoved", "block_hashes": tuple(map(u64, block_hashes)), "medium": medium})

    def publish_cleared(self) -> int:
        """Publish that the whole cache was dropped; return the batch's number."""
        return self._publish({"type": "AllBlocksCleared"})

    def close(self) -> None:
        """Close the sockets, after a second for what is on its way; publishing afterwards is an error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._pub.close()
        # A context that terminates wakes the thread that serves replays, which then closes its socket.
        self._context.term()
        if self._replay_thread is not None:
            self._replay_thread.join()

    def __enter__(self) -> ZmqKvEventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _publish(self, event: dict[str, Any]) -> int:
        with self._lock:
            if self._closed:
                raise ValueError("the publisher is closed")
            seq = self._next_seq
            payload: bytes = msgpack.packb([time.time(), [event], self.dp_rank])
            self._next_seq += 1
            self._recent.append((seq, payload))
            self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))
            return seq

    def _serve_replay(self, router: zmq.Socket[bytes]) -> None:
        try:
            while True:
                frames = router.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    log.warning("ignored a malformed replay request of %d frames", len(frames))
                    continue
                try:
                    self._answer(router, frames[0], int.from_bytes(frames[2], "big"))
                except zmq.ContextTerminated:
                    raise
                except zmq.ZMQError as error:
                    log.info("the client of a replay disconnected: %s", error)
        except zmq.ContextTerminated:
            router.close()

    def _answer(self, router: zmq.Socket[bytes], client: bytes, start: int) -> None:
        with self._lock:
            batches = [batch for batch in self._recent if batch[0] >= start]
        for seq, payload in batches:
            router.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))
        router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _open(socket: zmq.Socket[bytes], endpoint: str, dp_rank: int) -> str:
    """Bind or connect; return the address with its real port."""
    address, colon, port = endpoint.rpartition(":")
    if dp_rank and endpoint.startswith("tcp://") and port.isdecimal() and int(port):
        endpoint = f"{address}{colon}{int(port) + dp_rank}"
    if "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://"):
        if "::" in endpoint:
            socket.set(zmq.IPV6, 1)
        socket.bind(endpoint)
        return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
    socket.connect(endpoint)
    return endpoint
