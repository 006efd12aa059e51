"""Events over JetStream: CPU of the indexer process, and how soon one that restarts serves again."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvscout.v1 import events_pb2, indexer_pb2, types_pb2, workers_pb2
from kvscout_bench.harness import Say
from kvscout_bench.ingest_publisher import scattered
from kvscout_bench.service_process import BLOCK_SIZE, MODEL, READY_SECONDS, IndexerProcess, NatsProcess, until
from kvscout_blocks.bytes.messages import VERSION
from kvscout_common.nats.names import NatsNames
from kvscout_common.worker import DEFAULT_TENANT, WorkerRank

NAMESPACE = "bench"
WORKERS = 16
CHAIN_MESSAGES = 8
"""Messages of a worker in a row that continue one prompt."""
QUICK_DIVISOR = 50
FLUSH_EVERY = 512


@dataclass(frozen=True, slots=True)
class Load:
    """Load of published messages."""

    messages: int
    blocks: int
    """Blocks of each message."""
    restart: bool = False
    """The restart of an indexer afterwards is measured."""

    def short(self) -> Load:
        """Return the load of a quick run."""
        return replace(self, messages=max(self.messages // QUICK_DIVISOR, WORKERS))


def ingest(load: Load, say: Say) -> dict[str, float]:
    """Publish a load to a new indexer process; return its cost, or how long another one takes to start."""
    return _restart(load, say) if load.restart else _ingest(load, say)


def _ingest(load: Load, say: Say) -> dict[str, float]:
    """Return the CPU time of a message and of a block."""
    with ExitStack() as stack:
        server = stack.enter_context(NatsProcess())
        indexer = stack.enter_context(_indexer(server))
        _register(indexer)
        before, started = indexer.cpu_ns(), time.monotonic()
        asyncio.run(_publish(server.url, load))
        indexer.until_applied(load.messages)
        used = indexer.cpu_ns() - before
        say(f"{load.messages} messages of {load.blocks} blocks in {time.monotonic() - started:.2f} s")
    return {"message": used / load.messages / 1e3, "block": used / (load.messages * load.blocks) / 1e3}


def _restart(load: Load, say: Say) -> dict[str, float]:
    """Return the seconds until another indexer process, which starts from a snapshot, is SERVING with everything."""
    threshold = ("--router-snapshot-threshold", str(load.messages))
    with NatsProcess() as server:
        with _indexer(server, *threshold) as indexer:
            _register(indexer)
            asyncio.run(_publish(server.url, load))
            indexer.until_applied(load.messages)
            until(lambda: asyncio.run(_has_snapshot(server.url)), "a snapshot")
        started = time.monotonic()
        with _indexer(server) as indexer:
            until(lambda: _serving(indexer.address), "SERVING")
            seconds = time.monotonic() - started
            until(lambda: _memberships(indexer) == load.messages * load.blocks, "all memberships")
            say(f"SERVING after {seconds:.2f} s, all workers known after {time.monotonic() - started:.2f} s")
    return {"restart": seconds}


def _indexer(server: NatsProcess, *flags: str) -> IndexerProcess:
    return IndexerProcess("--nats-server", server.url, "--namespace", NAMESPACE, *flags)


def _register(indexer: IndexerProcess) -> None:
    def connected() -> bool:
        try:
            for number in range(WORKERS):
                worker = workers_pb2.Worker(
                    worker_id=f"worker-{number}",
                    model=MODEL,
                    block_size=BLOCK_SIZE,
                    dp_size=1,
                    transport=workers_pb2.EVENT_TRANSPORT_JETSTREAM,
                )
                indexer.stub.RegisterWorker(workers_pb2.RegisterWorkerRequest(worker=worker), timeout=READY_SECONDS)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True

    until(connected, "the indexer is connected to NATS")


def _memberships(indexer: IndexerProcess) -> int:
    status: indexer_pb2.IndexerGetStatusResponse = indexer.stub.GetStatus(
        types_pb2.GetStatusRequest(), timeout=READY_SECONDS
    )
    return sum(index.memberships for index in status.indexes)


def _serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        answer: Any = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=READY_SECONDS)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _publish(url: str, load: Load) -> None:
    """Publish the load as a bridge would, but without waiting for each acknowledgement."""
    # The library of NATS is an extra, which other measurements do not need.
    import nats

    from kvscout_blocks.publish.event_stream import MSG_ID, ensure_stream, message_id

    names = NatsNames(NAMESPACE)
    client = await nats.connect(url)
    try:
        await ensure_stream(client.jetstream(), names, DEFAULT_TENANT, MODEL)
        hashes = scattered(1)
        last = [0] * WORKERS
        for number in range(load.messages):
            worker, event_id = number % WORKERS, number // WORKERS
            rank = WorkerRank(f"worker-{worker}", 0)
            blocks = [next(hashes) for _ in range(load.blocks)]
            parent = last[worker] if event_id % CHAIN_MESSAGES else None
            last[worker] = blocks[-1]
            run = events_pb2.BlocksStored(engine_hashes=blocks, local_hashes=blocks, parent_engine_hash=parent)
            message = events_pb2.KvEventBatch(
                version=VERSION,
                worker_id=rank.worker_id,
                model=MODEL,
                block_size=BLOCK_SIZE,
                epoch=1,
                event_id=event_id,
                events=[events_pb2.KvEvent(stored=run)],
            )
            await client.publish(
                names.stream_events(DEFAULT_TENANT, MODEL, rank),
                message.SerializeToString(),
                headers={MSG_ID: message_id(rank, 1, event_id)},
            )
            if number % FLUSH_EVERY == 0:
                await client.flush()
        await client.flush()
    finally:
        await client.close()


async def _has_snapshot(url: str) -> bool:
    import nats

    client = await nats.connect(url)
    try:
        bucket = NatsNames(NAMESPACE).snapshots_bucket(DEFAULT_TENANT, MODEL)
        info = await client.jetstream().stream_info(f"OBJ_{bucket}", subjects_filter=f"$O.{bucket}.M.>")
        return bool(info.state.subjects)
    except nats.js.errors.NotFoundError:
        return False
    finally:
        await client.close()
