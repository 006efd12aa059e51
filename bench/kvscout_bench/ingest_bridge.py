"""Events through a bridge: how soon an event of an engine is found, over NATS core and over JetStream."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import yaml

from kvscout_bench.harness import Say
from kvscout_bench.ingest_zmq import PUBLISHER, QUICK_DIVISOR, Prober
from kvscout_bench.peer import Driver
from kvscout_bench.service_process import BLOCK_SIZE, MODEL, IndexerProcess, NatsProcess, ServiceProcess, until

ENGINES = 8
MESSAGES = 10_000
PER_SECOND = 1_000


def ingest(transport: str, quick: bool, say: Say) -> dict[str, float]:
    """Publish to a bridge; return milliseconds until events are found in an indexer, as of `Prober.sample`."""
    messages = MESSAGES // QUICK_DIVISOR if quick else MESSAGES
    with ExitStack() as stack:
        nats = stack.enter_context(NatsProcess())
        indexer = stack.enter_context(IndexerProcess("--nats-server", nats.url))
        publisher = stack.enter_context(Driver(PUBLISHER))
        endpoints = publisher.request("open", sockets=ENGINES, blocks=4)["endpoints"]
        engines = {f"worker-{number}": endpoint for number, endpoint in enumerate(endpoints)}

        def start(worker_id: str, endpoint: str) -> None:
            stack.enter_context(BridgeProcess({**engines, worker_id: endpoint}, transport, nats.url))
            known = len(engines) + 1
            until(lambda: len(indexer.sources()) == known, f"{known} workers in the indexer")

        prober = stack.enter_context(Prober(indexer, start))
        publisher.request("await")
        publisher.request("prepare", messages=messages)
        published = publisher.request("publish", rate=PER_SECOND)
        prober.stop()
        # Not by batches applied: events published before NATS was reached come as a snapshot.
        until(lambda: _events(indexer) >= messages + prober.probes, "every event in the indexer")
        say(f"{transport}: {messages} messages in {published['seconds']:.2f} s, {prober.probes} probes")
        return prober.sample()


def _events(indexer: IndexerProcess) -> int:
    return sum(source.last_event_id + 1 for source in indexer.sources() if source.HasField("last_event_id"))


class BridgeProcess(ServiceProcess):
    """A bridge of several engines of one rank. Errors as of `ServiceProcess`.

    Args:
        engines: Endpoint of each, by worker id.
        transport: Transport of its events.
        nats: URL of the NATS server.
    """

    def __init__(self, engines: dict[str, str], transport: str, nats: str) -> None:
        workers = [
            {
                "worker_id": worker_id,
                "model": MODEL,
                "block_size": BLOCK_SIZE,
                "event_endpoints": [{"endpoint": endpoint}],
            }
            for worker_id, endpoint in engines.items()
        ]
        self._folder = tempfile.TemporaryDirectory(prefix="kvscout-bench-bridge-")
        path = Path(self._folder.name) / "workers.yaml"
        path.write_text(yaml.safe_dump({"workers": workers}))
        super().__init__("bridge", "--workers-file", str(path), "--transport", transport, "--nats-server", nats)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._folder.cleanup()
