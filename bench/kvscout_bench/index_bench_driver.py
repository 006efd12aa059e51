"""Our index as its Python users call it, as a driver of the index benchmark."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from kvscout_bench.index_bench_serve import main
from kvscout_common.hashing import block_hashes, block_hashes_packed
from kvscout_common.worker import WorkerRank
from kvscout_indexer.events import EventBatch, Stored
from kvscout_indexer.index import Overlaps, WorkerOptions
from kvscout_indexer.native_index import make_index

BLOCK_SIZE = 16


class Kvscout:
    """See `BenchedIndex`."""

    name = "kvscout"
    version = "kvscout"

    def __init__(self, workers: int) -> None:
        self._index = make_index(BLOCK_SIZE)
        self._ranks = [WorkerRank(f"worker-{number}", 0) for number in range(workers)]
        self._numbers = {rank: number for number, rank in enumerate(self._ranks)}
        for rank in self._ranks:
            self._index.add_worker(rank, WorkerOptions())

    def local_hashes(self, tokens: bytes) -> Sequence[int]:
        """See `BenchedIndex`."""
        return block_hashes(tokens, BLOCK_SIZE)

    def event(self, parent: int | None, local: Sequence[int], engine: Sequence[int]) -> EventBatch:
        """See `BenchedIndex`."""
        stored = Stored(tuple(engine), parent, block_size=BLOCK_SIZE, local_hashes=tuple(local))
        return EventBatch((stored,))

    def store(self, worker: int, event: EventBatch) -> None:
        """See `BenchedIndex`."""
        self._index.apply(self._ranks[worker], event)

    def request(self, local: array[int]) -> bytes:
        """See `BenchedIndex`."""
        return local.tobytes()

    def token_request(self, tokens: bytes) -> bytes:
        """See `BenchedIndex`."""
        return bytes(memoryview(tokens))

    def find(self, request: bytes) -> Overlaps:
        """See `BenchedIndex`."""
        return self._index.find_matches(request, now=0.0)

    def find_tokens(self, request: bytes) -> Overlaps:
        """See `BenchedIndex`."""
        return self._index.find_matches(block_hashes_packed(request, BLOCK_SIZE), now=0.0)

    def overlaps(self, answer: Overlaps) -> Iterable[tuple[int, int]]:
        """See `BenchedIndex`."""
        return ((self._numbers[rank], blocks) for rank, blocks in zip(answer.workers, answer.device, strict=True))


if __name__ == "__main__":
    main(Kvscout)
