"""What one tenant may have at once: refused with the limit's name and its own use, and nobody else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from support.guarded_services import OURS, guarded_services

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, workers_pb2
from kvscout_common.errors import ResourceExhausted
from kvscout_common.hashing import native_available
from kvscout_common.identity.identity import TokenTable
from kvscout_common.identity.tenant_limits import Limit, TenantLimits, read_limits
from kvscout_common.transport import Transport

BOTH = [Transport.GRPCIO, *([Transport.NATIVE] if native_available() else [])]
SECONDS = 20.0
TOKEN = (("authorization", "Bearer ours-admin"),)
EVERYBODYS = (("authorization", "Bearer everybody's"),)


def limits(*entries: dict[str, Any]) -> TenantLimits:
    made = TenantLimits()
    made.set(read_limits(list(entries)))
    return made


def test_an_entry_counts_before_that_of_every_other_tenant_and_leaves_the_rest_to_it() -> None:
    made = limits({"tenant": "a", "requests": 3}, {"tenant": "*", "requests": 1, "streams": 2})
    assert [made.of("a", limit) for limit in Limit] == [3, None, 2, None]
    assert [made.of("b", limit) for limit in Limit] == [1, None, 2, None]


def test_who_has_all_it_may_have_is_told_how_much_that_is_and_gets_more_when_some_is_over() -> None:
    made = limits({"tenant": "a", "requests": 2})
    made.take(Limit.REQUESTS, "a")
    with made.hold(Limit.REQUESTS, "a"):
        with pytest.raises(ResourceExhausted) as refused:
            made.take(Limit.REQUESTS, "a")
        assert str(refused.value) == "limits.requests: tenant 'a' has 2 requests, its limit is 2"
        assert refused.value.retry_after_seconds == 1.0
        made.take(Limit.REQUESTS, "b")
    made.take(Limit.REQUESTS, "a")


def test_metrics_tell_limits_use_and_refusals_of_tenants_that_have_any() -> None:
    made = limits({"tenant": "a", "requests": 1}, {"tenant": "*", "streams": 5})
    registry = CollectorRegistry()
    registry.register(made)
    made.take(Limit.REQUESTS, "a")
    made.take(Limit.STREAMS, "b")
    with pytest.raises(ResourceExhausted):
        made.take(Limit.REQUESTS, "a")

    def sample(name: str, tenant: str, limit: Limit) -> float | None:
        return registry.get_sample_value(name, {"tenant": tenant, "limit": limit})

    assert sample("kvscout_tenant_limit", "a", Limit.REQUESTS) == 1
    assert sample("kvscout_tenant_used", "a", Limit.REQUESTS) == 1
    assert sample("kvscout_tenant_refusals_total", "a", Limit.REQUESTS) == 1
    assert sample("kvscout_tenant_used", "b", Limit.STREAMS) == 1
    assert sample("kvscout_tenant_limit", "b", Limit.REQUESTS) is None
    made.give_back(Limit.STREAMS, "b")
    assert sample("kvscout_tenant_used", "b", Limit.STREAMS) is None


def test_a_changed_tokens_file_changes_the_limits(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text("tokens: [{token: t, role: client}]\nlimits: [{tenant: a, requests: 1}]")
    table = TokenTable()
    file = table.follow(path)
    assert table.limits.of("a", Limit.REQUESTS) == 1
    path.write_text("tokens: [{token: t, role: client}]")
    file.load()
    assert table.limits.of("a", Limit.REQUESTS) is None


async def refused(running: Any) -> str:
    """What a call is told that is one too many."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return str(caught.value.details())


@pytest.mark.parametrize("transport", BOTH)
async def test_streams_workers_and_bookings_of_a_tenant_are_limited_at_each_service(transport: Transport) -> None:
    own = f"[{{tenant: {OURS}, streams: 1, workers: 1, bookings: 1}}]"
    async with guarded_services(transport, "indexer", "scheduler", limits=own) as services:
        for service, method in (("indexer", "StreamFindMatches"), ("scheduler", "Lifecycle")):
            address = f"127.0.0.1:{services[service].port}"
            async with grpc.aio.insecure_channel(address) as channel:
                await streams_are_limited(channel, service, method)
                stub: Any = (
                    indexer_pb2_grpc.IndexerStub(channel)
                    if service == "indexer"
                    else scheduler_pb2_grpc.SchedulerStub(channel)
                )
                await workers_are_limited(stub)
                if service == "scheduler":
                    await bookings_are_limited(stub)
                    registry = CollectorRegistry()
                    registry.register(services[service].app.limits)
                    for limit in ("bookings", "streams", "workers"):
                        told = {"tenant": OURS, "limit": limit}
                        assert registry.get_sample_value("kvscout_tenant_used", told) == (limit != "streams"), limit
                        assert registry.get_sample_value("kvscout_tenant_refusals_total", told) == 1, limit


async def streams_are_limited(channel: grpc.aio.Channel, service: str, method: str) -> None:
    """The second one is refused, one of a service is not, and when the first is over there may be another."""
    make: Any = channel.stream_stream(f"/kvscout.v1.{service.capitalize()}/{method}")
    hello = (
        indexer_pb2.StreamFindMatchesRequest(tenant=OURS)
        if service == "indexer"
        else scheduler_pb2.LifecycleRequest(tenant=OURS, hello=scheduler_pb2.LifecycleHello(owner_id="o"))
    ).SerializeToString()
    first = make(metadata=TOKEN, timeout=SECONDS)
    await first.write(hello)
    await first.read()
    second = make(metadata=TOKEN, timeout=SECONDS)
    assert await second.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await second.details() == f"limits.streams: tenant '{OURS}' has 1 streams, its limit is 1"
    service_own = make(metadata=EVERYBODYS, timeout=SECONDS)
    await service_own.write(hello)
    await service_own.read()
    for call in (first, service_own):
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
    third = make(metadata=TOKEN, timeout=SECONDS)
    await third.write(hello)
    assert await third.read() is not grpc.aio.EOF
    await third.done_writing()
    await third.code()


async def workers_are_limited(stub: Any) -> None:
    """The second one is refused; the first may be registered again; one removed makes room."""

    def registering(worker_id: str) -> Any:
        worker = workers_pb2.Worker(worker_id=worker_id, model="m", tenant=OURS, block_size=16)
        request = workers_pb2.RegisterWorkerRequest(tenant=OURS, worker=worker)
        return stub.RegisterWorker(request, metadata=TOKEN, timeout=SECONDS)

    await registering("w0")
    await registering("w0")
    assert await refused(registering("w1")) == f"limits.workers: tenant '{OURS}' has 1 workers, its limit is 1"
    removal = workers_pb2.RemoveWorkerRequest(tenant=OURS, worker_id="w0")
    await stub.RemoveWorker(removal, metadata=TOKEN, timeout=SECONDS)
    await registering("w1")


async def bookings_are_limited(stub: Any) -> None:
    """The second one is refused, whoever asks for it; one freed makes room."""

    def booking(request_id: str, token: Any = TOKEN) -> Any:
        request = scheduler_pb2.SelectRequest(tenant=OURS, model="m", isl_tokens=16, request_id=request_id)
        return stub.SelectAndReserve(request, metadata=token, timeout=SECONDS)

    await booking("r0")
    expected = f"limits.bookings: tenant '{OURS}' has 1 bookings, its limit is 1"
    assert await refused(booking("r1", EVERYBODYS)) == expected
    free = scheduler_pb2.FreeRequest(tenant=OURS, model="m", request_id="r0")
    await stub.Free(free, metadata=TOKEN, timeout=SECONDS)
    await booking("r1")
