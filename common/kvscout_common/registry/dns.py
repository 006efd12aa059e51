"""Workers behind a DNS name, such as a headless service: one an address, followed as the name resolves.

::

    dns://vllm.prod.svc:8000?role=decode&block_size=16

The parameters are fields of `kvscout.v1.Worker`, written as in the workers file, that all of its workers share. What
distinguishes one from another is made from the address: `worker_id` and `http_endpoint`; model, block size, event
endpoints and size of the cache come from the engine where they are left out. A lookup that fails changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvscout_common.endpoints import bracketed
from kvscout_common.errors import ConfigError, InvalidArgument, Unavailable
from kvscout_common.http.factory import http_client
from kvscout_common.http.http import HttpClient
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.registry.engine_discovery import EngineQuery
from kvscout_common.registry.engine_facts import EngineFacts, lacks_event_endpoints
from kvscout_common.registry.engine_query import query_engine
from kvscout_common.registry.registry import Registry, Source
from kvscout_common.registry.worker_template import WorkerTemplate, fields_of
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.worker import ALL_TENANTS, WorkerSpec

log = logging.getLogger("kvscout.registry")

RESOLVE_SECONDS = 5.0
"""Seconds between two lookups of a name: a few times within the readiness of a pod."""
LOOKUP_SECONDS = 5.0
MAX_ADDRESSES = 4096
CONCURRENT_QUERIES = 32
FIELD = "workers_dns"
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class DnsName:
    """One name to follow."""

    url: str
    host: str
    port: int
    shared: WorkerTemplate

    @classmethod
    def parse(cls, url: str) -> DnsName:
        """Read `dns://name:port?fields`.

        Raises:
            ConfigError: It is none, or a field is wrong.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r}: {error}", field=FIELD) from error
        if parts.scheme != "dns" or not host or not port or parts.path not in ("", "/"):
            raise ConfigError(f"{url!r} is not dns://name:port", field=FIELD)
        return cls(url, host, port, WorkerTemplate(fields_of(url, parts.query, FIELD), FIELD))

    def worker(self, address: str, facts: EngineFacts | None) -> WorkerSpec:
        """Return the worker at an address.

        Raises:
            Unavailable: The engine does not report what the URL leaves open.
            InvalidArgument: What it reports is wrong.
        """
        where = f"{bracketed(address)}:{self.port}"
        spec = self.shared.worker(where, f"http://{where}", facts)
        return spec if facts is None else facts.complete(spec).validate()


@dataclass(slots=True)
class _State:
    name: DnsName
    addresses: tuple[str, ...] = ()
    facts: dict[str, EngineFacts] = field(default_factory=dict)
    problem: str = ""
    unknown: dict[str, str] = field(default_factory=dict)
    """Addresses whose engine has not reported what is needed, and why."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a name, of one family: where there are both, each host has one of each.

    Raises:
        OSError: It has none, or the lookup failed.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in found if entry[0] == found[0][0]})


class DnsWorkers:
    """Keeps a registry equal to what names resolve to. `run` is a task of the process.

    Args:
        urls: The names, as `DnsName.parse` reads them.
        registry: What is kept.
        resolve: How a name is looked up.
        query: Query of an engine.

    Raises:
        ConfigError: A URL is wrong.
    """

    def __init__(
        self, urls: Sequence[str], registry: Registry, resolve: Resolve = resolve, query: EngineQuery = query_engine
    ) -> None:
        self._names = [_State(DnsName.parse(url)) for url in urls]
        self._registry = registry
        self._resolve = resolve
        self._query = query
        self._slots = asyncio.Semaphore(CONCURRENT_QUERIES)
        self._log = RateLimitedLog(log)
        self.read = asyncio.Event()
        """Set after the first round, whatever came of it."""

    def warnings(self) -> list[Warned]:
        """Return what an operator should know, one sentence each."""
        found: list[Warned] = [
            TenantWarning(ALL_TENANTS, f"{state.name.url}: {state.problem}") for state in self._names if state.problem
        ]
        return found + [
            TenantWarning(ALL_TENANTS, f"{address} of {state.name.url} is not a worker yet: {why}")
            for state in self._names
            for address, why in sorted(state.unknown.items())
        ]

    async def run(self) -> None:
        """Follow the names for ever."""
        async with http_client() as http:
            while True:
                await self.follow(http)
                await asyncio.sleep(RESOLVE_SECONDS)

    async def follow(self, http: HttpClient) -> None:
        """Look up every name once, and query engines that are new."""
        specs: dict[tuple[str, str], WorkerSpec] = {}
        for state, workers in zip(
            self._names, await asyncio.gather(*(self._workers(http, state) for state in self._names)), strict=True
        ):
            for spec in workers:
                specs.setdefault((spec.tenant, spec.worker_id), spec)
            if state.problem:
                self._log.warning(state.name.url, "%s: %s", state.name.url, state.problem)
        self._registry.replace_source(Source.DNS, specs.values())
        self.read.set()

    async def _workers(self, http: HttpClient, state: _State) -> list[WorkerSpec]:
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                addresses = tuple(await self._resolve(state.name.host, state.name.port))
        except (OSError, TimeoutError) as error:
            state.problem = f"not resolved, its {len(state.addresses)} addresses stay: {str(error) or 'timeout'}"
        else:
            state.problem = "" if len(addresses) <= MAX_ADDRESSES else f"more than {MAX_ADDRESSES} addresses"
            state.addresses = addresses[:MAX_ADDRESSES]
        state.facts = {address: facts for address, facts in state.facts.items() if address in state.addresses}
        state.unknown.clear()
        found = await asyncio.gather(*(self._worker(http, state, address) for address in state.addresses))
        return [spec for spec in found if spec is not None]

    async def _worker(self, http: HttpClient, state: _State, address: str) -> WorkerSpec | None:
        name = state.name
        if not name.shared.open and not lacks_event_endpoints(plain := name.worker(address, None)):
            return plain
        try:
            if address not in state.facts:
                async with self._slots:
                    url = f"http://{bracketed(address)}:{name.port}"
                    state.facts[address] = await self._query(http, url, name.shared.engine)
            spec = name.worker(address, state.facts[address])
            self._registry.admit(spec)
        except (Unavailable, InvalidArgument) as error:
            state.facts.pop(address, None)
            state.unknown[address] = str(error)
            return None
        return spec
