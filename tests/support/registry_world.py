"""Services that share a registry in a real NATS, as far as the registry goes, for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvscout_common.nats.config import NatsConfig
from kvscout_common.nats.link import NatsLink
from kvscout_common.registry.nats import NatsRegistry
from kvscout_common.registry.registry import Registry, WorkerName
from kvscout_common.registry.worker_bucket import WorkerBucket
from kvscout_common.worker import WorkerSpec
from support.nats_server import NatsServer, nats_server
from support.processes import eventually

A = WorkerSpec("a", "m", 16)
NAME = WorkerName("default", "a")


class Node:
    """One service as far as the registry goes; its clock can be put forward."""

    def __init__(self, url: str, namespace: str) -> None:
        self.link = NatsLink(NatsConfig((url,), namespace), "test")
        self.skipped = 0.0
        self.registry = Registry(self.clock)
        self.received: list[str] = []
        self.registry.listen(self)
        self.shared = NatsRegistry(self.link, self.registry, self.clock)
        self.bucket = WorkerBucket(self.link)
        self._tasks: list[asyncio.Task[None]] = []

    def clock(self) -> float:
        return time.monotonic() + self.skipped

    def worker_added(self, spec: WorkerSpec) -> None:
        self.received.append(f"+{spec.worker_id}")

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        self.received.append(f"~{new.worker_id}")

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        self.received.append(f"-{spec.worker_id}:{reason}")

    @property
    def worker_ids(self) -> list[str]:
        return sorted(entry.spec.worker_id for entry in self.registry.entries())

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self.link.run()), asyncio.create_task(self.shared.run())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended
        await self.link.close()

    async def until_followed(self) -> None:
        await self.until(lambda: self.link.connected and not self.shared.problem and not self.link.problem, "followed")

    async def until(self, condition: Callable[[], object], what: str = "") -> None:
        await eventually(condition, what=what or f"a condition; listed: {self.worker_ids}, {self.shared.problem!r}")

    async def raw(self, key: str, value: bytes) -> None:
        await (await self.link.require()).publish(f"$KV.{self.link.names.workers_bucket}.{key}", value)


async def until_listed(node: Node, worker_ids: list[str]) -> None:
    await node.until(lambda: node.worker_ids == worker_ids)


async def until_spec(node: Node, spec: WorkerSpec) -> None:
    await node.until(lambda: node.registry.get(*NAME).spec == spec)


class World:
    """A server and the nodes of one namespace of it."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.nodes: list[Node] = []

    async def node(self, namespace: str = "test") -> Node:
        node = Node(self.server.url, namespace)
        self.nodes.append(node)
        node.start()
        await node.until_followed()
        return node


@asynccontextmanager
async def making_world() -> AsyncIterator[World]:
    async with nats_server() as server:
        world = World(server)
        try:
            yield world
        finally:
            for node in world.nodes:
                await node.stop()
