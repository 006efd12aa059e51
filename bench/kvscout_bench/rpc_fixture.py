"""Contents of the workers while calls are measured: engines, sockets of this process, that publish parts of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import zmq

from kvscout_bench.gateway_prompts import random_tokens
from kvscout_bench.ingest_publisher import BLOCK_SIZE, Engine, scattered
from kvscout_bench.strangers import DriverFailed

TOKENS = (512, 4_096, 16_384)
WORKERS = (8, 256)
PARTS = 8
"""Workers hold an eighth of each prompt, two of them, ... by turns."""


def prompt(tokens: int) -> Sequence[int]:
    """Return the prompt of `tokens` tokens; none begins another one."""
    return random_tokens(tokens, seed=tokens)


def held_blocks(tokens: int, number: int) -> int:
    """Return the blocks of the prompt of `tokens` tokens that a worker holds."""
    return tokens // BLOCK_SIZE * (1 + number % PARTS) // PARTS


def require_all(found: Iterable[int], tokens: int, workers: int) -> None:
    """Fail unless a side finds what was published.

    Args:
        found: Overlaps that it returned, in blocks, in any order.
        tokens: Tokens of the prompt.
        workers: Number of workers that hold some of it.

    Raises:
        DriverFailed: It finds something else: its events were lost, or the query is wrong.
    """
    wanted = sorted(held_blocks(tokens, number) for number in range(workers))
    if sorted(found) != wanted:
        raise DriverFailed(f"not all of what {workers} workers hold of {tokens} tokens is found")


class Publishers:
    """Engines without HTTP; a context manager that closes their sockets."""

    def __init__(self, workers: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_535)
        hashes = scattered(0)
        self._engines = [Engine(self._context, 1, hashes) for _ in range(workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    @property
    def endpoints(self) -> dict[str, str]:
        """Return the endpoint of each worker."""
        return {f"worker-{number}": engine.endpoint for number, engine in enumerate(self._engines)}

    def publish(self) -> int:
        """Publish what they hold, once all have a subscriber; return the number of batches.

        Raises:
            TimeoutError: One has none.
        """
        for engine in self._engines:
            engine.until_subscribed()
        for number, engine in enumerate(self._engines):
            for tokens in TOKENS:
                # As of one hash seed: where hashes differed, Dynamo's indexer found what all had in common.
                held = list(prompt(tokens)[: held_blocks(tokens, number) * BLOCK_SIZE])
                engine.prepare_prompt(held, scattered(tokens << 20))
                engine.send()
        return len(self._engines) * len(TOKENS)
