"""Sources of a service's registry, as configured: worker rpcs, a watched file, a bucket in NATS, DNS, Kubernetes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from kvscout.v1 import types_pb2
from kvscout_common.process.ticks import sleep_to_tick
from kvscout_common.registry.engine_discovery import Discovery
from kvscout_common.registry.registrar import OwnRegistrar, Registrar
from kvscout_common.registry.registry import Registry, any_worker
from kvscout_common.registry.workers_file import WorkersFile
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.settings.config import ServerConfig
from kvscout_common.worker import ALL_TENANTS, WorkerSpec

if TYPE_CHECKING:
    from kvscout_common.nats.config import NatsConfig
    from kvscout_common.nats.link import NatsLink
    from kvscout_common.registry.dns import DnsWorkers
    from kvscout_common.registry.kubernetes import KubernetesWorkers
    from kvscout_common.registry.nats import NatsRegistry

log = logging.getLogger("kvscout.registry")

WARM_SECONDS = 5.0
"""Longest time at start that health waits for the workers that others know."""
EXPIRY_SECONDS = 1.0
"""Seconds between two looks at leases: the length of the shortest lease."""

Task = Callable[[], Coroutine[Any, Any, None]]


def file_warnings(file: WorkersFile) -> list[Warned]:
    """Return what is wrong with a workers file, whose workers are of any tenant."""
    return [TenantWarning(ALL_TENANTS, f"workers file not in effect: {file.error}")] if file.error else []


class Backends:
    """The backends of one registry; the workers file is read immediately.

    Args:
        registry: What they fill.
        config: Which there are.
        link: NATS, which then is where registrations are written to; None = they stay with this service. Whoever made
            the link runs it.

    Raises:
        ConfigError: If the file, a DNS name or a selector of pods is wrong.
    """

    def __init__(self, registry: Registry, config: ServerConfig, link: NatsLink | None = None) -> None:
        self.registry = registry
        self.link = link
        """NATS; None = this process runs without."""
        self.registrar: Registrar = OwnRegistrar(registry)
        """Registrar of worker rpcs."""
        self.tasks: dict[str, Task] = {"registry-leases": self._expire_leases}
        """Tasks that run beside the server, by name."""
        self._warnings: list[Callable[[], Sequence[Warned]]] = []
        self._read: list[asyncio.Event] = []
        if config.workers_file is not None:
            self._follow_file(WorkersFile(config.workers_file, registry))
        # Imported where they are used: what they need costs the start of a process more than all else.
        if link is not None:
            from kvscout_common.registry.nats import NatsRegistry

            self._follow_nats(NatsRegistry(link, registry))
        if config.workers_dns:
            from kvscout_common.registry.dns import DnsWorkers

            self._follow("workers-dns", DnsWorkers(config.workers_dns, registry))
        if config.workers_k8s:
            from kvscout_common.registry.kubernetes import KubernetesWorkers

            self._follow("workers-k8s", KubernetesWorkers(config.workers_k8s, registry, config.kubeconfig))

    @classmethod
    def of_process(
        cls,
        program: str,
        config: ServerConfig,
        nats: NatsConfig | None,
        admit: Callable[[WorkerSpec], None] = any_worker,
    ) -> Backends:
        """Make the registry of a process, with its sources and its connection to NATS, which runs among `tasks`.

        Args:
            program: Name of the connection to NATS, such as "kvscout-indexer".
            config: Sources of workers.
            nats: None = runs without NATS.
            admit: As of `Registry`.

        Raises:
            ConfigError: As the constructor.
        """
        link = nats.link(program) if nats is not None else None
        backends = cls(Registry(time.monotonic, admit), config, link)
        backends.discover()
        if link is not None:
            backends.tasks["nats"] = link.run
        return backends

    async def close(self) -> None:
        """Close the connection to NATS."""
        if self.link is not None:
            await self.link.close()

    async def warm(self) -> None:
        """Wait until NATS, DNS and Kubernetes have listed their workers, or `WARM_SECONDS`."""
        try:
            async with asyncio.timeout(WARM_SECONDS):
                for read in self._read:
                    await read.wait()
        except TimeoutError:
            log.warning("serving before every worker source was read")

    def discover(self) -> None:
        """Query engines for what registrations leave open of their events."""
        discovery = Discovery(self.registry)
        self.tasks["discovery"] = discovery.run
        self._warnings.append(discovery.warnings)

    def warnings(self) -> list[Warned]:
        """Return what an operator should know of them, one sentence each."""
        return [warning for source in self._warnings for warning in source()]

    def nats(self) -> types_pb2.NatsStatus | None:
        """Return the connection to NATS, for GetStatus; None = there is none."""
        return self.link.status() if self.link is not None else None

    def _follow_file(self, file: WorkersFile) -> None:
        file.load()
        self.tasks["workers-file"] = file.watch
        self._warnings.append(lambda: file_warnings(file))

    def _follow_nats(self, shared: NatsRegistry) -> None:
        self.registrar = shared
        self._follow("registry-nats", shared)

    def _follow(self, name: str, source: NatsRegistry | DnsWorkers | KubernetesWorkers) -> None:
        self.tasks[name] = source.run
        self._read.append(source.read)
        self._warnings.append(source.warnings)

    async def _expire_leases(self) -> None:
        while True:
            await sleep_to_tick(EXPIRY_SECONDS)
            self.registry.expire()
