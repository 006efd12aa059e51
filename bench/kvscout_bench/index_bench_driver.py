"""Our index as the FindMatches rpc calls it from Python, bytes in and bytes out, as a driver of the index benchmark."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from kvscout.v1 import indexer_pb2
from kvscout_bench.driver_commands import serve
from kvscout_bench.index_bench_ranks import BenchedRank, RankWorkload
from kvscout_bench.index_bench_serve import CallTimes, IndexDriver
from kvscout_blocks.bytes.events import EventBatch, Stored
from kvscout_blocks.index.backend import make_queries
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.index.native import NativeIndex
from kvscout_common.hashing import block_hashes
from kvscout_common.worker import PoolKey, WorkerRank

BLOCK_SIZE = 16
POOL = PoolKey("model", "default", BLOCK_SIZE, False)
_HEADER = indexer_pb2.FindMatchesRequest(model=POOL.model, block_size=BLOCK_SIZE).SerializeToString()
_FIELDS = indexer_pb2.FindMatchesRequest.DESCRIPTOR.fields_by_name


class Kvscout:
    """See `BenchedIndex`."""

    name = "kvscout"
    version = "kvscout"

    def __init__(self, workers: int) -> None:
        queries = make_queries()
        if queries is None:
            raise SystemExit("the rows from Python need the extension kvscout_native")
        self._queries = queries
        self._index = NativeIndex(BLOCK_SIZE)
        self._queries.set_pool(POOL, self._index)
        self._ranks = [WorkerRank(f"worker-{number}", 0) for number in range(workers + 1)]
        self._worked_on: BenchedRank | None = None
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
        """See `BenchedIndex`; a serialised FindMatchesRequest."""
        return _request("block_hashes", local.tobytes())

    def token_request(self, tokens: bytes) -> bytes:
        """See `BenchedIndex`; a serialised FindMatchesRequest."""
        return _request("token_ids", tokens)

    def find(self, request: bytes) -> bytes | None:
        """See `BenchedIndex`; a serialised FindMatchesResponse."""
        return self._queries.answer(request, now=self._now, caller_tenant="*")

    find_tokens = find

    def overlaps(self, answer: bytes | None) -> Iterable[tuple[int, int]]:
        """See `BenchedIndex`."""
        if answer is None:
            raise SystemExit("a request was left to the plain path, which is not what is measured")
        overlaps = indexer_pb2.FindMatchesResponse.FromString(answer).overlaps
        numbers = (int(worker_id.rpartition("-")[2]) for worker_id in overlaps.worker_ids)
        return zip(numbers, overlaps.device_blocks, strict=True)

    def rank_work(self, workload: str, worker: int) -> Callable[[], CallTimes] | None:
        """See `BenchedIndex`."""
        if workload not in list(RankWorkload):
            return None
        if self._worked_on is None:
            self._worked_on = BenchedRank(self._index, POOL, self._ranks[worker])
        return self._worked_on.prepare(RankWorkload(workload))

    def wait_for_writers(self, worker: int) -> None:
        """See `BenchedIndex`."""
        self._index.cursor(self._ranks[worker])

    @property
    def _now(self) -> float:
        return self._worked_on.now if self._worked_on is not None else 0.0


def _request(field: str, packed: bytes) -> bytes:
    """Return a request with one packed field, written by hand: protobuf would make a Python integer of each element."""
    head = bytearray([_FIELDS[field].number << 3 | 2])
    length = len(packed)
    while length >= 0x80:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return _HEADER + bytes(head) + packed


if __name__ == "__main__":
    serve(IndexDriver(Kvscout))
