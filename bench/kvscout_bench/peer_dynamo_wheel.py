"""`RadixTree` of Dynamo's wheel as its users call it, as a driver of the index benchmark.

Runs in a venv with the wheel and xxhash, and with nothing else of kvscout than this folder.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import xxhash

from kvscout_bench.driver_commands import serve
from kvscout_bench.index_bench_serve import CallTimes, IndexDriver

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 4
SEED = 1337


class DynamoWheel:
    """See `BenchedIndex`."""

    name = "dynamo"
    version = "ai-dynamo-runtime 1.6.1"

    def __init__(self, _workers: int) -> None:
        core = import_module("dynamo._core")
        self._hash_tokens = core.compute_block_hash_for_seq
        self._tree = core.RadixTree()

    def local_hashes(self, tokens: bytes) -> Sequence[int]:
        """See `BenchedIndex`."""
        starts = range(0, len(tokens), BLOCK_BYTES)
        return [xxhash.xxh3_64_intdigest(tokens[start : start + BLOCK_BYTES], SEED) for start in starts]

    def event(self, parent: int | None, local: Sequence[int], engine: Sequence[int]) -> bytes:
        """See `BenchedIndex`."""
        blocks = [{"block_hash": name, "tokens_hash": content} for content, name in zip(local, engine, strict=True)]
        stored = {"parent_hash": parent, "blocks": blocks}
        return json.dumps({"event_id": 0, "data": {"stored": stored}}).encode()

    def store(self, worker: int, event: bytes) -> None:
        """See `BenchedIndex`."""
        self._tree.apply_event(worker, event)

    def request(self, local: array[int]) -> list[int]:
        """See `BenchedIndex`."""
        return local.tolist()

    def token_request(self, tokens: bytes) -> list[int]:
        """See `BenchedIndex`."""
        return array("I", tokens).tolist()

    def find(self, request: list[int]) -> Any:
        """See `BenchedIndex`."""
        return self._tree.find_matches(request).scores

    def find_tokens(self, request: list[int]) -> Any:
        """See `BenchedIndex`."""
        return self._tree.find_matches(self._hash_tokens(request, BLOCK_SIZE)).scores

    def overlaps(self, answer: Any) -> Iterable[tuple[int, int]]:
        """See `BenchedIndex`."""
        return ((worker, blocks) for (worker, _rank), blocks in answer.items())

    def rank_work(self, _workload: str, _worker: int) -> Callable[[], CallTimes] | None:
        """See `BenchedIndex`; it has none of it."""
        return None

    def wait_for_writers(self, _worker: int) -> None:
        """See `BenchedIndex`; nobody else writes."""


if __name__ == "__main__":
    serve(IndexDriver(DynamoWheel))
