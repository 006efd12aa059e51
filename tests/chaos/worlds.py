"""What runs for each transport: engines, what stands between, indexers."""

from __future__ import annotations

from pathlib import Path

import yaml
from support.free_ports import free_ports
from support.nats_server import NatsServer

from chaos.engines import BLOCK_SIZE, MODEL, Engine
from chaos.indexers import Indexer
from chaos.members import Member

ENGINES = 3


class World:
    """The processes of one transport.

    Args:
        transport: "direct", "peers", "nats-core", "jetstream"; "grpc", "custom-nats-core" and "custom-jetstream" are
            those of custom engines, which have no bridge.
        folder: For files of its own.
        seed: Of its engines.
    """

    def __init__(self, transport: str, folder: Path, seed: int) -> None:
        self.transport = transport
        self.nats: NatsServer | None = None
        self.bridges: list[Member] = []
        if transport == "grpc":
            ports = free_ports(2)
            self.indexers = [Indexer(number, port=port) for number, port in enumerate(ports)]
            targets = [flag for port in ports for flag in ("--indexer", f"127.0.0.1:{port}")]
            self.engines = [Engine.custom(number, seed + number, *targets) for number in range(ENGINES)]
            return
        if transport.startswith("custom-"):
            self.nats = NatsServer(folder)
            targets = ["--nats", self.nats.url, "--transport", transport.removeprefix("custom-")]
            self.engines = [Engine.custom(number, seed + number, *targets) for number in range(ENGINES)]
            self.indexers = [Indexer(number, "--nats-server", self.nats.url) for number in range(2)]
            return
        self.engines = [Engine(number, seed + number) for number in range(ENGINES)]
        if transport in ("direct", "peers"):
            flags = ("--workers-file", str(self._workers_file(folder)))
            ports = free_ports(2)
            peers = [("--peers", f"127.0.0.1:{port}") if transport == "peers" else () for port in reversed(ports)]
            self.indexers = [
                Indexer(number, *flags, *peer, port=port)
                for number, (port, peer) in enumerate(zip(ports, peers, strict=True))
            ]
            return
        self.nats = NatsServer(folder)
        nats = ("--nats-server", self.nats.url)
        self.bridges = [self._bridge(engine, *nats, "--transport", transport) for engine in self.engines]
        # Snapshots as often as a minute of load allows: replicas start from them, and the stream is purged behind them.
        snapshots = ("--router-snapshot-threshold", "1000") if transport == "jetstream" else ()
        self.indexers = [Indexer(number, *nats, *snapshots) for number in range(2)]

    async def start(self) -> None:
        """Starts everything."""
        if self.nats is not None:
            await self.nats.start()
        for member in self.members:
            await member.start()

    @property
    def members(self) -> list[Member]:
        """Every process but NATS, in the order in which they start."""
        return [
            *(engine.member for engine in self.engines),
            *self.bridges,
            *(indexer.member for indexer in self.indexers),
        ]

    @staticmethod
    def _bridge(engine: Engine, *flags: str) -> Member:
        port = free_ports(1)[0]
        return Member(
            f"bridge of {engine.worker_id}", "kvscout_bridge.main", "--port", str(port), "--metrics-port", "-1",
            "--worker-id", engine.worker_id, "--model", MODEL, "--block-size", str(BLOCK_SIZE),
            "--http-endpoint", engine.url, "--event-endpoint", f"tcp://127.0.0.1:{engine.events_port}",
            "--replay-endpoint", f"tcp://127.0.0.1:{engine.replay_port}", "--enable-local-indexer", *flags,
        )  # fmt: skip

    def _workers_file(self, folder: Path) -> Path:
        path = folder / "workers.yaml"
        workers = [
            {
                "worker_id": engine.worker_id,
                "model": MODEL,
                "block_size": BLOCK_SIZE,
                "engine": "mock",
                "http_endpoint": engine.url,
                "event_endpoints": [
                    {
                        "endpoint": f"tcp://127.0.0.1:{engine.events_port}",
                        "replay_endpoint": f"tcp://127.0.0.1:{engine.replay_port}",
                    }
                ],
            }
            for engine in self.engines
        ]
        path.write_text(yaml.safe_dump({"workers": workers}))
        return path
