"""An engine of one's own for chaos runs: a block cache without a model, whose events go through the publisher library.

    python -m chaos.custom_engine --port P --worker-id W --seed N --indexer HOST:PORT --indexer HOST:PORT
    python -m chaos.custom_engine --port P --worker-id W --seed N --nats nats://HOST:PORT --transport jetstream

It answers as much of the mocker's HTTP API as chaos runs use: `POST /v1/completions` looks a prompt up and stores it,
`GET /mock/kv_blocks` tells what is cached, `POST /mock/faults {"restart": true}` loses the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from random import Random

from aiohttp import web

from chaos.engines import BLOCK_SIZE, MODEL
from kvscout_client import KvEventPublisher
from kvscout_common.hashing import block_hashes, sequence_hashes

CAPACITY = 256
"""Blocks, copies included."""
DUPLICATES = 0.05
"""Share of stored blocks that are stored once more, as engines do that compute one prompt twice at once."""
CLEARINGS = 0.002
"""Share of requests after which the cache is cleared."""


class BlockCache:
    """Blocks by hash, each below one that is cached too; random leaves go when it is full.

    Args:
        events: Told of everything.
        rng: Chooses what goes.
    """

    def __init__(self, events: KvEventPublisher, rng: Random) -> None:
        self.copies: Counter[int] = Counter()
        self._parents: dict[int, int | None] = {}
        self._children: Counter[int] = Counter()
        self._events = events
        self._rng = rng

    def lookup(self, hashes: list[int]) -> int:
        """Leading blocks that are cached."""
        return next((number for number, block in enumerate(hashes) if block not in self.copies), len(hashes))

    def store(self, tokens: list[int], hashes: list[int]) -> None:
        """Caches what is missing of a prompt; a part of it a second time, now and then."""
        first = self.lookup(hashes)
        while first < len(hashes) and self.copies.total() + len(hashes) - first > CAPACITY:
            self._evict(set(hashes))
        if first < len(hashes):
            self._store(tokens, hashes, first)
        if hashes and self._rng.random() < DUPLICATES:
            self._store(tokens, hashes, self._rng.randrange(len(hashes)))

    def clear(self) -> None:
        """Drops everything."""
        self.forget()
        self._events.publish_cleared()

    def forget(self) -> None:
        """Loses everything, without a word."""
        for content in (self.copies, self._parents, self._children):
            content.clear()

    def _store(self, tokens: list[int], hashes: list[int], first: int) -> None:
        for number in range(first, len(hashes)):
            block, parent = hashes[number], hashes[number - 1] if number else None
            if block not in self.copies and parent is not None:
                self._children[parent] += 1
            self._parents[block] = parent
            self.copies[block] += 1
        self._events.publish_stored(
            tokens[first * BLOCK_SIZE : len(hashes) * BLOCK_SIZE],
            [BLOCK_SIZE] * (len(hashes) - first),
            hashes[first:],
            hashes[first - 1] if first else None,
        )

    def _evict(self, kept: set[int]) -> None:
        leaves = [block for block in self.copies if not self._children[block] and block not in kept]
        # A few at once, as engines do; what is kept is shorter than the cache.
        gone = self._rng.sample(leaves, min(len(leaves), 4))
        for block in gone:
            self.copies[block] -= 1
            if not self.copies[block]:
                del self.copies[block]
                parent = self._parents.pop(block)
                if parent is not None:
                    self._children[parent] -= 1
        self._events.publish_removed(gone)


class Routes:
    """The HTTP API.

    Args:
        events: The publisher.
        rng: Of the cache, and of when it is cleared.
    """

    def __init__(self, events: KvEventPublisher, rng: Random) -> None:
        self._events = events
        self._rng = rng
        self._cache = BlockCache(events, rng)

    def app(self) -> web.Application:
        """The application."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/mock/kv_blocks", self.kv_blocks),
                web.post("/mock/faults", self.faults),
                web.post("/v1/completions", self.completions),
            ]
        )
        return app

    async def health(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({})

    async def kv_blocks(self, _: web.Request) -> web.StreamResponse:
        blocks = {str(block): copies for block, copies in self._cache.copies.items()}
        return web.json_response({"0": {"blocks": blocks, "unpublished": 0}})

    async def faults(self, request: web.Request) -> web.StreamResponse:
        if (await request.json()).get("restart"):
            self._cache.forget()
            self._events.restart()
        return web.json_response({})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        prompt: list[int] = (await request.json())["prompt"]
        hashes = sequence_hashes(block_hashes(prompt, BLOCK_SIZE))
        cached = min(self._cache.lookup(hashes), (len(prompt) - 1) // BLOCK_SIZE) * BLOCK_SIZE
        self._cache.store(prompt, hashes)
        if self._rng.random() < CLEARINGS:
            self._cache.clear()
        return web.json_response({"usage": {"prompt_tokens_details": {"cached_tokens": cached}}})


async def main() -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--indexer", action="append", default=[])
    parser.add_argument("--nats", action="append", default=[])
    parser.add_argument("--transport", default="grpc")
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    publisher = KvEventPublisher(
        worker_id=given.worker_id,
        model=MODEL,
        block_size=BLOCK_SIZE,
        transport=given.transport,
        indexers=given.indexer,
        nats_servers=given.nats,
        total_kv_blocks=CAPACITY * 2,
    )
    async with publisher as events:
        runner = web.AppRunner(Routes(events, Random(given.seed)).app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", given.port).start()
        print(json.dumps({"port": given.port}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
