"""An engine that kvscout has never heard of tells it what is in its KV cache.

    kvscout-indexer --port 7051
    python examples/custom_engine/engine.py --indexer localhost:7051
    python examples/custom_engine/engine.py --nats nats://localhost:4222 --indexer localhost:7051   # events over NATS

The engine here only has a cache: prompts come, their blocks are stored, the least recently used ones go. After some
requests it prints, for each prompt, how many blocks it holds itself and how many the indexer says that it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys

import grpc

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc
from kvscout_client import KvEventPublisher

BLOCK_SIZE = 16
CAPACITY = 64
"""Blocks of the cache."""
MODEL = "toy"
WORKER = "toy-engine-0"


class Cache:
    """Blocks of prompts, each known by all tokens up to its end; the least recently used ones go first.

    Args:
        events: Told of what is stored and removed.
    """

    def __init__(self, events: KvEventPublisher) -> None:
        self._events = events
        self._blocks: dict[tuple[int, ...], int] = {}
        """Prefix → the engine's own hash of its last block; any 64 bits will do."""

    def held(self, prompt: list[int]) -> int:
        """Leading blocks of a prompt that are cached."""
        prefixes = self._prefixes(prompt)
        return next((number for number, prefix in enumerate(prefixes) if prefix not in self._blocks), len(prefixes))

    def run(self, prompt: list[int]) -> None:
        """Serves a prompt: what is missing of it is computed and stored."""
        prefixes = self._prefixes(prompt)
        first = self.held(prompt)
        new = {prefix: random.getrandbits(64) for prefix in prefixes[first:]}
        self._evict(len(self._blocks) + len(new) - CAPACITY, keep=set(prefixes))
        if new:
            # Told at once and without waiting: the publisher sends it in the background.
            self._events.publish_stored(
                prompt[first * BLOCK_SIZE : len(prefixes) * BLOCK_SIZE],
                [BLOCK_SIZE] * len(new),
                list(new.values()),
                parent_hash=self._blocks[prefixes[first - 1]] if first else None,
            )
        # Used last: later blocks before earlier ones, so that a prompt is evicted from its end.
        for prefix in reversed(prefixes):
            self._blocks[prefix] = new[prefix] if prefix in new else self._blocks.pop(prefix)

    def _evict(self, number: int, *, keep: set[tuple[int, ...]]) -> None:
        gone = [prefix for prefix in self._blocks if prefix not in keep][: max(0, number)]
        if gone:
            self._events.publish_removed([self._blocks.pop(prefix) for prefix in gone])

    @staticmethod
    def _prefixes(prompt: list[int]) -> list[tuple[int, ...]]:
        return [tuple(prompt[:end]) for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)]


async def compare(cache: Cache, prompts: list[list[int]], indexer: str) -> bool:
    """Prints what the engine holds beside what the indexer says; whether they agree."""
    agree = True
    async with grpc.aio.insecure_channel(indexer) as channel:
        stub = indexer_pb2_grpc.IndexerStub(channel)
        print("prompt  blocks  cached  indexer says")
        for number, prompt in enumerate(prompts):
            request = indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=prompt)
            found = (await stub.FindMatches(request, timeout=5)).overlaps
            says = dict(zip(found.worker_ids, found.device_blocks, strict=True)).get(WORKER, 0)
            print(f"{number:6}  {len(prompt) // BLOCK_SIZE:6}  {cache.held(prompt):6}  {says:12}")
            agree &= says == cache.held(prompt)
    return agree


async def main() -> int:
    """Runs some requests; 0 if the indexer knows what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--indexer", default="localhost:7051", help="gRPC address of an indexer")
    parser.add_argument("--nats", help="NATS server; the indexer runs with --nats-server")
    parser.add_argument("--requests", type=int, default=100)
    given = parser.parse_args()
    if given.nats:
        publisher = KvEventPublisher(
            worker_id=WORKER, model=MODEL, block_size=BLOCK_SIZE, total_kv_blocks=CAPACITY,
            transport="nats-core", nats_servers=[given.nats],
        )  # fmt: skip
    else:
        publisher = KvEventPublisher(
            worker_id=WORKER, model=MODEL, block_size=BLOCK_SIZE, total_kv_blocks=CAPACITY,
            transport="grpc", indexers=[given.indexer],
        )  # fmt: skip
    system = list(range(1000, 1000 + 4 * BLOCK_SIZE))
    prompts = [system + [number] * BLOCK_SIZE * random.randint(1, 8) for number in range(12)]
    async with publisher as events:
        cache = Cache(events)
        for _ in range(given.requests):
            cache.run(random.choice(prompts))
            await asyncio.sleep(0.01)
        if not await events.flush(timeout=10):
            print(f"the events do not arrive: {events.status.problem}", file=sys.stderr)
            return 1
        # Over NATS what has arrived there is read a moment later.
        await asyncio.sleep(0.5 if given.nats else 0)
        return 0 if await compare(cache, prompts, given.indexer) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
