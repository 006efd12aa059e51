"""Workers behind DNS names: one an address, kept while lookups fail."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest
from support.processes import eventually, running

from kvscout.v1 import indexer_pb2_grpc, workers_pb2
from kvscout_common.errors import ConfigError, FailedPrecondition, Unavailable
from kvscout_common.http.factory import http_client
from kvscout_common.http.http import HttpClient
from kvscout_common.registry.dns import DnsName, DnsWorkers, resolve
from kvscout_common.registry.engine_facts import EngineFacts
from kvscout_common.registry.registry import Registry, Source
from kvscout_common.rpc.channel import call, open_channel
from kvscout_common.rpc.service_info import shown
from kvscout_common.worker import EngineKind, EventEndpoint, Role, WorkerSpec

FULL = "dns://svc:8000?model=m&block_size=16&transport=none&role=decode&labels.zone=a&can_fallback=true"


class Names:
    """A resolver that answers as told."""

    def __init__(self, **answers: Sequence[str] | OSError) -> None:
        self.answers = answers

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        answer = self.answers[host]
        if isinstance(answer, OSError):
            raise answer
        return answer


class Engines:
    """Engines that are up, and how often each was asked."""

    def __init__(self, **facts: Any) -> None:
        self.up: set[str] = set()
        self.asked: list[str] = []
        self.facts = {"models": ("m",), "block_size": 16, "total_kv_blocks": 9, **facts}

    async def __call__(self, http: HttpClient, url: str, kind: EngineKind | None) -> EngineFacts:
        self.asked.append(url)
        if url not in self.up:
            raise Unavailable("not up")
        return EngineFacts(url, (EventEndpoint(0, "tcp://h:1"),), **self.facts)


async def follow(workers: DnsWorkers) -> None:
    async with http_client() as http:
        await workers.follow(http)


def listed(registry: Registry) -> list[str]:
    return [entry.spec.worker_id for entry in registry.entries()]


async def test_every_address_is_a_worker_with_what_the_url_says() -> None:
    registry, names = Registry(lambda: 0.0), Names(svc=["10.0.0.1", "fd00::1"])
    workers = DnsWorkers([FULL], registry, names, Engines())
    await follow(workers)
    assert listed(registry) == ["10.0.0.1:8000", "[fd00::1]:8000"]
    entry = registry.get("default", "[fd00::1]:8000")
    assert (entry.source, entry.spec.http_endpoint) == (Source.DNS, "http://[fd00::1]:8000")
    assert (entry.spec.role, entry.spec.labels, entry.spec.can_fallback) == (Role.DECODE, {"zone": "a"}, True)
    with pytest.raises(FailedPrecondition, match="DNS"):
        registry.remove("default", "10.0.0.1:8000")
    names.answers["svc"] = ["10.0.0.2"]
    await follow(workers)
    assert listed(registry) == ["10.0.0.2:8000"]


async def test_a_lookup_that_fails_keeps_what_is_known_and_says_so() -> None:
    registry, names = Registry(lambda: 0.0), Names(svc=["10.0.0.1"])
    workers = DnsWorkers([FULL], registry, names, Engines())
    await follow(workers)
    names.answers["svc"] = OSError("no such name")
    await follow(workers)
    assert listed(registry) == ["10.0.0.1:8000"]
    [warning] = shown(workers.warnings())
    assert "no such name" in warning and "svc" in warning
    names.answers["svc"] = ["10.0.0.1"]
    await follow(workers)
    assert shown(workers.warnings()) == []


async def test_what_is_left_out_is_asked_of_each_engine_once_it_is_up() -> None:
    registry, names, engines = Registry(lambda: 0.0), Names(svc=["10.0.0.1", "10.0.0.2"]), Engines()
    workers = DnsWorkers(["dns://svc:8000"], registry, names, engines)
    engines.up = {"http://10.0.0.1:8000"}
    await follow(workers)
    assert listed(registry) == ["10.0.0.1:8000"]
    assert registry.get("default", "10.0.0.1:8000").spec == WorkerSpec(
        "10.0.0.1:8000",
        "m",
        16,
        http_endpoint="http://10.0.0.1:8000",
        event_endpoints=(EventEndpoint(0, "tcp://h:1"),),
        total_kv_blocks=9,
    )
    assert len(shown(workers.warnings())) == 1 and "10.0.0.2" in shown(workers.warnings())[0]
    engines.up.add("http://10.0.0.2:8000")
    await follow(workers)
    assert listed(registry) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert sorted(engines.asked) == ["http://10.0.0.1:8000"] + 2 * ["http://10.0.0.2:8000"]


async def test_an_engine_that_does_not_tell_its_block_size_is_no_worker_and_says_why() -> None:
    registry, engines = Registry(lambda: 0.0), Engines(block_size=0)
    workers = DnsWorkers(["dns://svc:8000"], registry, Names(svc=["10.0.0.1"]), engines)
    engines.up = {"http://10.0.0.1:8000"}
    await follow(workers)
    assert listed(registry) == []
    assert "block size" in shown(workers.warnings())[0]


async def test_the_file_wins_over_dns_and_dns_over_the_rest() -> None:
    registry = Registry(lambda: 0.0)
    registry.replace_source(Source.FILE, [WorkerSpec("10.0.0.1:8000", "file", 16)])
    registry.register(WorkerSpec("10.0.0.2:8000", "rpc", 16))
    workers = DnsWorkers([FULL], registry, Names(svc=["10.0.0.1", "10.0.0.2"]), Engines())
    await follow(workers)
    assert [(e.spec.model, e.source) for e in registry.entries()] == [("file", Source.FILE), ("m", Source.DNS)]


@pytest.mark.parametrize(
    "url",
    ["svc:8000", "dns://svc", "dns://:80", "dns://svc:99999", "http://svc:80", "dns://svc:80/path", "dns://svc:80?speed=1",
     "dns://svc:80?block_size=x", "dns://svc:80?worker_id=a", "dns://svc:80?model=a&model=b", "dns://svc:80?role=king"],
)  # fmt: skip
def test_a_wrong_url_is_refused_by_the_name_of_its_flag(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        DnsName.parse(url)
    assert str(refused.value.field).startswith("workers_dns")


async def test_names_of_this_machine_are_resolved() -> None:
    assert "127.0.0.1" in await resolve("127.0.0.1", 80)
    with pytest.raises(socket.gaierror):
        await resolve("kvscout.invalid", 80)


async def test_a_host_with_addresses_of_both_families_is_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(*_: object, **__: object) -> list[tuple[Any, ...]]:
        v6 = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (f"fd00::{n}", 80, 0, 0)) for n in (2, 1)]
        return [*v6, *((socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.0.{n}", 80)) for n in (2, 1))]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert await resolve("svc", 80) == ["fd00::1", "fd00::2"]


async def test_a_service_follows_the_name_it_is_told() -> None:
    url = "dns://127.0.0.1:9?model=m&block_size=16&transport=none"
    async with running("kvscout_indexer.main", "--workers-dns", url) as indexer:
        channel = open_channel(indexer.address)
        stub: indexer_pb2_grpc.IndexerAsyncStub = indexer_pb2_grpc.IndexerStub(channel)
        try:

            async def there() -> list[tuple[str, int]]:
                answer = await call(stub.ListWorkers, workers_pb2.ListWorkersRequest(), timeout=5)
                return [(entry.worker.worker_id, entry.source) for entry in answer.workers]

            assert await eventually(there) == [("127.0.0.1:9", workers_pb2.REGISTRATION_SOURCE_DNS)]
        finally:
            await channel.close()
