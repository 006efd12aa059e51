"""A real indexer process under measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2, workers_pb2
from kvscout_bench.peer import DriverFailed
from kvscout_bench.service_process import READY_SECONDS, ServiceProcess, until

MODEL = "bench"
BLOCK_SIZE = 16


class IndexerProcess(ServiceProcess):
    """An indexer with a channel to it. Arguments and errors as of `ServiceProcess`."""

    def __init__(self, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        super().__init__("indexer", *flags, environment=environment)
        self._channel = grpc.insecure_channel(self.address)
        grpc.channel_ready_future(self._channel).result(READY_SECONDS)
        self.stub = indexer_pb2_grpc.IndexerStub(self._channel)

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        super().__exit__()

    def register(self, worker_id: str, endpoint: str) -> None:
        """Register a worker of one rank that publishes at an endpoint."""
        worker = workers_pb2.Worker(
            worker_id=worker_id,
            model=MODEL,
            block_size=BLOCK_SIZE,
            dp_size=1,
            event_endpoints=[workers_pb2.EventEndpoint(endpoint=endpoint)],
        )
        self.stub.RegisterWorker(workers_pb2.RegisterWorkerRequest(worker=worker), timeout=READY_SECONDS)

    def holds(self, tokens: Sequence[int]) -> bool:
        """Return whether any worker holds the beginning of a prompt."""
        request = indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=tokens)
        answer: indexer_pb2.FindMatchesResponse = self.stub.FindMatches(request, timeout=READY_SECONDS)
        return bool(answer.overlaps.worker_ids)

    def sources(self) -> Sequence[indexer_pb2.SourceStatus]:
        """Return the status of every worker's events."""
        status: indexer_pb2.IndexerGetStatusResponse = self.stub.GetStatus(
            types_pb2.GetStatusRequest(), timeout=READY_SECONDS
        )
        return status.sources

    def until_applied(self, batches: int) -> float:
        """Wait until `batches` batches of all workers were applied; return the seconds that it took to be sure.

        Raises:
            DriverFailed: They are not, or events were lost.
        """

        def applied() -> bool:
            sources = self.sources()
            if any(source.gaps or source.demotions or source.malformed for source in sources):
                raise DriverFailed("the indexer lost events: what it did is not what was to be measured")
            return sum(source.applied for source in sources) >= batches

        until(applied, f"{batches} batches applied")
        return 0.0
