"""Asks services, and the engines that they know, what they say of themselves.

It begins with the addresses that it is given. A gateway names its indexers and schedulers, registrations name bridges
and engines; each is queried once, many at a time, none for longer than a few seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvscout.v1 import (
    bridge_pb2,
    bridge_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    indexer_pb2,
    indexer_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
    workers_pb2,
)
from kvscout_common.doctor.snapshot import (
    HELPER_KINDS,
    PROXY_COUNTERS,
    Engine,
    Proxy,
    Service,
    ServiceKind,
    Snapshot,
)
from kvscout_common.doctor.worker_health import judged_healths
from kvscout_common.endpoints import address_problem
from kvscout_common.errors import InvalidArgument, KvscoutError, NotFound, Unavailable, Unimplemented
from kvscout_common.http.engine_http import NoAnswer, read_json
from kvscout_common.http.factory import http_client
from kvscout_common.http.http import HttpClient
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.identity.http_probe import http_trouble
from kvscout_common.identity.tls_probe import tls_trouble
from kvscout_common.plain_text import printable
from kvscout_common.registry.engine_facts import QUERIED_ENGINES
from kvscout_common.registry.engine_query import query_engine
from kvscout_common.registry.registry import WorkerName
from kvscout_common.registry.worker_proto import spec_from_proto
from kvscout_common.rpc.channel import call, open_channel
from kvscout_common.worker import ALL_TENANTS, WorkerSpec

CONCURRENT_CALLS = 32
HEALTH_SECONDS = 3.0
"""Longest wait for a service to say what it is: that takes it no work."""
MAX_ASKED = 1000
"""Largest number of services, and of engines, that are queried; more are left out."""

_STUBS: dict[ServiceKind, Callable[[Any], Any]] = {
    ServiceKind.GATEWAY: gateway_pb2_grpc.GatewayStub,
    ServiceKind.INDEXER: indexer_pb2_grpc.IndexerStub,
    ServiceKind.SCHEDULER: scheduler_pb2_grpc.SchedulerStub,
    ServiceKind.BRIDGE: bridge_pb2_grpc.BridgeStub,
}
_NAMES = {
    ServiceKind.GATEWAY: gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name,
    ServiceKind.INDEXER: indexer_pb2.DESCRIPTOR.services_by_name["Indexer"].full_name,
    ServiceKind.SCHEDULER: scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name,
    ServiceKind.BRIDGE: bridge_pb2.DESCRIPTOR.services_by_name["Bridge"].full_name,
}


@dataclass(frozen=True, slots=True)
class NamedService:
    """A service to ask."""

    address: str
    kind: ServiceKind | None = None
    """None = find out."""
    named_by: str = ""

    @property
    def place(self) -> str:
        """Return its address in one form, however it was written."""
        host, colon, port = self.address.rpartition(":")
        return f"127.0.0.1:{port}" if colon and host == "localhost" else self.address


class Collection:
    """Takes snapshots of one kvscout."""

    def __init__(
        self,
        security: ClientSecurity,
        *,
        tenant: str = ALL_TENANTS,
        timeout_seconds: float = 5.0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Ask nobody yet.

        Args:
            security: How services are talked to.
            tenant: Whose workers are queried; "*" = all that the caller may see.
            timeout_seconds: For each answer.
            wall_clock: Seconds since the Unix epoch.
        """
        self._security = security
        self._tenant = tenant
        self._timeout = timeout_seconds
        self._clock = wall_clock
        self._places = asyncio.Semaphore(CONCURRENT_CALLS)
        self._checks_workers = False
        """Gateways check the health of their workers before they answer."""

    async def snapshot(
        self,
        named: Iterable[NamedService],
        *,
        known: Iterable[Service] = (),
        engines: bool = True,
        proxies: Sequence[str] = (),
    ) -> Snapshot:
        """Ask these, and whom they name; never fails: who does not answer is part of the snapshot.

        Args:
            named: Where to begin.
            known: Services that need not be queried: the caller is one.
            engines: Ask the workers' engines, too.
            proxies: Base URLs of the admin interfaces of Envoys to ask.
        """
        services = list(known)
        is_own = any(one.kind is ServiceKind.GATEWAY for one in services)
        self._checks_workers = engines
        queried: set[tuple[ServiceKind | None, str]] = {(one.kind, one.address) for one in services}
        waiting, left_out = [*named, *(other for service in services for other in _named_by(service))], 0
        while waiting:
            due = []
            for one in waiting:
                if (one.kind, one.place) not in queried:
                    queried.add((one.kind, one.place))
                    due.append(one)
            room = MAX_ASKED - len(services)
            left_out += max(0, len(due) - room)
            answered = await asyncio.gather(*(self._ask(one) for one in due[:room]))
            for one, service in zip(due, answered, strict=False):
                if one.kind is not service.kind and (service.kind, one.place) in queried:
                    continue  # a service that was named otherwise, too
                queried.add((service.kind, one.place))
                services.append(service)
            waiting = [other for service in answered for other in _named_by(service)]
        services = await self._asked_again(services)
        services.sort(key=lambda service: list(ServiceKind).index(service.kind) if service.kind else len(ServiceKind))
        snapshot = Snapshot(tuple(services), left_out=left_out, is_own=is_own)
        specs = _specs(snapshot) if engines else []
        if not specs and not proxies:
            # The client of HTTP takes longer to load than the services take to answer.
            return snapshot
        async with http_client() as http:
            found = await asyncio.gather(*(self._ask_engine(http, spec) for spec in specs[:MAX_ASKED]))
            asked_proxies = await asyncio.gather(*(self._ask_proxy(http, url.rstrip("/")) for url in proxies))
        return replace(
            snapshot,
            engines=tuple(found),
            left_out=left_out + max(0, len(specs) - MAX_ASKED),
            proxies=tuple(asked_proxies),
        )

    async def _asked_again(self, services: list[Service]) -> list[Service]:
        """Ask gateways again that spoke well of a service which then did not answer: it may have begun to hang."""
        silent = {service.address for service in services if service.error and service.actual is None}
        doubtful = [
            place
            for place, service in enumerate(services)
            if isinstance(service.status, gateway_pb2.GatewayGetStatusResponse)
            and any(helper.healthy and helper.address in silent for helper in service.status.helpers)
        ]
        asked = [
            NamedService(services[place].address, ServiceKind.GATEWAY, services[place].named_by) for place in doubtful
        ]
        for place, service in zip(doubtful, await asyncio.gather(*map(self._ask, asked)), strict=True):
            if not service.error:
                services[place] = service
        return services

    async def _ask(self, named: NamedService) -> Service:
        if problem := address_problem(named.address):
            return Service(named.address, named.kind, named_by=named.named_by, error=f"is not an address: {problem}")
        async with self._places:
            channel = open_channel(named.address, self._security)
            try:
                return await self._answers(channel, named)
            except KvscoutError as error:
                trouble = ""
                if isinstance(error, Unavailable) and not error.answered:
                    trouble = await tls_trouble(named.address, self._security) or await http_trouble(named.address)
                error_text = printable(f"it {trouble}" if trouble else str(error))
                return Service(named.address, named.kind, named_by=named.named_by, error=error_text)
            finally:
                await channel.close()

    async def _answers(self, channel: Any, named: NamedService) -> Service:
        kind, serving = await self._health(channel, [named.kind] if named.kind is not None else list(ServiceKind))
        service = Service(named.address, kind or named.kind, named_by=named.named_by, serving=serving)
        if kind is None:
            other, _ = await self._health(channel, [one for one in ServiceKind if one is not named.kind])
            answers = (
                f"it is a service of another kind, {other}" if other is not None else "something else answers there"
            )
            expected = f"no {named.kind}" if named.kind is not None else "no service of kvscout"
            return replace(service, actual=other, error=f"{expected}: {answers}")
        stub = _STUBS[kind](channel)
        request = types_pb2.GetStatusRequest(tenant=self._tenant, check_workers=self._checks_workers)
        sent = self._clock()
        status = await call(stub.GetStatus, request, timeout=self._timeout)
        received = self._clock()
        if status.service.HasField("clock_unix_seconds"):
            service = replace(
                service,
                clock_offset_seconds=status.service.clock_unix_seconds - (sent + received) / 2,
                clock_doubt_seconds=(received - sent) / 2,
            )
        untold: list[str] = []
        workers = replicas = None
        if kind is not ServiceKind.BRIDGE:
            every = workers_pb2.ListWorkersRequest(tenant=self._tenant)
            workers = await self._or_none(stub.ListWorkers, every, "its workers", untold)
        if kind is ServiceKind.SCHEDULER:
            tenant = "" if self._tenant == ALL_TENANTS else self._tenant
            replicas = await self._or_none(
                stub.GetReplicas, scheduler_pb2.GetReplicasRequest(tenant=tenant), "its replicas", untold
            )
        return replace(
            service,
            status=status,
            workers=tuple(workers.workers) if workers is not None else None,
            replicas=replicas,
            untold=tuple(untold),
        )

    async def _health(self, channel: Any, kinds: Sequence[ServiceKind]) -> tuple[ServiceKind | None, bool]:
        """Return which of some kinds a service is, and whether it serves; None = it is none of them.

        Raises:
            KvscoutError: It does not answer.
        """
        probe: Any = health_pb2_grpc.HealthStub(channel)
        for kind in kinds:
            request = health_pb2.HealthCheckRequest(service=_NAMES[kind])
            try:
                answer = await call(probe.Check, request, timeout=min(self._timeout, HEALTH_SECONDS))
            except (NotFound, Unimplemented):
                continue
            return kind, answer.status == health_pb2.HealthCheckResponse.SERVING
        return None, False

    async def _or_none(self, method: Any, request: Any, what: str, untold: list[str]) -> Any:
        try:
            return await call(method, request, timeout=self._timeout)
        except KvscoutError as error:
            untold.append(f"{what}: {printable(str(error))}")
            return None

    async def _ask_engine(self, http: HttpClient, spec: WorkerSpec) -> Engine:
        name = WorkerName(spec.tenant, spec.worker_id)
        async with self._places:
            try:
                async with asyncio.timeout(self._timeout):
                    facts = await query_engine(http, spec.http_endpoint, spec.engine)
            except Unavailable as error:
                reached = not isinstance(error, NoAnswer)
                return Engine(name, spec.http_endpoint, error=printable(str(error)), reached=reached)
            except TimeoutError:
                error_text = f"{spec.http_endpoint} does not answer within {self._timeout:g} s"
                return Engine(name, spec.http_endpoint, error=error_text)
        return Engine(name, spec.http_endpoint, facts, reached=True)

    async def _ask_proxy(self, http: HttpClient, url: str) -> Proxy:
        page = f"{url}/stats?format=json&usedonly&filter={quote(PROXY_COUNTERS, safe='')}"
        async with self._places:
            try:
                stats = await read_json(http, page, timeout_seconds=self._timeout)
                return Proxy(url, {str(stat["name"]): int(stat["value"]) for stat in stats["stats"] if "value" in stat})
            except Unavailable as error:
                return Proxy(url, error=printable(str(error)))
            except (KeyError, TypeError, ValueError):
                return Proxy(url, error="no admin interface of Envoy: its /stats has another form")


def _named_by(service: Service) -> list[NamedService]:
    """Return the services that one names."""
    helpers = service.status.helpers if isinstance(service.status, gateway_pb2.GatewayGetStatusResponse) else ()
    bridges = {
        entry.worker.bridge_endpoint: entry.worker.worker_id
        for entry in service.workers or ()
        if entry.worker.bridge_endpoint
    }
    return [
        *(
            NamedService(one.address, HELPER_KINDS[one.kind], service.address)
            for one in helpers
            if one.kind in HELPER_KINDS
        ),
        *(NamedService(address, ServiceKind.BRIDGE, f"worker {worker_id}") for address, worker_id in bridges.items()),
    ]


def _specs(snapshot: Snapshot) -> list[WorkerSpec]:
    """Workers whose engines can be queried, but for those that a gateway has just waited for in vain."""
    down = {name.worker for name, health in judged_healths(snapshot).items() if health.is_down}
    found = []
    for name, worker in snapshot.workers.items():
        if name in down:
            continue
        try:
            spec = spec_from_proto(worker)
        except InvalidArgument:
            continue  # a newer release's, of which this one knows less
        if spec.http_endpoint and spec.engine in QUERIED_ENGINES:
            found.append(spec)
    return found
